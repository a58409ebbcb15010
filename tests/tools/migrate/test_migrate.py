"""`lptune migrate`: published configs of five trainers, and what each key becomes.

The files in configs/ have the keys and values of published configs (source in their first lines), not their
comments. That of torchtitan is what torchtitan wrote at b5bcd76c6, without the layers of the model.
"""

import copy
import inspect
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from lptune.base.errors import UserError
from lptune.cli import catalog, recipe
from lptune.tools.migrate import reading
from lptune.tools.migrate.draft import UNKNOWN, Draft, leaves
from lptune.tools.migrate.reading import migrate
from lptune.tools.migrate.report import counts, to_text, to_yaml
from lptune.training.schedule import learning_rate

CONFIGS = sorted((Path(__file__).parent / "configs").iterdir())
NAMED = {path.stem: path for path in CONFIGS}

torchtune_8b = NAMED["torchtune_llama3_1_8b_full"]


def settings(draft: Draft) -> dict[str, Any]:
    return {each.ours: each.value for each in draft.settings}


def written(tmp_path: Path, text: str, suffix: str = ".yaml") -> Path:
    path = tmp_path / f"theirs{suffix}"
    path.write_text(text, encoding="utf-8")
    return path


def edited(tmp_path: Path, source: Path, edit: Callable[[dict[str, Any]], Any]) -> Path:
    """A YAML config with `edit` applied to its values."""
    values = yaml.safe_load(source.read_text(encoding="utf-8"))
    edit(values)
    return written(tmp_path, yaml.safe_dump(values))


def titan(tmp_path: Path, edit: Callable[[dict[str, Any]], Any]) -> Path:
    """torchtitan's config with `edit` applied to its values."""
    values = json.loads(NAMED["torchtitan_llama3_70b"].read_text(encoding="utf-8"))
    edit(values)
    return written(tmp_path, json.dumps(values), ".json")


# ---- published configs


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_key_of_a_published_config_is_named_and_known_and_the_result_is_a_config(
    path: Path, tmp_path: Path
) -> None:
    draft = migrate(path, num_ranks=16)
    assert draft.tool == path.name.partition("_")[0]
    number = counts(draft)
    assert (number["lost"], number[UNKNOWN]) == (0, 0)
    text = to_text(draft, "my.yaml")
    assert max(map(len, text.splitlines()[1:])) <= 80  # the first holds the path
    for line in to_yaml(draft, "my.yaml").splitlines()[4:]:
        source = line.partition("   # ")[2]
        named = [f"default of {draft.tool}", *(", ".join(each.theirs) for each in draft.settings)]
        assert line.endswith(":") or source in named, line
    for key in leaves(draft.values):
        sections = [key[: i or None] for i in [0, *(n for n, c in enumerate(key) if c in ".[")]]
        assert any(part and part in text for part in sections), key
    ours = written(tmp_path, to_yaml(draft, "my.yaml"))
    cfg = recipe.load(catalog.find_recipe(draft.recipe), ours, ())
    assert catalog.recipe_of(ours) == draft.recipe
    for key, value in settings(draft).items():
        found: Any = cfg
        for part in key.split("."):
            found = getattr(found, part)
        assert found == (tuple(value) if isinstance(value, list) else value), key


TORCHTUNE = {
    "model.path": "/tmp/Meta-Llama-3.1-8B-Instruct/", "data.source": "yahma/alpaca-cleaned",
    "data.split": "train[:95%]", "data.eval_source": "yahma/alpaca-cleaned", "data.eval_split": "train[95%:]",
    "data.format": "pairs", "data.train_on_prompt": True, "data.packing": False, "num_epochs": 1,
    "optimizer.kind": "adamw", "optimizer.lr": 2e-5, "optimizer.weight_decay": 0.01, "optimizer.beta2": 0.999,
    "schedule.kind": "constant", "max_grad_norm": 0.0, "compile": "none", "compute_dtype": "bfloat16",
    "activation_checkpointing": "full", "micro_batch_size": 2, "global_batch_size": 16, "device": "cuda",
    "eval_every_steps": 0, "output_dir": "/tmp/torchtune/llama3_1_8B/full",
}  # fmt: skip
TORCHTITAN = {
    "model.path": "./assets/hf/Llama-3.1-70B", "data.source": "allenai/c4:en", "data.split": "train",
    "data.format": "text", "data.seq_len": 8192, "optimizer.kind": "adamw", "optimizer.lr": 1.5e-4,
    "optimizer.beta1": 0.9, "optimizer.beta2": 0.95, "optimizer.eps": 1e-8, "optimizer.weight_decay": 0.1,
    "schedule.kind": "linear", "schedule.warmup_steps": 200, "schedule.min_lr_ratio": 0.0, "num_steps": 1000,
    "max_grad_norm": 1.0, "micro_batch_size": 8, "global_batch_size": 8, "compute_dtype": "bfloat16",
    "compile": "none", "activation_checkpointing": "full", "parallel.tensor": 8, "parallel.replicate": 1,
    "parallel.sequence": True, "parallel.cpu_offload": False, "deterministic": False,
    "logging.tensorboard": True, "eval_every_steps": 0, "output_dir": "./outputs",
}  # fmt: skip
AXOLOTL = {
    "model.path": "checkpoints/Meta-Llama-3.1-8B", "data.source": "mlabonne/FineTome-100k",
    "data.split": "train[:20%]", "data.format": "chat", "data.messages_column": "conversations",
    "data.eval_fraction": 0.02, "data.seq_len": 4096, "data.packing": True, "optimizer.kind": "adamw",
    "optimizer.lr": 2e-5, "optimizer.weight_decay": 0.0, "optimizer.beta2": 0.999, "schedule.kind": "cosine",
    "schedule.warmup_steps": 100, "num_epochs": 1, "micro_batch_size": 2, "global_batch_size": 64,
    "eval_every_steps": 500, "checkpoint.every_steps": 1000, "activation_checkpointing": "full",
    "compute_dtype": "bfloat16", "parallel.cpu_offload": True, "compile": "none", "seed": 42,
    "output_dir": "./outputs/out", "data.chat_template": "llama3",
}  # fmt: skip
LLAMAFACTORY = {
    "model.path": "checkpoints/Qwen2-1.5B-Instruct", "data.seq_len": 2048, "data.max_rows": 1000,
    "output_dir": "saves/qwen2-1_5b/full/sft", "checkpoint.every_steps": 500, "optimizer.lr": 1e-5,
    "num_epochs": 3, "compute_dtype": "bfloat16", "data.packing": False, "optimizer.kind": "muon",
    "data.source": ["FILL-IN-identity.jsonl", "FILL-IN-alpaca_en_demo.jsonl"],
    "micro_batch_size": 1, "global_batch_size": 64, "schedule.kind": "cosine", "schedule.warmup_steps": 100,
    "activation_checkpointing": "full", "compile": "none", "eval_every_steps": 0, "optimizer.beta2": 0.999,
    "seed": 42,
}  # fmt: skip
TRL = {
    "model.path": "checkpoints/Qwen2-0.5B", "data.source": "trl-lib/Capybara", "data.packing": True,
    "data.eval_source": "trl-lib/Capybara", "data.eval_split": "test", "data.seq_len": 1024,
    "data.train_on_prompt": False, "optimizer.lr": 2e-5, "optimizer.beta2": 0.999, "schedule.kind": "linear",
    "num_epochs": 1, "micro_batch_size": 2, "global_batch_size": 128, "compute_dtype": "bfloat16",
    "activation_checkpointing": "full", "compile": "none", "eval_every_steps": 100, "seed": 42,
    "output_dir": "Qwen2-0.5B-SFT",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torchtune_llama3_1_8b_full", TORCHTUNE),
        ("torchtitan_llama3_70b", TORCHTITAN),
        ("axolotl_llama-3_fft-8b-liger-fsdp", AXOLOTL),
        ("llamafactory_qwen2_muon_sft", LLAMAFACTORY),
        ("trl_sft", TRL),
    ],
)
def test_all_values_of_one_config_of_each_tool(name: str, expected: dict[str, Any]) -> None:
    assert settings(migrate(NAMED[name], num_ranks=8, num_steps=1000)) == expected


def test_the_table_in_the_docs_has_the_counts_of_the_published_configs() -> None:
    page = (Path(__file__).parents[3] / "docs/migrate.md").read_text(encoding="utf-8")
    _, _, rest = page.partition("| Published config |")
    rows = [line.strip("| ").split(" | ") for line in rest.partition("\n\n")[0].splitlines()[2:]]
    found = {name.strip("`"): tuple(map(int, numbers)) for name, *numbers in rows}
    expected = {}
    for path in CONFIGS:
        draft = migrate(path, num_ranks=16)
        number = counts(draft)
        kept, changed = number["same"], number["changed"]
        gone = number["keys"] - kept - changed
        expected[path.stem] = (number["keys"], kept, changed, gone, len(draft.to_fill))
    assert found == expected


# ---- what keys mean


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize(
    ("ratio", "shape"),
    [(None, "linear"), (None, "cosine"), (0.4, "linear"), (0.3, "cosine"), (1.0, "sqrt"), (0.0, "linear")],
)  # fmt: skip
def test_the_schedule_of_torchtitan_has_the_same_rate_at_every_step(
    warmup: int, ratio: float | None, shape: str, tmp_path: Path
) -> None:
    steps, floor = 50, 0.1
    share = {"linear": lambda x: 1 - x, "sqrt": lambda x: 1 - math.sqrt(x),
             "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2}[shape]  # fmt: skip
    decay = steps - warmup if ratio is None else min(round(steps * ratio), steps - warmup)

    def theirs(step: int) -> float:
        """torchtitan's linear_warmup_stable_decay, components/optimizer/lr_scheduler.py at b5bcd76c6."""
        if step < warmup:
            return (step + 1) / warmup
        stable = steps + 1 - warmup - decay
        if step < warmup + stable:
            return 1.0
        return floor + (1 - floor) * share((step + 1 - warmup - stable) / decay)

    def edit(values: dict[str, Any]) -> None:
        values["training"]["steps"] = steps
        values["lr_scheduler"] |= {"warmup_steps": warmup, "decay_type": shape, "min_lr_factor": floor}
        values["lr_scheduler"]["decay_ratio"] = ratio

    draft = migrate(titan(tmp_path, edit), num_ranks=8)
    ours = written(tmp_path, to_yaml(draft, "my.yaml"))
    schedule = recipe.load(catalog.find_recipe("continued_pretrain"), ours, ()).schedule
    for step in range(steps):
        assert learning_rate(step, steps, 1.0, schedule) == pytest.approx(theirs(step), rel=1e-12)


def test_rows_per_step_follow_from_the_ranks_that_do_not_share_a_model(tmp_path: Path) -> None:
    def tensor(values: dict[str, Any]) -> None:
        values.update(batch_size=3, gradient_accumulation_steps=5, tensor_parallel_dim=2)

    path = edited(tmp_path, torchtune_8b, tensor)
    draft = migrate(path, num_ranks=8)
    assert settings(draft)["micro_batch_size"] == 3
    assert settings(draft)["global_batch_size"] == 3 * 5 * 8 // 2
    assert "8 ranks (--world-size), 2 for each row: a step has 3 x 5 x 4 = 60 rows" in draft.assumed[0]
    with pytest.raises(UserError, match=r"3 ranks .* do not divide among 2"):
        migrate(path, num_ranks=3)


@pytest.mark.parametrize("context", [1, 2])
def test_context_beside_tensor_parallelism_is_to_fill_in(context: int, tmp_path: Path) -> None:
    def both(values: dict[str, Any]) -> None:
        values.update(tensor_parallel_dim=2, context_parallel_dim=context)

    draft = migrate(edited(tmp_path, torchtune_8b, both), num_ranks=8)
    assert ("parallel.context" in dict(draft.to_fill)) == (context > 1)


@pytest.mark.parametrize(
    ("name", "kind", "all_gather"),
    [
        (None, "float8_tensorwise", "low"),
        ("tensorwise", "float8_tensorwise", "high"),
        ("rowwise", "float8_rowwise", "high"),
        ("rowwise_with_gw_hp", "float8_rowwise_with_gw_hp", "high"),
    ],
)
def test_float8_of_torchtune(name: str | None, kind: str, all_gather: str, tmp_path: Path) -> None:
    path = edited(
        tmp_path, torchtune_8b, lambda it: it.update(enable_fp8_training=True, fp8_recipe_name=name)
    )
    found = settings(migrate(path))
    assert (found["precision.kind"], found["precision.all_gather"]) == (kind, all_gather)
    path = edited(
        tmp_path, torchtune_8b, lambda it: it.update(enable_fp8_training=False, fp8_recipe_name=name)
    )
    assert "precision.kind" not in settings(migrate(path))


DATASETS = [
    ({"_component_": "torchtune.datasets.alpaca_dataset", "train_on_input": False, "packed": True},
     {"source": "tatsu-lab/alpaca", "format": "pairs", "packing": True}),
    ({"_component_": "torchtune.datasets.instruct_dataset", "source": "json", "data_files": "a.jsonl",
      "column_map": {"input": "frage", "output": "antwort"}, "new_system_prompt": "s"},
     {"source": "a.jsonl", "format": "pairs", "prompt_column": "frage", "response_column": "antwort",
      "system_prompt": "s", "packing": False}),
    ({"_component_": "torchtune.datasets.chat_dataset", "source": "o/n", "conversation_column": "dialog",
      "conversation_style": "sharegpt"},
     {"source": "o/n", "format": "chat", "messages_column": "dialog", "packing": False}),
    ({"_component_": "torchtune.datasets.text_completion_dataset", "source": "o/n", "name": "en",
      "column": "body", "split": "train"},
     {"source": "o/n:en", "format": "text", "text_column": "body", "split": "train", "packing": False}),
    ({"_component_": "torchtune.datasets.samsum_dataset"},
     {"source": "Samsung/samsum", "format": "pairs", "prompt_column": "dialogue",
      "response_column": "summary", "packing": False}),
    ([{"_component_": "torchtune.datasets.alpaca_dataset"},
      {"_component_": "torchtune.datasets.chat_dataset", "source": "o/n"}],
     {"source": [{"source": "tatsu-lab/alpaca", "format": "pairs"}, {"source": "o/n", "format": "chat"}],
      "train_on_prompt": False, "packing": False}),
]  # fmt: skip


@pytest.mark.parametrize(("theirs", "expected"), DATASETS)
def test_datasets_of_torchtune(theirs: Any, expected: dict[str, Any], tmp_path: Path) -> None:
    def edit(values: dict[str, Any]) -> None:
        values["dataset"] = theirs
        del values["dataset_val"]

    draft = migrate(edited(tmp_path, torchtune_8b, edit))
    found = {
        key.removeprefix("data."): value for key, value in settings(draft).items() if key.startswith("data.")
    }
    assert found == expected
    ours = written(tmp_path, to_yaml(draft, "my.yaml"))
    recipe.load(catalog.find_recipe(draft.recipe), ours, ())


def test_a_list_of_axolotl_datasets_keeps_the_keys_of_each(tmp_path: Path) -> None:
    datasets = [
        {"path": "json", "data_files": "rows.jsonl", "type": {"field_instruction": "q", "field_output": "a"}},
        {"path": "o/n", "name": "en", "type": "completion", "field": "body", "split": "train"},
    ]
    path = edited(tmp_path, NAMED["axolotl_llama-3_fft-8b"], lambda it: it.update(datasets=datasets))
    draft = migrate(path)
    assert settings(draft)["data.source"] == [
        {"source": "rows.jsonl", "format": "pairs", "prompt_column": "q", "response_column": "a"},
        {"source": "o/n:en", "format": "text", "text_column": "body", "split": "train"},
    ]
    recipe.load(catalog.find_recipe(draft.recipe), written(tmp_path, to_yaml(draft, "my.yaml")), ())


def test_the_warmup_and_the_data_sets_that_axolotl_ignores_are_named_and_not_taken(tmp_path: Path) -> None:
    ignored = {"warmup_steps": 10, "lr_scheduler": "constant", "lr_scheduler_type": "cosine", "project": "a"}
    corpus = [{"path": "b.jsonl", "type": "pretrain"}]
    path = edited(tmp_path, AXOLOTL_8B, lambda it: it.update(ignored, pretraining_dataset=corpus))
    draft = migrate(path)
    assert settings(draft)["schedule.kind"] == "constant"
    assert not settings(draft).get("schedule.warmup_steps")
    named = {each.theirs for each in draft.dropped}
    assert {"warmup_steps", "datasets", "lr_scheduler_type", "project"} <= named
    assert counts(draft)["lost"] == 0


DATA_SETS = {
    "pairs": {"file_name": "pairs.json", "columns": {"prompt": "q", "response": "a", "system": "s"}},
    "chats": {"hf_hub_url": "o/n", "subset": "en", "split": "test", "formatting": "sharegpt"},
    "texts": {"file_name": "texts.jsonl", "columns": {"prompt": "body"}},
    "better": {"file_name": "better.json", "ranking": True, "columns": {"chosen": "yes", "rejected": "no"}},
}


@pytest.mark.parametrize(
    ("stage", "names", "expected"),
    [
        ("sft", "pairs", {"source": "pairs.json", "format": "pairs", "prompt_column": "q",
                          "input_column": "input", "response_column": "a", "system_column": "s"}),
        ("sft", "chats", {"source": "o/n:en", "split": "test", "format": "chat",
                          "messages_column": "conversations"}),
        ("pt", "texts", {"source": "texts.jsonl", "format": "text", "text_column": "body"}),
        ("dpo", "better", {"source": "better.json", "prompt_column": "instruction", "input_column": "input",
                           "chosen_column": "yes", "rejected_column": "no"}),
    ],
    ids=["pairs", "chat", "text", "preferences"],
)  # fmt: skip
def test_data_sets_of_llama_factory_are_those_of_its_table(
    stage: str, names: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "dataset_info.json").write_text(json.dumps(DATA_SETS))
    (tmp_path / "examples").mkdir()

    def edit(values: dict[str, Any]) -> None:
        values.update(stage=stage, dataset=names)

    path = edited(tmp_path / "examples", NAMED["llamafactory_qwen3_full_sft"], edit)
    draft = migrate(path)
    found = {key: value for key, value in settings(draft).items() if key.startswith("data.")}
    for key, value in expected.items():
        given = str(folder / value) if key == "source" and "." in value else value
        assert found.pop(f"data.{key}") == given
    assert not [key for key in found if key.endswith("_column")]
    assert draft.recipe == {"pt": "continued_pretrain", "dpo": "full_dpo"}.get(stage, "full_finetune")
    recipe.load(catalog.find_recipe(draft.recipe), written(tmp_path, to_yaml(draft, "my.yaml")), ())


def test_training_of_weights_in_4_bits_is_int4_weight(tmp_path: Path) -> None:
    name = "torchtune.training.quantization.Int4WeightOnlyQATQuantizer"
    for source, theirs in (
        (torchtune_8b, {"quantizer": {"_component_": name, "groupsize": 128}}),
        (AXOLOTL_8B, {"qat": {"weight_dtype": "int4", "group_size": 32, "quantize_embedding": None}}),
    ):
        draft = migrate(edited(tmp_path, source, lambda values, theirs=theirs: values.update(theirs)))
        found = settings(draft)
        assert (found["precision.kind"], found["export.quantized"]) == ("int4_weight", "int4")
        assert counts(draft)["lost"] == 0
        recipe.load(catalog.find_recipe(draft.recipe), written(tmp_path, to_yaml(draft, "x")), ())


def test_the_losses_of_preferences_keep_their_factors(tmp_path: Path) -> None:
    """Defaults differ: ours of simpo is 2.0."""
    for theirs, ours in (
        ({"pref_loss": "simpo"}, {"loss": "simpo", "beta": 0.1, "target_margin": 0.5}),
        ({"pref_loss": "orpo", "pref_beta": 0.2}, {"loss": "orpo", "beta": 0.2}),
        ({"dpo_label_smoothing": 0.1}, {"loss": "dpo", "beta": 0.1, "label_smoothing": 0.1}),
    ):
        path = edited(
            tmp_path,
            NAMED["llamafactory_qwen3_full_sft"],
            lambda values, theirs=theirs: values.update(theirs, stage="dpo"),
        )
        found = settings(migrate(path))
        prefix = "preference."
        assert {key.removeprefix(prefix): found[key] for key in found if key.startswith(prefix)} == ours


def test_a_command_line_goes_over_the_file_that_it_names(tmp_path: Path) -> None:
    written(tmp_path, "model_name_or_path: a/b\nlearning_rate: 1.0e-6\nbeta: 0.2\nloss_type: [ipo]\n")
    script = tmp_path / "run.sh"
    script.write_text(
        "set -e\nexport HF_HOME=/x  # --no flag\n"
        "accelerate launch --num_processes 8 --module trl dpo --config theirs.yaml \\\n"
        "    --max_length 512 --save_steps 10 "
        "    --learning_rate=2e-6 --no_packing --gradient_checkpointing False --output_dir $OUT > log 2>&1\n"
    )
    draft = migrate(script)
    found = settings(draft)
    assert draft.recipe == "full_dpo"
    assert found["optimizer.lr"] == 2e-6
    assert (found["preference.loss"], found["preference.beta"]) == ("ipo", 0.2)
    assert (found["activation_checkpointing"], found["output_dir"]) == ("none", "$OUT")
    assert found["data.packing"] is False
    assert counts(draft)[UNKNOWN] == 0
    # Of the launcher: 8 rows (the Trainer's default) on 8 ranks. A preference is two documents of a row.
    assert (found["global_batch_size"], found["data.seq_len"]) == (64, 1024)
    assert any("newest 2 checkpoints" in each for each in draft.assumed)
    assert settings(migrate(script, num_ranks=2))["global_batch_size"] == 16
    for before, rows in (("torchrun --nproc_per_node=4", 32), ("torchrun --nnodes 2 --nproc-per-node=4", 8)):
        script.write_text(f"{before} trl/scripts/sft.py --model_name_or_path a/b\n")
        assert settings(migrate(script))["global_batch_size"] == rows
    script.write_text("trl dpo --model_name_or_path a/b\n")
    assert settings(migrate(script))["data.seq_len"] == 2048  # the default of TRL is for one answer, too

    factory = NAMED["llamafactory_qwen3_full_sft"]
    script.write_text(f"FORCE_TORCHRUN=1 llamafactory-cli train {factory} learning_rate=3e-5 stage=pt\n")
    draft = migrate(script)
    assert (settings(draft)["optimizer.lr"], draft.recipe) == (3e-5, "continued_pretrain")
    for text, message in (
        ("python train.py --lr 1\n", "has no command line of `trl`"),
        ("trl grpo --model_name_or_path a/b\n", "trl grpo has no recipe here"),
        ("trl sft --use_peft --model_name_or_path a/b\n", "trains adapters"),
        ("trl sft --config 'x\n", "cannot be read as a shell script"),
    ):
        script.write_text(text)
        with pytest.raises(UserError, match=message):
            migrate(script)
    (tmp_path / "folder.sh").mkdir()
    with pytest.raises(UserError, match=r"folder\.sh: cannot be read"):
        migrate(tmp_path / "folder.sh")


def test_interpolations_are_resolved_but_the_environment_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "s3cret")
    path = edited(tmp_path, torchtune_8b, lambda it: it.update(
        output_dir="${base}/run", base="${oc.env:SECRET}", batch_size="${n}", n=6))  # fmt: skip
    draft = migrate(path)
    assert settings(draft)["output_dir"] == "${oc.env:SECRET}/run"
    assert settings(draft)["micro_batch_size"] == 6
    assert "s3cret" not in to_text(draft, "x") + to_yaml(draft, "x")


# ---- files that are refused


AXOLOTL_8B = NAMED["axolotl_llama-3_fft-8b"]


WRONG: list[Any] = [-1, 1.5, True, "text", "${x}", [], ["a", 3], {"a": {"b": 1}}, [{"a": 1}], None]


@pytest.mark.parametrize(
    "path",
    [
        torchtune_8b,
        NAMED["torchtitan_llama3_70b"],
        AXOLOTL_8B,
        pytest.param(NAMED["axolotl_llama-3_3b-fp8-fsdp2"], marks=pytest.mark.slow),  # the same reader
        NAMED["llamafactory_llama3_fp8_fsdp_sft"],
        NAMED["trl_dpo"],
    ],
    ids=lambda p: p.stem,
)
def test_no_value_of_any_key_is_a_traceback_and_no_key_is_lost(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path.suffix == ".sh":
        _, given = reading.arguments_of(reading.command_line(path)[2], path)
        path = written(tmp_path, yaml.safe_dump(given | {"beta": 0.1, "warmup_steps": 5, "seed": 1}))
    original = reading._read(path)

    def places(value: Any, place: tuple[str, ...]) -> list[tuple[str, ...]]:
        here = [place] if place else []
        below = value.items() if isinstance(value, dict) else ()
        return here + [each for key, item in below for each in places(item, (*place, key))]

    lines = list[str]()
    for place in places(original, ()):
        for wrong in WRONG:
            values = copy.deepcopy(original)
            section = values
            for name in place[:-1]:
                section = section[name]
            section[place[-1]] = copy.deepcopy(wrong)
            monkeypatch.setattr(reading, "_read", lambda _, values=values: values)
            try:
                draft = migrate(path)
            except UserError as error:
                lines.append(str(error))
                continue
            assert counts(draft)["lost"] == 0, (place, wrong)
            assert isinstance(yaml.safe_load(to_yaml(draft, "x")), dict), (place, wrong)
            to_text(draft, "x")
    assert len(lines) > 50
    assert not any("\n" in line for line in lines)


def test_what_a_torchtitan_of_python_configs_may_say_otherwise(tmp_path: Path) -> None:
    def edit(values: dict[str, Any]) -> None:
        values["training"] |= {"num_tokens_per_train_step": 8192 * 24, "max_norm": 2.0}
        values["activation_checkpoint"] |= {"force_recompute_mm_shapes_by_fqns": []}
        values["optimizer"]["param_groups"][0]["optimizer_name"] = "Muon"
        values["compile"] |= {"enable": True}
        values["validator"] |= {"enable": True, "freq": 5}
        values["checkpoint"] |= {"enable": True, "keep_latest_k": 0, "async_mode": "async"}
        source = values["dataloader"]["dataset"]["dataset"]
        values["dataloader"]["dataset"] = {"datasets": [source, source]}
        values["brand_new"] = {"key": 1}

    draft = migrate(titan(tmp_path, edit), num_ranks=16)
    found = settings(draft)
    expected = {
        "micro_batch_size": 8, "global_batch_size": 24, "activation_checkpointing": "selective",
        "compile": "block", "eval_every_steps": 5, "data.eval_source": "allenai/c4:en",
        "data.eval_split": "validation", "checkpoint.every_steps": 500, "checkpoint.async_save": True,
        "export.dtype": "float32", "max_grad_norm": 2.0, "data.source": "FILL-IN.jsonl",
    }  # fmt: skip
    assert {key: found.get(key) for key in expected} == expected
    assert {"optimizer.lr", "precision.kind", "data.source"} <= dict(draft.to_fill).keys()
    assert [each.theirs for each in draft.dropped if each.why == UNKNOWN] == ["brand_new.key"]
    assert counts(draft)["lost"] == 0
    recipe.load(catalog.find_recipe(draft.recipe), written(tmp_path, to_yaml(draft, "my.yaml")), ())


@pytest.mark.parametrize(("tensor", "expert", "found"), [(1, 4, 4), (8, 4, None), (8, 1, None)])
def test_torchtitans_expert_parallelism_is_ours_where_no_other_ranks_share_rows(
    tmp_path: Path, tensor: int, expert: int, found: int | None
) -> None:
    def edit(values: dict[str, Any]) -> None:
        values["parallelism"] |= {"tensor_parallel_degree": tensor, "expert_parallel_degree": expert}

    draft = migrate(titan(tmp_path, edit), num_ranks=16)
    assert settings(draft).get("parallel.expert") == found
    assert ("parallelism.expert_parallel_degree" in {each.theirs for each in draft.dropped}) == (
        found is None
    )


def _tune(tmp_path: Path, edit: Callable[[dict[str, Any]], Any]) -> Draft:
    return migrate(edited(tmp_path, torchtune_8b, edit))


def test_data_sets_of_torchtune_that_disagree_about_a_key_of_all_are_to_fill_in(tmp_path: Path) -> None:
    """One data.train_on_prompt and one data.packing hold for all sources here."""
    alpaca = {"_component_": "torchtune.datasets.alpaca_dataset"}  # learns prompts, unless it says otherwise
    chat = {"_component_": "torchtune.datasets.chat_dataset", "source": "a/b"}
    masked = alpaca | {"train_on_input": False}
    for listed, expected in (
        ([alpaca, chat], {"data.train_on_prompt"}),
        ([chat, alpaca], {"data.train_on_prompt"}),
        ([alpaca | {"packed": True}, masked], {"data.train_on_prompt", "data.packing"}),
        ([alpaca, alpaca | {"source": "c/d"}], set()),
        ([masked, chat | {"packed": False}], set()),
    ):
        draft = _tune(tmp_path, lambda values, listed=listed: values.update(dataset=listed))
        asked = {ours for ours, _ in draft.to_fill} & {"data.train_on_prompt", "data.packing"}
        assert asked == expected, listed
        assert counts(draft)["lost"] == 0
    assert settings(draft)["data.packing"] is False


@pytest.mark.parametrize(("name", "decay"), [("Adam", 0.0), ("AdamW", 0.01)])
def test_the_default_decay_is_that_of_the_optimizer(name: str, decay: float, tmp_path: Path) -> None:
    default = inspect.signature(getattr(torch.optim, name)).parameters["weight_decay"].default
    assert default == decay
    optimizer = {"_component_": f"torch.optim.{name}", "lr": 1e-5}
    draft = _tune(tmp_path, lambda values: values.update(optimizer=optimizer))
    assert settings(draft)["optimizer.weight_decay"] == decay


def test_an_update_in_backward_of_torchtune_is_one_here(tmp_path: Path) -> None:
    on, off = (
        _tune(tmp_path, lambda values, is_on=is_on: values.update(optimizer_in_bwd=is_on))
        for is_on in (True, False)
    )
    assert settings(on)["optimizer.in_backward"] is True
    assert "optimizer.in_backward" not in settings(off)


HOSTILE_TEXT = [
    "${oc.env:HOME}", "cost: ${price}", "\\${oc.env:HOME}", "a\\\\${oc.env:HOME}", "$${x}",
    "\x7f\x85\u2028\ufeff é 😀", "two\nlines\t\\n",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE_TEXT)
@pytest.mark.parametrize("tool", ["axolotl", "torchtitan"])
def test_a_text_stays_that_text_in_the_config(text: str, tool: str, tmp_path: Path) -> None:
    """Neither tool has interpolations, so `${oc.env:HOME}` is a text, and must not become a variable."""
    if tool == "axolotl":
        source = NAMED["axolotl_llama-3_fft-8b"]
        file = edited(tmp_path, source, lambda values: values.update(default_system_message=text))
        name = "data.system_prompt"
    else:
        file = titan(tmp_path, lambda values: values.update(dump_folder=text))
        name = "output_dir"
    config = OmegaConf.create(yaml.safe_load(to_yaml(migrate(file, num_ranks=8), "my.yaml")))
    assert OmegaConf.select(config, name) == text


@pytest.mark.parametrize(
    ("source", "changes", "message"),
    [
        (torchtune_8b, {"model": {"_component_": "torchtune.models.llama3_1.lora_llama3_1_8b"}}, "LoRA"),
        (torchtune_8b, {"quantizer": {"_component_": "q"}}, "QAT"),
        (torchtune_8b, {"loss": {"_component_": "torchtune.rlhf.loss.DPOLoss"}}, "full_dpo"),
        (torchtune_8b, {"teacher_model": {"_component_": "m"}}, "distill"),
        (torchtune_8b, {"output_dir": "${nowhere}"}, "a key that the file does not have"),
        (torchtune_8b, {"output_dir": "${a}${a}", "a": "${b}${b}", "b": "${a}${a}"}, "without an end"),
        (torchtune_8b, {"batch_size": 0}, "batch_size: must be an integer of at least 1, found 0"),
        (torchtune_8b, {"optimizer": 3}, "optimizer: must be a section"),
        (AXOLOTL_8B, {"adapter": "qlora"}, "adapter: qlora trains adapters"),
        (AXOLOTL_8B, {"load_in_4bit": True}, "4 or 8 bits"),
        (AXOLOTL_8B, {"rl": "kto"}, "full_kto"),
        (AXOLOTL_8B, {"qat": {"weight_dtype": "int4", "activation_dtype": "int8"}}, "quantization-aware"),
        (AXOLOTL_8B, {"reward_model": True}, "classifier"),
        (AXOLOTL_8B, {"datasets": [{"type": "alpaca"}]}, "datasets[0]: names no `path`"),
        ("a.py", "def llama3_8b(): pass", "--debug.save_config_file"),
        ("a.yaml", "model: {path: a}\ndata: {source: builtin}", "is a config of lptune already"),
        ("a.yaml", "compute_environment: x\ndistributed_type: y", "accelerate"),
        ("a.yaml", "a: 1", "is no config of torchtune"),
        ("a.toml", "a = 1", "--debug.save_config_file"),
        ("a.json", "[]", "found list"),
        ("a.json", "[" * 100_000, "nested too deep"),
        ("a.yaml", "m: {_component_: !!python/object/apply:os.system ['touch pwned']}", "not valid YAML"),
    ],
)
def test_a_file_that_cannot_be_migrated_is_one_line(
    source: Path | str, changes: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if isinstance(source, str):
        Path(source).write_text(changes)
    path = (
        Path(source) if isinstance(source, str) else edited(tmp_path, source, lambda it: it.update(changes))
    )
    with pytest.raises(UserError) as raised:
        migrate(path)
    assert message in str(raised.value)
    assert str(raised.value).startswith(str(path))
    assert not Path("pwned").exists()


def test_no_text_of_a_file_adds_lines_to_the_config_or_controls_the_terminal(tmp_path: Path) -> None:
    evil = "x\noutput_dir: /etc\u2028seed: 98\x85seed: 97\x1b]0;x\x07\u202e"

    def edit(values: dict[str, Any]) -> None:
        values.update({evil: 1, "lr_scheduler": evil, "tokens": [evil]})
        values["datasets"][0].update({evil: 1, "path": f"a{evil}"})

    draft = migrate(edited(tmp_path, AXOLOTL_8B, edit).rename(tmp_path / f"{evil[:8]}\u2028seed: 98.yaml"))
    values = yaml.safe_load(to_yaml(draft, f"my{evil}.yaml"))
    assert (values["output_dir"], values["seed"]) == ("./outputs/out", 42)
    text = to_text(draft, f"{evil}.yaml")
    assert "\\x1b" in text
    assert text.replace("\n", "").isprintable()


# ---- memory


@pytest.mark.parametrize(
    ("edits", "there", "here", "without"),
    [
        ({}, 8, 16, 12),  # bf16: 2 + 2 + 4; here 4 + 4 + 8
        ({"dtype": "fp32"}, 16, 16, None),
        ({"optimizer_in_bwd": True}, 6, 12, 10),
        ({"optimizer": {"_component_": "bitsandbytes.optim.PagedAdamW8bit"}}, 6, 10, 6),
        (
            {"optimizer": {"_component_": "bitsandbytes.optim.PagedAdamW8bit"}, "optimizer_in_bwd": True},
            4, 6, 4,
        ),
    ],
)  # fmt: skip
def test_the_report_says_what_the_run_took_and_takes(
    edits: dict[str, Any], there: int, here: int, without: int | None, tmp_path: Path
) -> None:
    draft = migrate(edited(tmp_path, torchtune_8b, lambda values: values.update(edits)))
    number = 8.03026
    words = [f"there about {there * number:,.1f} GB", f"here {here * number:,.1f} GB"]
    if without is not None:
        words.append(f"with optimizer.master=none {without * number:,.1f} GB")
    text = " ".join(to_text(draft, "my.yaml").split())
    assert [word for word in words if word not in text] == []
    assert ("with optimizer.master=none" in text) == (without is not None)
    assert "lptune plan --config my.yaml" in text


def test_a_model_of_unknown_size_gets_no_figure(tmp_path: Path) -> None:
    path = edited(
        tmp_path, torchtune_8b, lambda values: values["checkpointer"].update(checkpoint_dir="/tmp/mine")
    )
    assert "over all ranks" not in to_text(migrate(path), "my.yaml")
