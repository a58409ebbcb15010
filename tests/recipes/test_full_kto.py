"""KTO through the command line: metrics against transformers, ranks and micro-batches, resumes."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file

from lptune.config import DataConfig
from lptune.data import Rows, load_tokenizer, prepare
from tests.helpers import warm
from tests.helpers.tiny_recipe import write_config, write_labelled, write_preferences
from tests.recipes.conftest import Run, evaluations, read_metrics, refusal, runner

NUM_STEPS = 8


@pytest.fixture(scope="module")
def kto_config(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight steps on 160 labelled answers: answers are desirable, refusals are not. Refusals weigh little, so
    that unrelated answers become more probable and z is above 0.
    """
    folder = tmp_path_factory.mktemp("kto")
    source = write_labelled(folder / "labelled.jsonl", 160)
    return write_config(
        folder / "kto.yaml", tiny_checkpoint, folder / "whole",
        data={"source": str(source), "seq_len": 192, "eval_fraction": 0.15},
        optimizer={"lr": 4.0e-3}, schedule={"warmup_steps": 2}, num_steps=NUM_STEPS, eval_every_steps=4,
        global_batch_size=4, checkpoint={"every_steps": 3}, kto={"undesirable_weight": 0.1},
    )  # fmt: skip


@pytest.fixture(scope="module")
def kto(kto_config: Path) -> Run:
    return runner("full_kto", kto_config)


@pytest.fixture(scope="module")
def whole(kto: Run, kto_config: Path) -> Path:
    """The folder of an uninterrupted run on one rank."""
    kto()
    return kto_config.parent / "whole"


def _rows(config: Path, checkpoint: Path) -> tuple[Rows, Rows]:
    """The rows to train on, and those held out."""
    keys = yaml.safe_load(config.read_text())["data"]
    tokenizer = load_tokenizer(checkpoint, None)
    train, held_out, _ = prepare(DataConfig(**keys), tokenizer, seed=0, vocab_size=10**6, labelled=True)
    assert held_out is not None
    return train, held_out


def test_metrics_are_those_of_the_export_in_transformers(
    whole: Path, kto_config: Path, tiny_checkpoint: Path
) -> None:
    from transformers import AutoModelForCausalLM

    _, held_out = _rows(kto_config, tiny_checkpoint)
    log_p = {}
    for name, folder in (("before", tiny_checkpoint), ("after", whole / "export")):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for column, rows in enumerate((held_out, held_out.mismatched)):
            found = []
            for number in range(rows.num_documents):
                start, stop = rows.documents.place(number)
                tokens = torch.from_numpy(rows.documents.tokens_T[start:stop].copy()).long()
                is_target = torch.from_numpy(rows.documents.is_target_T[start:stop].copy())
                with torch.no_grad():
                    log_p_SV = model(tokens[None]).logits[0, :-1].log_softmax(-1)
                found.append(log_p_SV.gather(1, tokens[1:, None])[:, 0][is_target[1:]].sum())
            log_p[name, column] = torch.stack(found)
    stored = load_file(whole / "reference.safetensors")["held_out"]
    wanted = torch.stack([log_p["before", 0], log_p["before", 1]], 1)
    assert torch.allclose(stored, wanted, rtol=1e-5, atol=1e-4)
    r_N, unrelated_N = (log_p["after", column] - log_p["before", column] for column in (0, 1))
    z = max(0.0, unrelated_N.mean().item())
    label_N = torch.from_numpy(held_out.documents.is_desirable_N)
    loss_N = torch.where(label_N, 1 - (0.1 * (r_N - z)).sigmoid(), 0.1 * (1 - (0.1 * (z - r_N)).sigmoid()))

    first, *_, last = evaluations(whole)
    assert first["eval_loss"] == pytest.approx(torch.where(label_N, 0.5, 0.05).mean().item(), rel=1e-4)
    assert last["eval_loss"] == pytest.approx(loss_N.mean().item(), rel=1e-4)
    assert last["eval_kl"] == pytest.approx(z, rel=1e-4, abs=1e-4)
    assert last["eval_reward_desirable"] == pytest.approx(0.1 * r_N[label_N].mean().item(), rel=1e-3)
    assert last["eval_reward_undesirable"] == pytest.approx(0.1 * r_N[~label_N].mean().item(), rel=1e-3)
    assert last["eval_loss"] < first["eval_loss"]
    assert last["eval_margin"] > 0.1
    assert z > 0.5


def test_the_reference_names_the_rows_that_it_was_computed_for(
    whole: Path, kto_config: Path, tiny_checkpoint: Path
) -> None:
    train, held_out = _rows(kto_config, tiny_checkpoint)
    with safe_open(whole / "reference.safetensors", "pt") as file:
        made_with = json.loads(file.metadata()["lptune"])["made_with"]
    assert made_with["mismatched"] == train.mismatched.digest[:16]
    assert made_with["held_out"] == held_out.digest[:16]


def test_each_step_is_recorded_with_its_metrics(whole: Path) -> None:
    records = read_metrics(whole)
    assert [record["step"] for record in records] == list(range(NUM_STEPS + 1))
    assert records[1]["margin"] == pytest.approx(0.0, abs=1e-4)
    for record in records[1:]:
        margin = record["reward_desirable"] - record["reward_undesirable"]
        assert record["margin"] == pytest.approx(margin, abs=1e-6)
        assert record["kl"] >= 0
        assert record["log_p_desirable"] < 0
        assert record["num_target_tokens"] > 0
    assert all(record["kl"] > 0 for record in records[3:])


@pytest.mark.parametrize(
    ("kind", "micro_batch_size"), [("int8_rowcol", 2), pytest.param("none", 1, marks=pytest.mark.slow)]
)
def test_the_loss_depends_neither_on_ranks_nor_on_the_micro_batch_size(
    kto: Run, tmp_path: Path, kind: str, micro_batch_size: int
) -> None:
    common = (f"precision.kind={kind}", "schedule.kind=constant", "num_steps=3", "export.enabled=false")
    for name, ranks, size in (("one", 1, 2), ("other", 2, micro_batch_size)):
        kto(*common, f"output_dir={tmp_path / name}", f"micro_batch_size={size}", ranks=ranks)
    one, other = (load_file(tmp_path / name / "reference.safetensors") for name in ("one", "other"))
    assert all(torch.allclose(one[name], other[name], rtol=1e-6, atol=1e-5) for name in ("train", "held_out"))
    for a, b in zip(read_metrics(tmp_path / "one"), read_metrics(tmp_path / "other"), strict=True):
        later = 1e-6 if kind == "none" or a["step"] == 0 else 1e-3
        for key in {"loss", "eval_loss", "grad_norm"} & a.keys():
            assert a[key] == pytest.approx(b[key], rel=max(later, 1e-5) if key == "grad_norm" else later), key
        for key in {"kl", "eval_kl", "margin", "eval_margin"} & a.keys():
            assert a[key] == pytest.approx(b[key], rel=later, abs=1e-4 if kind == "none" else 1e-2), key


def test_a_run_is_not_continued_with_other_labels(kto: Run, tmp_path: Path) -> None:
    source = tmp_path / "labelled.jsonl"
    text = write_labelled(source, 60).read_text()
    keys = (f"data.source={source}", f"output_dir={tmp_path / 'run'}", "export.enabled=false")
    kto(*keys, "schedule.kind=constant", "num_steps=1")
    for label, said in (("0", "data"), ('"?"', "column 'label' must be true (a desirable answer) or false")):
        changed = text.replace('"label": true', f'"label": {label}').replace(
            '"label": false', '"label": true'
        )
        source.write_text(changed)
        assert said in refusal(kto(*keys, "schedule.kind=constant", "num_steps=2", code=2))


def test_preferences_train_as_two_answers_and_the_data_command_shows_them(
    kto: Run, kto_config: Path, tmp_path: Path
) -> None:
    source = write_preferences(tmp_path / "preferences.jsonl", 80)
    keys = ("export.enabled=false", "kto.undesirable_weight=1")
    done = kto(f"data.source={source}", f"output_dir={tmp_path / 'run'}", *keys)
    assert "desirable and" in done.stdout
    first, *_, last = evaluations(tmp_path / "run")
    assert last["eval_loss"] < first["eval_loss"]
    arguments = ["data", "full_kto", "--config", str(kto_config), f"data.source={source}"]
    shown = warm.lptune(arguments, folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "undesirable answers" in shown.stdout
    assert " targets, undesirable\n" in shown.stdout
    assert " targets\n" in shown.stdout
