"""What every training recipe does alike: early stops, averages, samples, shadow checks, freezing, stops."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from lptune.data import load_tokenizer
from tests.helpers import warm
from tests.helpers.slow import slow_but
from tests.helpers.tiny_recipe import (
    write_config,
    write_labelled,
    write_preferences,
    write_rows,
    write_texts,
)
from tests.recipes.conftest import Run, differing, losses, read_lines, read_metrics, runner, weights
from tests.recipes.test_early_stop import end_of, evaluation_losses

BASE_END, CLOSING = "<|pad|>", "<|im_end|>"
RECIPES: dict[str, tuple[Callable[[Path, int], Path], dict[str, Any]]] = {
    "full_finetune": (write_rows, {}),
    "continued_pretrain": (write_texts, {}),
    "full_dpo": (write_preferences, {}),
    "full_kto": (write_labelled, {}),
    "distill": (write_rows, {"distillation": {"labels": 0.5}}),
}
FROZEN = "model.layers.0.mlp."
KEYS = {
    # A rate at which the first evaluation is worse than that of the base.
    "optimizer": {"lr": 0.5, "ema_decay": 0.5}, "schedule": {"kind": "constant", "warmup_steps": 0},
    "num_steps": 40, "eval_every_steps": 1, "early_stop_after": 1, "num_samples": 3, "freeze": [FROZEN + "*"],
    "precision": {"kind": "int8_rowcol", "stochastic_rounding": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint as a base model: no file of it says that `<|im_end|>` ends an answer."""
    folder = shutil.copytree(tiny_checkpoint, tmp_path_factory.mktemp("base") / "model")
    end = load_tokenizer(folder).backend.token_to_id(BASE_END)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"eos_token_id": end}), encoding="utf-8")
    (folder / "generation_config.json").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    named = json.loads(path.read_text("utf-8")) | {"eos_token": BASE_END}
    path.write_text(json.dumps(named), encoding="utf-8")
    return folder


class Ran(NamedTuple):
    """A finished run of a recipe."""

    recipe: str
    folder: Path
    said: str
    run: Run
    """Runs it again with other keys, without shadow checks."""


@pytest.fixture(scope="module", params=RECIPES)
def ran(request: pytest.FixtureRequest, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    write, more = RECIPES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    source = write(folder / "rows.jsonl", 160)
    data = {"source": str(source), "seq_len": 192, "eval_fraction": 0.2}
    more = more | ({"teacher": {"path": str(base)}} if request.param == "distill" else {})
    config = write_config(folder / "own.yaml", base, folder / "with", data=data, **(KEYS | more))
    run = runner(request.param, config)
    return Ran(request.param, folder / "with", run("precision.shadow_every=1").stdout, run)


def test_each_stops_early_averages_its_weights_and_shows_samples(ran: Ran) -> None:
    end, _ = end_of(evaluation_losses(ran.folder), after=1)
    assert f"stopped early after step {end} of 40: 1 evaluations without" in ran.said
    assert f"compared with the moving averages in step-{end:08d})" in ran.said
    samples = read_lines(ran.folder / "samples.jsonl")
    assert [(each["step"], each["when"]) for each in samples] == [
        *[(0, "before training")] * 3,
        *[(end, "after training")] * 3,
    ]
    assert len({each["prompt"] for each in samples}) == 3
    # What was rejected, or labelled undesirable, is no reference.
    assert not any(each["reference"].startswith("Sorry") for each in samples)


def test_each_makes_shadow_checks(ran: Ran) -> None:
    check, row = read_lines(ran.folder / "shadow.jsonl")[0], read_metrics(ran.folder)[1]
    # Per target, answer or preference, as the recipe reports it. The micro-batch is one of four of the step.
    assert check["step"] == row["step"] == 1
    assert check["loss"] == pytest.approx(row["loss"], rel=0.3)
    assert check["loss"] != check["shadow_loss"]
    assert abs(check["loss"] - check["shadow_loss"]) < 0.05
    assert row["shadow_worst_sqnr_db"] > 10
    assert len(check["layers"]) == 14


def has_its_own_loop(recipe: str) -> bool:
    """The loops of continued_pretrain and full_dpo are those of full_finetune and full_kto."""
    return recipe not in ("continued_pretrain", "full_dpo")


@pytest.mark.parametrize("ran", slow_but(has_its_own_loop, RECIPES), indirect=True, scope="module")
def test_shadow_checks_change_no_bit(ran: Ran, tmp_path: Path) -> None:
    ran.run(f"output_dir={tmp_path}")
    assert losses(ran.folder) == losses(tmp_path)
    manifests = [
        [path.read_text("utf-8") for path in sorted(folder.glob("checkpoints/step-*/manifest.json"))]
        for folder in (ran.folder, tmp_path)
    ]
    assert manifests[0] == manifests[1] != []


def test_each_keeps_what_is_frozen_and_trains_the_rest(ran: Ran, base: Path) -> None:
    names = weights(base).keys()
    frozen = {name for name in names if name.startswith(FROZEN)}
    assert len(frozen) == 3
    assert differing(weights(ran.folder / "export"), weights(base)) == names - frozen


def _ids(folder: Path, *texts: str) -> list[int]:
    return [load_tokenizer(folder).backend.token_to_id(text) for text in texts]


def test_each_export_ends_generation_where_its_rows_end_answers(ran: Ran, base: Path) -> None:
    """Raw text ends with the base's own token: continued_pretrain changes no file, chat template or not."""
    path = ran.folder / "export" / "generation_config.json"
    if ran.recipe == "continued_pretrain":
        assert not path.exists()
        assert path.name not in ran.said
        return
    assert json.loads(path.read_text("utf-8"))["eos_token_id"] == _ids(base, BASE_END, CLOSING)
    assert f"generation ends at {CLOSING}" in ran.said


def test_transformers_stops_where_lptune_does(base: Path, tmp_path: Path) -> None:
    """With the export of a run, and with what `lptune export` makes of its checkpoint elsewhere."""
    import transformers

    rows = [{"prompt": f"say {i % 7}", "response": "yes"} for i in range(64)]
    source, prompts = tmp_path / "rows.jsonl", tmp_path / "prompts.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    prompts.write_text('{"prompt": "say 3"}\n', encoding="utf-8")
    config = write_config(
        tmp_path / "run.yaml", base, tmp_path / "run", num_steps=40, eval_every_steps=0,
        data={"source": str(source), "seq_len": 64}, optimizer={"lr": 1e-2, "ema_decay": 0.5},
    )  # fmt: skip
    runner("full_finetune", config)()
    again = tmp_path / "again"
    warm.lptune(["export", str(tmp_path / "run"), str(again)], folder=tmp_path).check_returncode()
    generation = tmp_path / "generation.yaml"
    content = {
        "prompts": {"source": str(prompts)}, "sampling": {"temperature": 0, "max_new_tokens": 12},
        "compute_dtype": "float32", "device": "cpu",
    }  # fmt: skip
    generation.write_text(json.dumps(content), encoding="utf-8")
    for number, model in enumerate([tmp_path / "run", again]):
        output = tmp_path / f"answers-{number}.jsonl"
        runner("generate", generation)(f"model.path={model}", f"output={output}")
        assert read_lines(output)[0]["generated"] == "yes"
    tokenizer = load_tokenizer(again)
    chat = [{"role": "user", "content": "say 3"}]
    ids = tokenizer.encode(tokenizer.render_chat(chat, add_generation_prompt=True), add_special=False)
    for folder in (tmp_path / "run" / "export", again):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        found = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=12)
        answer = found[0, len(ids) :].tolist()
        assert tokenizer.decode(answer, skip_special=False) == f"yes{CLOSING}"


@pytest.mark.parametrize("recipe", slow_but(has_its_own_loop, RECIPES))
def test_each_computes_the_same_where_ranks_share_rows(recipe: str, base: Path, tmp_path: Path) -> None:
    write, more = RECIPES[recipe]
    data = {"source": str(write(tmp_path / "rows.jsonl", 60)), "seq_len": 192, "eval_fraction": 0.2}
    more = more | ({"teacher": {"path": str(base)}} if recipe == "distill" else {})
    config = write_config(
        tmp_path / "own.yaml", base, tmp_path / "alone", data=data, **more, num_steps=2, eval_every_steps=1,
        precision={"kind": "none"}, compute_dtype="float32", schedule={"kind": "constant"},
    )  # fmt: skip
    run, there = runner(recipe, config), tmp_path / "shared"
    run()
    run("parallel.context=2", "activation_checkpointing=full", f"output_dir={there}", ranks=2)
    differ = {"time", "mfu", "bf16_mfu", "tokens_per_s", "step_time_s", "peak_memory_gib", "compile_time_s"}
    for actual, expected in zip(read_metrics(there), read_metrics(tmp_path / "alone"), strict=True):
        assert actual.keys() == expected.keys()
        for key in actual.keys() - differ:
            # Sums in another order, twice through an update of AdamW; margins are differences of sums.
            assert actual[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-5), key
