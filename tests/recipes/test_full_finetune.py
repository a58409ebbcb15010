"""The main job, through the command line: what a run writes, and that it is right."""

import json
import math
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.helpers import cold, warm
from tests.recipes.conftest import Run, losses, read_metrics


def test_int8_run_leaves_metrics_plan_config_checkpoint_and_export(run_recipe: Run, tmp_path: Path) -> None:
    done = run_recipe("precision.kind=int8_rowcol", "num_samples=2", "compute_dtype=bfloat16")
    run = tmp_path / "run"
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


def test_the_export_loads_in_transformers_with_our_logits_and_is_trained_further(
    run_recipe: Run, tmp_path: Path, tiny_config: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from lptune import checkpoint, models

    run_recipe("precision.kind=int8_rowcol")
    export = tmp_path / "run" / "export"
    theirs = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    index = checkpoint.read_index(export)
    ours = models.build_on_meta(models.read_config(export))
    ours.to_empty(device="cpu")
    ours.reset_buffers("cpu")
    checkpoint.load_hf(ours, index)
    tokens = torch.tensor([AutoTokenizer.from_pretrained(export)("What comes after Monday?")["input_ids"]])
    with torch.no_grad():
        difference = (ours(tokens) - theirs(tokens).logits).abs().max()
    assert difference <= 1e-4

    first = read_metrics(tmp_path / "run")
    run_recipe(f"model.path={export}", f"output_dir={tmp_path / 'second'}", "num_steps=6")
    second = read_metrics(tmp_path / "second")
    # Evaluated in float32 without INT8: close to the first run's end, and better still at its own.
    assert second[0]["eval_loss"] == pytest.approx(first[-1]["eval_loss"], rel=0.02)
    assert second[-1]["eval_loss"] < second[0]["eval_loss"]


def test_export_keeps_names_files_and_dtype(run_recipe: Run, tmp_path: Path, tiny_checkpoint: Path) -> None:
    run_recipe("num_steps=1", "export.dtype=bfloat16")
    base, exported = (
        load_file(tiny_checkpoint / "model.safetensors"),
        load_file(tmp_path / "run/export/model.safetensors"),
    )
    assert {name: tensor.shape for name, tensor in exported.items()} == {
        name: t.shape for name, t in base.items()
    }
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    assert (
        json.loads((tmp_path / "run/export/config.json").read_text(encoding="utf-8"))["dtype"] == "bfloat16"
    )
    names = {path.name for path in (tmp_path / "run/export").iterdir()}
    assert names >= {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
    }


@pytest.mark.parametrize("kind", ["none", pytest.param("int8_rowcol", marks=pytest.mark.slow)])
def test_two_ranks_equal_one(run_recipe: Run, tmp_path: Path, kind: str) -> None:
    common = (f"precision.kind={kind}", "optimizer.lr=1e-3", "num_steps=6")
    for ranks in (1, 2):
        run_recipe(*common, f"output_dir={tmp_path / str(ranks)}", ranks=ranks)
    one, two = read_metrics(tmp_path / "1"), read_metrics(tmp_path / "2")
    assert [r["num_target_tokens"] for r in one[1:]] == [r["num_target_tokens"] for r in two[1:]]
    # Same micro-batches, gradients summed in another order: float32 rounding, which 8-bit rounding flips
    # amplify.
    later = 1e-6 if kind == "none" else 1e-3
    # AdamW does not notice a wrong scale of the gradients; their norm does.
    assert one[1]["grad_norm"] == pytest.approx(two[1]["grad_norm"], rel=1e-5 if kind == "none" else 1e-3)
    for step, (a, b) in enumerate(zip(losses(tmp_path / "1"), losses(tmp_path / "2"), strict=True)):
        assert a == pytest.approx(b, rel=1e-6 if step == 0 else later), step
    assert one[0]["eval_loss"] == pytest.approx(two[0]["eval_loss"], rel=1e-6)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_an_8_bit_gather_does_not_change_a_bit(run_recipe: Run, tmp_path: Path, ranks: int) -> None:
    for gather in ("low", "high"):
        keys = ("precision.kind=int8_rowcol", f"precision.all_gather={gather}", "compute_dtype=bfloat16")
        done = run_recipe(*keys, "num_steps=4", f"output_dir={tmp_path / gather}", ranks=ranks)
        executed = re.search(r"^collectives: (.*)$", done.stdout, flags=re.MULTILINE)
        # On one rank nothing is exchanged, and the run claims nothing.
        assert (executed is not None) == (ranks == 2), done.stdout
        exchanged = gather == "low" and ranks == 2
        assert ("all_gather uint8" in (executed[1] if executed else "")) == exchanged, executed
        assert ("14 weights gathered in 8 bits" in done.stdout) == exchanged, done.stdout
        plan = json.loads((tmp_path / gather / "precision_plan.json").read_text(encoding="utf-8"))
        gathers = {layer["all_gather"] for layer in plan["layers"] if layer["reason"] is None}
        assert gathers == {"int8 rows" if gather == "low" else "high"}
    assert losses(tmp_path / "low") == losses(tmp_path / "high")
    ours, theirs = (
        load_file(tmp_path / gather / "export" / "model.safetensors") for gather in ("low", "high")
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_seed_gives_the_same_losses_twice_and_another_seed_others(run_recipe: Run, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run_recipe(
            "precision.kind=int8_rowcol", "num_steps=4", f"seed={seed}", f"output_dir={tmp_path / name}"
        )
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert losses(tmp_path / "a") != losses(tmp_path / "c")


def test_accumulation_does_not_change_the_loss(run_recipe: Run, tmp_path: Path) -> None:
    for micro in (2, 8):
        run_recipe("num_steps=4", f"micro_batch_size={micro}", f"output_dir={tmp_path / str(micro)}")
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "8"), rel=1e-5)


def test_memory_settings_do_not_change_a_bit(run_recipe: Run, tmp_path: Path) -> None:
    common = ("precision.kind=int8_rowcol", "num_steps=3", "eval_every_steps=0")
    run_recipe(*common)
    for overrides in (
        ("activation_checkpointing=selective",),
        ("activation_checkpointing=full",),
        ("parallel.reshard_after_forward=false", "parallel.reduce_every_micro_batch=true"),
        ("deterministic=true",),  # on a CPU everything is
    ):
        other = tmp_path / overrides[0]
        run_recipe(*common, *overrides, f"output_dir={other}")
        assert losses(other) == losses(tmp_path / "run"), overrides


@pytest.mark.parametrize(
    "overrides",
    [
        ("compile=block", "activation_checkpointing=selective"),
        pytest.param(("compile=model",), marks=pytest.mark.slow),  # the suite: tests/proofs/test_matrix.py
    ],
)
def test_compiled_runs_verify_and_train_alike(
    run_recipe: Run, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    common = ("precision.kind=int8_rowcol", "num_steps=3", "eval_every_steps=0")
    run_recipe(*common)
    logged = {"TORCH_LOGS": "recompiles"} if "compile=block" in overrides else {}
    done = run_recipe(*common, *overrides, f"output_dir={tmp_path / 'compiled'}", **logged)
    assert "verified:" in done.stdout
    assert "Recompiling" not in done.stderr
    eager, compiled = losses(tmp_path / "run"), losses(tmp_path / "compiled")
    # Fused elementwise code rounds differently by a float32 ulp, and a value near a rounding edge then flips.
    assert compiled[0] == pytest.approx(eager[0], rel=1e-4)
    assert compiled == pytest.approx(eager, rel=1e-3)


@pytest.mark.parametrize(
    "kind", [pytest.param("int8_tensorwise", marks=pytest.mark.slow), "float8_delayed", "int8_weight_only"]
)
def test_killed_mid_epoch_and_resumed_the_losses_are_bitwise_those_of_an_uninterrupted_run(
    run_recipe: Run, tmp_path: Path, tiny_config: Path, kind: str
) -> None:
    emulate = f"precision.emulate={str(kind == 'float8_delayed').lower()}"
    # Two micro-batches to a step: they are accumulated, and more would be the same again.
    common = (f"precision.kind={kind}", emulate, "micro_batch_size=4")
    common += ("checkpoint.every_steps=3", "num_steps=16")
    run_recipe(*common, f"output_dir={tmp_path / 'whole'}")
    metrics = tmp_path / "run" / "metrics.jsonl"
    for kill_after in (4, 10):
        process = warm.start(
            ["run", "full_finetune", "--config", str(tiny_config), *common], tmp_path, {}, tmp_path
        )
        while process.is_alive() and (
            not metrics.exists() or metrics.read_text().count("\n") < kill_after + 1
        ):
            time.sleep(0.005)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    done = run_recipe(*common)
    assert "continuing" in done.stdout
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert [r.get("eval_loss") for r in read_metrics(tmp_path / "run")] == [
        r.get("eval_loss") for r in read_metrics(tmp_path / "whole")
    ]
    for name in ("model", "optimizer", *(["replicated"] if kind == "float8_delayed" else [])):
        file = f"checkpoints/step-00000016/{name}-00000.safetensors"
        ours, theirs = load_file(tmp_path / "run" / file), load_file(tmp_path / "whole" / file)
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_a_finished_run_says_so_and_a_longer_one_continues_it(run_recipe: Run, tmp_path: Path) -> None:
    run_recipe("schedule.kind=constant", "num_steps=4")
    again = run_recipe("schedule.kind=constant", "num_steps=4").stdout
    assert re.search(r"\nalready finished: .*step-00000004 is step 4 and exported, precision none;\n", again)
    other = run_recipe("schedule.kind=constant", "num_steps=4", "precision.kind=int8_rowcol", code=2)
    assert "was trained with precision.kind 'none' (now 'int8_rowcol'); choose another" in other.stderr
    # What a resume may change: length, precision, checkpointing, ranks.
    run_recipe(
        "schedule.kind=constant",
        "num_steps=6",
        "precision.kind=int8_rowcol",
        "activation_checkpointing=full",
        ranks=2,
    )
    assert [record["step"] for record in read_metrics(tmp_path / "run")] == list(range(7))


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


def test_a_run_without_an_export_is_finished_and_exports_when_asked(run_recipe: Run, tmp_path: Path) -> None:
    run_recipe("num_steps=2", "export.enabled=false")
    assert not (tmp_path / "run" / "export").exists()
    again = run_recipe("num_steps=2", "export.enabled=false").stdout
    assert "already finished" in again
    assert "and exported" not in again
    assert "export: " in run_recipe("num_steps=2").stdout
    assert (tmp_path / "run" / "export" / "model.safetensors").exists()
    assert len(losses(tmp_path / "run")) == 2


def test_what_a_resume_may_not_change_is_refused_with_both_values(run_recipe: Run, tmp_path: Path) -> None:
    run_recipe("num_steps=2")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    for override in ("seed=5", "data.seq_len=64", "global_batch_size=4", "data.max_rows=500"):
        done = run_recipe("num_steps=4", override, code=2)
        key = "data" if override.startswith("data.max_rows") else override.partition("=")[0]
        assert f"was saved with {key} " in done.stderr
        assert done.stderr.count("\n") == 1
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_folder_belongs_to_one_run_at_a_time(run_recipe: Run, tmp_path: Path, tiny_config: Path) -> None:
    command = ["run", "full_finetune", "--config", str(tiny_config), "num_steps=100000"]
    first = warm.start(command, tmp_path, {}, tmp_path)
    try:
        while first.is_alive() and not (tmp_path / "run" / "metrics.jsonl").exists():
            time.sleep(0.02)
        done = run_recipe(code=2)
    finally:
        first.kill()
        first.join()
    assert "another run is writing to" in done.stderr


def test_the_export_follows_a_run_that_went_on(run_recipe: Run, tmp_path: Path, tiny_config: Path) -> None:
    common = ("schedule.kind=constant", "eval_every_steps=0")
    run_recipe(*common, "num_steps=2")
    first = load_file(tmp_path / "run/export/model.safetensors")
    (tmp_path / "run/export.json").unlink()  # as if killed between the last checkpoint and the export
    assert "export:" in run_recipe(*common, "num_steps=2").stdout
    again = load_file(tmp_path / "run/export/model.safetensors")
    assert all(torch.equal(tensor, first[name]) for name, tensor in again.items())
    run_recipe(*common, "num_steps=3")
    last = load_file(tmp_path / "run/export/model.safetensors")
    assert not torch.equal(last["model.norm.weight"], first["model.norm.weight"])
    assert not list((tmp_path / "run").glob("old-*"))


def test_going_back_to_an_older_checkpoint_sets_the_later_ones_aside(run_recipe: Run, tmp_path: Path) -> None:
    common = (
        "schedule.kind=constant",
        "checkpoint.every_minutes=1e-6",  # each step takes longer
        "checkpoint.async_save=false",
        "checkpoint.keep_last=9",
        "eval_every_steps=0",
    )
    run_recipe(*common, "num_steps=4")
    folder = tmp_path / "run/checkpoints"
    done = run_recipe(*common, "num_steps=3", f"resume={folder / 'step-00000002'}", "optimizer.lr=1e-4")
    assert "set aside:" in done.stdout
    assert [record["step"] for record in read_metrics(tmp_path / "run")] == [1, 2, 3]
    assert sorted(p.name for p in folder.iterdir()) == [
        "old-step-00000003-1",
        "old-step-00000004-1",
        "step-00000001",
        "step-00000002",
        "step-00000003",
    ]


@pytest.mark.parametrize(
    ("ranks", "number", "resume", "again"),
    [
        pytest.param(1, signal.SIGTERM, "none", "run again with resume=auto", marks=pytest.mark.slow),
        (2, signal.SIGINT, "auto", "run again"),
    ],
)
def test_a_signal_saves_the_step_exits_143_and_leaves_the_evaluation_to_the_resumed_run(
    run_recipe: Run,
    tmp_path: Path,
    tiny_config: Path,
    ranks: int,
    number: signal.Signals,
    resume: str,
    again: str,
) -> None:
    command = [*cold.LPTUNE, "run", f"--nproc-per-node={ranks}", "full_finetune"]
    command += ["--config", str(tiny_config)]
    command += ["schedule.kind=constant", "eval_every_steps=1", "num_steps=100000", f"resume={resume}"]
    metrics = tmp_path / "run" / "metrics.jsonl"
    with cold.start(*command, folder=tmp_path) as process:
        while process.poll() is None and (not metrics.exists() or metrics.read_text().count("\n") < 4):
            time.sleep(0.02)
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 143
    step = read_metrics(tmp_path / "run")[-1]["step"]
    assert f"stopped by {number.name} after step {step}, saved; {again} to continue" in out
    assert ("Ctrl-C again after 5 s ends at once" in err) == (number == signal.SIGINT)
    done = run_recipe("schedule.kind=constant", "eval_every_steps=1", f"num_steps={step + 1}")
    assert f"continuing {tmp_path / 'run/checkpoints' / f'step-{step:08d}'}" in done.stdout
    stopped, made_up, last = read_metrics(tmp_path / "run")[-3:]
    assert (stopped["step"], "eval_loss" in stopped, list(made_up)) == (step, False, ["step", "eval_loss"])
    assert (made_up["step"], last["step"]) == (step, step + 1)
    assert abs(made_up["eval_loss"] - last["eval_loss"]) < 1.0


def test_other_weights_under_the_same_config_are_refused(
    run_recipe: Run, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    run_recipe("num_steps=1", "eval_every_steps=0")
    other = tmp_path / "other"
    shutil.copytree(tiny_checkpoint, other)
    tensors = load_file(other / "model.safetensors")
    save_file({name: tensor * 1.5 for name, tensor in tensors.items()}, other / "model.safetensors")
    done = run_recipe("num_steps=2", f"model.path={other}", code=2)
    assert "was saved with weights" in done.stderr


def test_a_damaged_checkpoint_is_named_and_passed_over(run_recipe: Run, tmp_path: Path) -> None:
    common = ("schedule.kind=constant", "checkpoint.every_steps=2")
    run_recipe(*common, "num_steps=4")
    damaged = tmp_path / "run/checkpoints/step-00000004/model-00000.safetensors"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    done = run_recipe(*common, "num_steps=5")
    assert f"checkpoint passed over: {damaged}" in done.stdout
    assert "continuing" in done.stdout
    assert "step-00000002" in done.stdout
    assert (tmp_path / "run/checkpoints/old-step-00000004-1/model-00000.safetensors").exists()
