"""The main job, through the command line: what a run writes, that it is right, and how it goes on."""

import json
import math
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from tests.helpers import warm
from tests.helpers.cold import Finished
from tests.helpers.tiny_recipe import write_config
from tests.recipes.conftest import Run, differing, losses, read_metrics, refusal, runner, weights


@pytest.fixture(scope="module")
def finished(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """The folder of a finished run in INT8, and what it said."""
    folder = tmp_path_factory.mktemp("finished")
    config = write_config(folder / "tiny.yaml", tiny_checkpoint, folder / "run")
    done = runner("full_finetune", config)(
        "precision.kind=int8_rowcol", "num_samples=2", "export.dtype=bfloat16"
    )
    return folder / "run", done


def test_int8_run_leaves_metrics_plan_config_checkpoint_and_export(finished: tuple[Path, Finished]) -> None:
    run, done = finished
    assert "verified:" in done.stdout
    assert "\nprecision int8_rowcol: 14 of 15" in done.stdout
    assert "\n  not converted: lm_head (tied to another module's weight)\n" in done.stdout
    assert "int8 folded" not in done.stdout, "the table of all layers is for -v"
    assert f"export: {run / 'export'}" in done.stdout
    assert "samples before training: 0 of 2" in done.stdout

    records = read_metrics(run)
    assert [record["step"] for record in records] == list(range(13))
    assert [record["step"] for record in records if "eval_loss" in record] == [0, 6, 12]
    for record in records[1:]:
        assert record["low_precision_flops_fraction"] > 0.5
        assert record["tokens_per_s"] == pytest.approx(8 * 128 / record["step_time_s"])
        assert 0 < record["num_target_tokens"] < 8 * 128
        assert math.isfinite(record["grad_norm"])
    assert records[12]["eval_loss"] < 0.8 * records[0]["eval_loss"]

    plan = json.loads((run / "precision_plan.json").read_text(encoding="utf-8"))
    assert plan["kind"] == "int8_rowcol"
    assert plan["num_converted"] == sum(layer["reason"] is None for layer in plan["layers"]) == 14
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    assert config["precision"]["grad_weight"] == "low"  # what it means stands in the plan
    assert {layer["grad_weight"] for layer in plan["layers"]} == {"int8 column", "high"}
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000012"]


def test_the_export_keeps_names_and_files_loads_in_transformers_and_is_trained_further(
    finished: tuple[Path, Finished], run_recipe: Run, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from lptune import checkpoint, models

    export = finished[0] / "export"
    base, exported = weights(tiny_checkpoint), weights(export)
    assert {name: t.shape for name, t in exported.items()} == {name: t.shape for name, t in base.items()}
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    assert json.loads((export / "config.json").read_text(encoding="utf-8"))["dtype"] == "bfloat16"
    names = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "README.md"}
    assert names <= {path.name for path in export.iterdir()}

    theirs = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    ours = models.build_on_meta(models.read_config(export))
    ours.to_empty(device="cpu")
    ours.reset_buffers("cpu")
    checkpoint.load_hf(ours, checkpoint.read_index(export))
    tokens = torch.tensor([AutoTokenizer.from_pretrained(export)("What comes after Monday?")["input_ids"]])
    with torch.no_grad():
        difference = (ours(tokens) - theirs(tokens).logits).abs().max()
    assert difference <= 1e-4

    run_recipe(f"model.path={export}", "num_steps=6")
    first, second = read_metrics(finished[0]), read_metrics(tmp_path / "run")
    # Evaluated in float32 without INT8: close to the first run's end, and better still at its own.
    assert second[0]["eval_loss"] == pytest.approx(first[-1]["eval_loss"], rel=0.02)
    assert second[-1]["eval_loss"] < second[0]["eval_loss"]


def test_two_ranks_equal_one_and_accumulation_does_not_change_the_loss(
    run_recipe: Run, tmp_path: Path
) -> None:
    for name, ranks, micro_batch_size in (("one", 1, 2), ("two", 2, 2), ("whole", 1, 8)):
        keys = (f"micro_batch_size={micro_batch_size}", f"output_dir={tmp_path / name}")
        run_recipe("optimizer.lr=1e-3", "num_steps=5", *keys, ranks=ranks)
    one, two = read_metrics(tmp_path / "one"), read_metrics(tmp_path / "two")
    assert [r["num_target_tokens"] for r in one[1:]] == [r["num_target_tokens"] for r in two[1:]]
    # Same micro-batches, gradients summed in another order: float32 rounding. AdamW does not notice a wrong
    # scale of the gradients; their norm does.
    assert one[1]["grad_norm"] == pytest.approx(two[1]["grad_norm"], rel=1e-5)
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "two"), rel=1e-6)
    assert one[0]["eval_loss"] == pytest.approx(two[0]["eval_loss"], rel=1e-6)
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


def test_an_8_bit_gather_does_not_change_a_bit(run_recipe: Run, tmp_path: Path) -> None:
    for gather in ("low", "high"):
        keys = ("precision.kind=int8_rowcol", f"precision.all_gather={gather}", "compute_dtype=bfloat16")
        keys += ("num_steps=2", "eval_every_steps=0")
        done = run_recipe(*keys, f"output_dir={tmp_path / gather}", ranks=2)
        executed = re.search(r"^collectives: (.*)$", done.stdout, flags=re.MULTILINE)
        assert executed is not None, done.stdout
        assert ("all_gather uint8" in executed[1]) == (gather == "low"), executed
        assert ("14 weights gathered in 8 bits" in done.stdout) == (gather == "low"), done.stdout
        plan = json.loads((tmp_path / gather / "precision_plan.json").read_text(encoding="utf-8"))
        gathers = {layer["all_gather"] for layer in plan["layers"] if layer["reason"] is None}
        assert gathers == {"int8 rows" if gather == "low" else "high"}
    assert losses(tmp_path / "low") == losses(tmp_path / "high")
    assert differing(*(weights(tmp_path / gather / "export") for gather in ("low", "high"))) == set()


def test_memory_settings_do_not_change_a_bit_compilation_hardly_and_another_seed_does(
    run_recipe: Run, tmp_path: Path
) -> None:
    common = ("precision.kind=int8_rowcol", "num_steps=3", "eval_every_steps=0")

    def found(name: str, *overrides: str, **env: str) -> tuple[list[float], Finished]:
        done = run_recipe(*common, *overrides, f"output_dir={tmp_path / name}", **env)
        return losses(tmp_path / name), done

    eager, done = found("eager")
    assert "\ncollectives: " not in done.stdout, (
        "on one rank nothing is exchanged, and the run claims nothing"
    )
    # All at once: a difference of any would show. Selective: below, and in proofs/test_matrix.py.
    settings = (
        "activation_checkpointing=full",
        # Without FSDP's own sharding of one rank: deterministic, as everything on a CPU is.
        "parallel.reshard_after_forward=false",
        "parallel.reduce_every_micro_batch=true",
        "deterministic=true",
    )
    assert found("settings", *settings)[0] == eager
    assert found("another", "seed=2")[0] != eager

    keys = ("compile=block", "activation_checkpointing=selective")
    compiled, done = found("compiled", *keys, TORCH_LOGS="recompiles")
    assert "verified:" in done.stdout
    assert "Recompiling" not in done.stderr
    # Fused elementwise code rounds differently by a float32 ulp, and a value near a rounding edge then flips.
    assert compiled[0] == pytest.approx(eager[0], rel=1e-4)
    assert compiled == pytest.approx(eager, rel=1e-3)


SHORT = ("schedule.kind=constant", "eval_every_steps=0", "checkpoint.keep_last=9")


@pytest.fixture(scope="module")
def two_steps(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of two steps, with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("two")
    config = write_config(folder / "tiny.yaml", tiny_checkpoint, folder / "run")
    # By time, and each step takes longer.
    by_time = ("checkpoint.every_minutes=1e-6", "checkpoint.async_save=false")
    runner("full_finetune", config)(*SHORT, *by_time, "num_steps=2")
    return folder / "run"


@pytest.fixture
def again(two_steps: Path, run_recipe: Run, tmp_path: Path) -> Run:
    """Launches a copy of that run again."""
    shutil.copytree(two_steps, tmp_path / "run")
    return lambda *overrides, **options: run_recipe(*SHORT, *overrides, **options)


def test_a_finished_run_says_so_and_a_longer_one_continues_it(again: Run, tmp_path: Path) -> None:
    said = again("num_steps=2").stdout
    assert re.search(r"\nalready finished: .*step-00000002 is step 2 and exported, precision none;\n", said)
    other = refusal(again("num_steps=2", "precision.kind=int8_rowcol", code=2))
    assert "was trained with precision.kind 'none' (now 'int8_rowcol'); choose another" in other
    # What a resume may change: length, precision, checkpointing, ranks.
    keys = ("num_steps=4", "precision.kind=int8_rowcol", "activation_checkpointing=full")
    again(*keys, ranks=2)
    assert [record["step"] for record in read_metrics(tmp_path / "run")] == [1, 2, 3, 4]


def test_what_a_resume_may_not_change_is_refused_with_both_values(
    again: Run, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    other = shutil.copytree(tiny_checkpoint, tmp_path / "other")
    scaled = {name: tensor * 1.5 for name, tensor in weights(other).items()}
    save_file(scaled, other / "model.safetensors")
    for override, what in (
        ("seed=5", "seed"),
        ("data.max_rows=500", "data"),
        (f"model.path={other}", "weights"),
    ):
        assert f"was saved with {what} " in refusal(again("num_steps=4", override, code=2))
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_finished_run_exports_when_asked_and_the_export_follows_a_run_that_went_on(
    again: Run, two_steps: Path, tmp_path: Path
) -> None:
    run, first = tmp_path / "run", weights(two_steps / "export")
    shutil.rmtree(run / "export")
    (run / "export.json").unlink()  # as if killed between the last checkpoint and the export
    said = again("num_steps=2", "export.enabled=false").stdout
    assert "already finished" in said
    assert "and exported" not in said
    assert not (run / "export").exists()
    assert "export:" in again("num_steps=2").stdout
    assert differing(weights(run / "export"), first) == set()
    again("num_steps=3")
    assert "model.norm.weight" in differing(weights(run / "export"), first)
    assert not list(run.glob("old-*"))


def test_going_back_to_an_older_checkpoint_sets_the_later_ones_aside(again: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run/checkpoints"
    done = again("num_steps=3", f"resume={folder / 'step-00000001'}", "optimizer.lr=1e-4")
    assert "set aside:" in done.stdout
    assert [record["step"] for record in read_metrics(tmp_path / "run")] == [1, 2, 3]
    names = ["old-step-00000002-1", "step-00000001", "step-00000003"]
    assert sorted(path.name for path in folder.iterdir()) == names


def test_a_damaged_checkpoint_is_named_and_passed_over(again: Run, tmp_path: Path) -> None:
    damaged = tmp_path / "run/checkpoints/step-00000002/model-00000.safetensors"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    done = again("num_steps=3")
    assert f"checkpoint passed over: {damaged}" in done.stdout
    assert re.search(r"continuing .*step-00000001", done.stdout)
    assert (tmp_path / "run/checkpoints/old-step-00000002-1/model-00000.safetensors").exists()


def test_a_trial_run_leaves_no_weights_behind(run_recipe: Run, tmp_path: Path) -> None:
    trial = ("num_steps=3", "checkpoint.at_end=false", "export.enabled=false")
    done = run_recipe(*trial, "checkpoint.every_minutes=1e-6")
    assert "no export (export.enabled: false); there is no checkpoint" in done.stdout
    run = tmp_path / "run"
    assert len(losses(run)) == 3
    assert not (run / "export").exists()
    assert not list((run / "checkpoints").glob("*"))
    # What is due on the way is saved all the same, the last step's only where it is due.
    done = run_recipe(*trial, "checkpoint.every_steps=2")
    newest = run / "checkpoints" / "step-00000002"
    assert f"no export (export.enabled: false); the newest checkpoint is {newest}" in done.stdout
    assert [path.name for path in (run / "checkpoints").iterdir()] == [newest.name]


def test_samples_that_run_out_of_memory_do_not_cost_the_export(run_recipe: Run, tmp_path: Path) -> None:
    copy = tmp_path / "my_recipe.py"
    copy.write_text(
        Path("recipes/full_finetune.py").read_text(encoding="utf-8")
        + "\n\ndef greedy(*args, **keys):\n    raise torch.OutOfMemoryError('out of memory')\n\n\n"
        "from lptune.training import samples\n"
        "training.Steps.start = lambda steps, state, start=training.Steps.start: (\n"
        "    start(steps, state), setattr(samples, 'greedy', greedy))\n",
        encoding="utf-8",
    )
    done = run_recipe("num_steps=1", "data.eval_fraction=0.1", "num_samples=1", recipe=str(copy), code=1)
    assert "OutOfMemoryError" in done.stderr
    assert "export: " in done.stdout
    assert (tmp_path / "run" / "export" / "model.safetensors").exists()


def test_a_folder_belongs_to_one_run_at_a_time(run_recipe: Run, tmp_path: Path, tiny_config: Path) -> None:
    command = ["run", "full_finetune", "--config", str(tiny_config), "num_steps=100000"]
    second = list[Finished]()

    def once() -> bool:
        if (tmp_path / "run" / "metrics.jsonl").exists():
            second.append(run_recipe(code=2))
        return bool(second)

    warm.kill(command, tmp_path, once)
    assert "another run is writing to" in refusal(second[0])


def test_a_signal_saves_the_step_exits_143_and_leaves_the_evaluation_to_the_resumed_run(
    run_recipe: Run, tmp_path: Path, tiny_config: Path
) -> None:
    command = ["run", "full_finetune", "--config", str(tiny_config)]
    keys = ("schedule.kind=constant", "eval_every_steps=1")
    metrics = tmp_path / "run" / "metrics.jsonl"

    def once() -> bool:
        return metrics.exists() and metrics.read_text().count("\n") >= 4

    # To one of two ranks. A launcher that passes it on: cli/test_run.py, cli/test_multi_node.py.
    code = warm.kill([*command, *keys, "num_steps=100000"], tmp_path, once, signal.SIGINT, ranks=2)
    assert code == 143
    said = (tmp_path / "stdout").read_text(encoding="utf-8")
    step = read_metrics(tmp_path / "run")[-1]["step"]
    assert f"stopped by SIGINT after step {step}, saved; run again to continue" in said
    done = run_recipe(*keys, f"num_steps={step + 1}")
    assert f"continuing {tmp_path / 'run/checkpoints' / f'step-{step:08d}'}" in done.stdout
    stopped, made_up, last = read_metrics(tmp_path / "run")[-3:]
    assert (stopped["step"], "eval_loss" in stopped, list(made_up)) == (step, False, ["step", "eval_loss"])
    assert (made_up["step"], last["step"]) == (step, step + 1)
    assert abs(made_up["eval_loss"] - last["eval_loss"]) < 1.0
