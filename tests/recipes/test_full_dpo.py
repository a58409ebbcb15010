"""Preference tuning through the command line: metrics against transformers, the reference, resumes."""

import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers import warm
from tests.helpers.slow import slow_but
from tests.helpers.tiny_recipe import write_config, write_preferences
from tests.recipes.conftest import Run, differing, evaluations, losses, read_metrics, runner

NUM_STEPS = 8


@pytest.fixture(scope="module")
def dpo_config(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight steps on 120 preferences for an answer, and against not giving one."""
    folder = tmp_path_factory.mktemp("dpo")
    source = write_preferences(folder / "preferences.jsonl", 120)
    return write_config(
        folder / "dpo.yaml", tiny_checkpoint, folder / "whole",
        data={"source": str(source), "chat_template": "none", "seq_len": 192, "eval_fraction": 0.15},
        optimizer={"lr": 1.0e-3}, schedule={"warmup_steps": 2}, num_steps=NUM_STEPS, eval_every_steps=4,
        global_batch_size=4, checkpoint={"every_steps": 3},
    )  # fmt: skip


@pytest.fixture(scope="module")
def dpo(dpo_config: Path) -> Run:
    return runner("full_dpo", dpo_config)


@pytest.fixture(scope="module")
def whole(dpo: Run, dpo_config: Path) -> Path:
    """The folder of an uninterrupted run on one rank."""
    dpo()
    return dpo_config.parent / "whole"


def test_metrics_are_those_of_the_export_in_transformers(
    whole: Path, dpo_config: Path, tiny_checkpoint: Path
) -> None:
    import yaml
    from transformers import AutoModelForCausalLM

    from lptune.config import DataConfig
    from lptune.data import load_tokenizer, prepare

    keys = yaml.safe_load(dpo_config.read_text())["data"]
    tokenizer = load_tokenizer(tiny_checkpoint, keys["chat_template"])
    _, held_out, _ = prepare(DataConfig(**keys), tokenizer, seed=0, vocab_size=10**6, preferences=True)
    assert held_out is not None
    log_p = {}
    for name, folder in (("before", tiny_checkpoint), ("after", whole / "export")):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        found = []
        for number in range(held_out.num_documents):
            start, stop = held_out.documents.place(number)
            tokens = torch.from_numpy(held_out.documents.tokens_T[start:stop].copy()).long()
            is_target = torch.from_numpy(held_out.documents.is_target_T[start:stop].copy())
            with torch.no_grad():
                log_p_SV = model(tokens[None]).logits[0, :-1].log_softmax(-1)
            found.append(log_p_SV.gather(1, tokens[1:, None])[:, 0][is_target[1:]].sum())
        log_p[name] = torch.stack(found)
    stored = load_file(whole / "reference.safetensors")["held_out"]
    assert torch.allclose(stored, log_p["before"], rtol=1e-5, atol=1e-4)
    reward_P2 = 0.1 * (log_p["after"] - log_p["before"]).view(-1, 2)
    margin_P = reward_P2[:, 0] - reward_P2[:, 1]

    first, *_, last = evaluations(whole)
    assert first["eval_loss"] == pytest.approx(0.693147, rel=1e-4)
    assert last["eval_loss"] == pytest.approx(-margin_P.sigmoid().log().mean().item(), rel=1e-4)
    assert last["eval_accuracy"] == pytest.approx((margin_P > 0).float().mean().item())
    assert last["eval_margin"] == pytest.approx(margin_P.mean().item(), rel=1e-3)
    assert last["eval_log_p_chosen"] == pytest.approx(log_p["after"][0::2].mean().item(), rel=1e-4)
    assert last["eval_accuracy"] > 0.7
    assert last["eval_loss"] < 0.9 * first["eval_loss"]


def test_each_step_is_recorded_with_the_metrics_of_its_preferences(whole: Path) -> None:
    records = read_metrics(whole)
    assert [record["step"] for record in records] == list(range(NUM_STEPS + 1))
    assert records[1]["loss"] == pytest.approx(0.693147, rel=1e-4)
    for record in records[1:]:
        margin = record["reward_chosen"] - record["reward_rejected"]
        assert record["margin"] == pytest.approx(margin, abs=1e-5)
        assert 0 <= record["accuracy"] <= 1
        assert record["log_p_chosen"] < 0
        assert record["num_target_tokens"] > 0
    assert records[-1]["accuracy"] > 0.7


@pytest.mark.parametrize("kind", ["int8_rowcol", pytest.param("none", marks=pytest.mark.slow)])
def test_two_ranks_equal_one(dpo: Run, tmp_path: Path, kind: str) -> None:
    for ranks in (1, 2):
        dpo(f"precision.kind={kind}", "num_steps=3", f"output_dir={tmp_path / str(ranks)}", ranks=ranks)
    one, two = (load_file(tmp_path / name / "reference.safetensors") for name in ("1", "2"))
    assert all(torch.equal(one[name], two[name]) for name in ("train", "held_out"))
    for a, b in zip(read_metrics(tmp_path / "1"), read_metrics(tmp_path / "2"), strict=True):
        later = 1e-6 if kind == "none" or a["step"] == 0 else 1e-3
        for key in {"loss", "eval_loss", "grad_norm", "margin"} & a.keys():
            rel = max(later, 1e-5) if key == "grad_norm" else later
            assert a[key] == pytest.approx(b[key], rel=rel, abs=1e-4 if key == "margin" else 0), key
        assert a.get("accuracy") == b.get("accuracy")


def test_killed_at_any_time_the_run_continues_bitwise(
    dpo: Run, dpo_config: Path, whole: Path, tmp_path: Path
) -> None:
    """Killed between the reference and the first checkpoint, and after it; then the reference is lost. Other
    kinds: tests/faults.
    """
    run = tmp_path / "run"
    arguments = ["run", "full_dpo", "--config", str(dpo_config), f"output_dir={run}"]
    for awaited in (run / "reference.safetensors", run / "checkpoints" / "step-00000003"):
        assert warm.kill(arguments, tmp_path, awaited.exists) == -signal.SIGKILL
    (run / "reference.safetensors").unlink()
    done = dpo(f"output_dir={run}")
    assert "continuing" in done.stdout
    assert "reference: computing" in done.stdout
    assert losses(run) == losses(whole)
    for key in ("eval_loss", "eval_accuracy", "eval_margin"):
        assert [r[key] for r in evaluations(run)] == [r[key] for r in evaluations(whole)]
    file = f"checkpoints/step-{NUM_STEPS:08}/model-00000.safetensors"
    assert differing(load_file(run / file), load_file(whole / file)) == set()


def test_the_reference_is_read_by_any_number_of_ranks_and_made_anew_if_it_does_not_fit(
    dpo: Run, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    path = run / "reference.safetensors"
    constant = ("schedule.kind=constant", f"output_dir={run}", "export.enabled=false")
    dpo(*constant, "num_steps=1")
    first = path.read_bytes()
    done = dpo(*constant, "num_steps=2", ranks=2)
    assert "reference: computing" not in done.stdout
    assert path.read_bytes() == first

    damaged = bytearray(first)
    damaged[-3] ^= 1
    path.write_bytes(damaged)
    done = dpo(*constant, "num_steps=3")
    assert f"note: {path} is computed again: it is damaged" in done.stdout
    assert path.read_bytes() == first

    done = dpo(*constant, "num_steps=4", "precision.kind=int8_rowcol")
    assert f"note: {path} is computed again: it was computed with precision" in done.stdout
    assert path.read_bytes() != first


# Their values: training/test_preference.py. `whole` is of a loss with a reference, as ipo is.
@pytest.mark.parametrize("loss", slow_but(lambda loss: loss == "orpo", ["ipo", "orpo", "simpo"]))
def test_other_losses_train_and_only_those_with_a_reference_keep_one(
    dpo: Run, tmp_path: Path, loss: str
) -> None:
    run = tmp_path / "run"
    dpo(f"preference.loss={loss}", f"output_dir={run}", "export.enabled=false", "precision.kind=int8_rowcol")
    assert (run / "reference.safetensors").exists() == (loss == "ipo")
    first, *_, last = evaluations(run)
    assert last["eval_loss"] < first["eval_loss"]
    assert last["eval_margin"] > first["eval_margin"]
