"""Continued pre-training: tokens as the length, a loss for each source, wsd, exact resume, export."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lptune.base.errors import UserError
from lptune.checkpoint.manifest import describe_file
from lptune.config import PretrainConfig, load_config
from tests.faults.malformed import reseal
from tests.helpers.tiny_recipe import write_config
from tests.recipes.conftest import Run, differing, losses, read_metrics, refusal, weights

WORDS = {"animals": ["cat", "dog", "owl", "fox"], "numbers": ["one", "two", "six", "ten", "two"]}


def write_texts(path: Path, words: list[str], num_rows: int, seed: int) -> None:
    """Rows of 20 to 60 words."""
    draw = random.Random(seed)
    texts = [" ".join(draw.choices(words, k=draw.randint(20, 60))) for _ in range(num_rows)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


@pytest.fixture
def pretrain_config(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """12 steps of 8 rows from two sources, of which one counts three times; each has held-out texts."""
    for seed, (name, words) in enumerate(WORDS.items()):
        write_texts(tmp_path / f"{name}.jsonl", words, 80, seed)
        write_texts(tmp_path / f"{name}_test.jsonl", words, 8, seed + 10)
    data = {
        "source": [{"source": str(tmp_path / "animals.jsonl"), "weight": 3}, str(tmp_path / "numbers.jsonl")],
        "eval_source": [str(tmp_path / f"{name}_test.jsonl") for name in WORDS],
        "chat_template": "none",  # raw text; test_every_recipe.py trains with a template beside it
        "seq_len": 128,
    }
    path = write_config(tmp_path / "pretrain.yaml", tiny_checkpoint, tmp_path / "run", data=data)
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    del values["num_steps"]
    path.write_text(yaml.safe_dump(values | {"num_tokens": 11 * 8 * 128 + 1}), encoding="utf-8")
    return path


@pytest.fixture
def pretrain(run_recipe: Run, pretrain_config: Path) -> Run:
    """`run_recipe` for continued_pretrain on this data."""

    def call(*overrides: str, **options: Any) -> Any:
        return run_recipe(*overrides, recipe="continued_pretrain", config=pretrain_config, **options)

    return call


def by_source(record: dict[str, Any], key: str) -> dict[str, float]:
    return {name.partition("/")[2]: loss for name, loss in record.items() if name.startswith(f"{key}/")}


def test_the_run_ends_with_the_step_that_reaches_num_tokens_and_reports_each_source(
    pretrain: Run, tmp_path: Path
) -> None:
    done = pretrain("precision.kind=int8_rowcol")
    records = read_metrics(tmp_path / "run")
    assert [record["step"] for record in records] == list(range(13))
    assert [record["num_tokens"] for record in records[1:]] == [step * 8 * 128 for step in range(1, 13)]
    assert "verified:" in done.stdout
    first, last = records[0], records[-1]
    assert last["eval_loss"] < 0.9 * first["eval_loss"]
    for record in (first, last):
        losses_of = by_source(record, "eval_loss")
        assert set(losses_of) == {"animals_test", "numbers_test"}
        assert min(losses_of.values()) < record["eval_loss"] < max(losses_of.values())
        shown = f"eval_loss {record['eval_loss']:.4f}  eval_loss/animals_test {losses_of['animals_test']:.4f}"
        assert shown in done.stdout
    for record in records[1:]:
        assert set(by_source(record, "loss")) <= set(WORDS)
    # Three of four tokens are of the first source.
    mixed = [by_source(record, "loss") for record in records[1:]]
    assert all("animals" in found for found in mixed)
    again = pretrain("precision.kind=int8_rowcol", f"num_tokens={12 * 8 * 128}").stdout
    assert "\nalready finished" in again, "the same number of steps, given by another number of tokens"


def test_the_losses_of_sources_are_those_of_transformers_and_add_up(
    pretrain: Run, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    import transformers

    pretrain("num_tokens=1", "precision.kind=none", "global_batch_size=16", "schedule.warmup_steps=0")
    before, after = read_metrics(tmp_path / "run")
    for folder, record in ((tiny_checkpoint, before), (tmp_path / "run" / "export", after)):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        all_losses, ours = [], by_source(record, "eval_loss")
        for name in WORDS:
            rows = (tmp_path / f"{name}_test.jsonl").read_text(encoding="utf-8").splitlines()
            found = []
            for text in (json.loads(row)["text"] for row in rows):
                tokens = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
                assert tokens.shape[1] <= 128, "longer texts would be cut into chunks"
                with torch.no_grad():
                    log_p = model(tokens).logits[0, :-1].double().log_softmax(-1)
                found += (-log_p.gather(1, tokens[0, 1:, None])[:, 0]).tolist()
            assert ours[f"{name}_test"] == pytest.approx(sum(found) / len(found), abs=1e-4)
            all_losses += found
        assert record["eval_loss"] == pytest.approx(sum(all_losses) / len(all_losses), abs=1e-4)


def test_two_ranks_train_as_one_and_one_rank_continues_two(pretrain: Run, tmp_path: Path) -> None:
    common = ("schedule.kind=constant", "checkpoint.every_steps=2")
    pretrain(*common, "num_tokens=4096", f"output_dir={tmp_path / 'one'}")
    pretrain(*common, "num_tokens=2048", ranks=2)
    done = pretrain(*common, "num_tokens=4096")
    assert "continuing" in done.stdout
    one, two = read_metrics(tmp_path / "one"), read_metrics(tmp_path / "run")
    assert [r["step"] for r in two] == list(range(5))
    for a, b in zip(one[1:], two[1:], strict=True):
        assert a["num_target_tokens"] == b["num_target_tokens"]
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert by_source(a, "loss") == pytest.approx(by_source(b, "loss"), rel=1e-5)


TIMING = {"tokens_per_s", "step_time_s", "compile_time_s", "peak_memory_gib", "time"}


def test_a_run_in_its_stable_phase_goes_on_bitwise_as_the_longer_run(pretrain: Run, tmp_path: Path) -> None:
    """After a kill: `make faults`."""
    common = ("schedule.kind=wsd", "schedule.decay_steps=2", "checkpoint.every_steps=3")
    pretrain(*common, "num_tokens=7168", f"output_dir={tmp_path / 'long'}")
    pretrain(*common, "num_tokens=5120", f"output_dir={tmp_path / 'short'}")
    stable = tmp_path / "short" / "checkpoints" / "step-00000003"
    pretrain(*common, "num_tokens=7168", f"resume={stable}")
    on, long = (
        [{key: value for key, value in record.items() if key not in TIMING} for record in read_metrics(run)]
        for run in (tmp_path / "run", tmp_path / "long")
    )
    assert on == [record for record in long if record["step"] > 3]
    assert losses(tmp_path / "short")[:3] == losses(tmp_path / "long")[:3]
    assert differing(*(weights(tmp_path / name / "export") for name in ("run", "long"))) == set()


def test_two_keys_for_the_length_are_one_line(pretrain: Run, pretrain_config: Path, tmp_path: Path) -> None:
    for overrides, message in (
        (["num_steps=5"], "num_tokens: 11265 tokens and num_steps=5 both set the length of the run"),
        (["num_tokens=0"], "num_tokens: must be at least 1"),
        (["data.eval_source=null", "checkpoint.keep_best=1"], "checkpoint.keep_best: needs evaluations"),
    ):
        with pytest.raises(UserError, match=message):
            load_config(PretrainConfig, pretrain_config, overrides)
    done = pretrain("schedule.kind=wsd", "schedule.decay_steps=11", code=2)
    assert "2 steps of warm-up and 11 of decay do not fit into the 12 steps of the run" in refusal(done)
    assert not (tmp_path / "run").exists()


def test_a_run_from_before_cut_text_keeps_whole_texts_and_a_new_run_fills_its_rows(
    pretrain: Run, tmp_path: Path
) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text(f"{json.dumps({'text': 'one two six ten ' * 10})}\n" * 60)
    common = (f"data.source={texts}", "data.eval_source=null", "eval_every_steps=0", "data.seq_len=128")
    common += ("schedule.kind=constant", "checkpoint.every_steps=2")
    whole = pretrain(*common, "num_tokens=2048", "data.cut_text=false")
    assert "note: rows are" in whole.stdout
    saved = tmp_path / "run" / "checkpoints" / "step-00000002"
    state = json.loads((saved / "state.json").read_text(encoding="utf-8"))
    assert state["decides_rows"].pop("data.cut_text") is False
    (saved / "state.json").write_text(json.dumps(state), encoding="utf-8")
    entry = describe_file(saved / "state.json")
    reseal(saved, lambda manifest: manifest["files"].update({"state.json": entry}))
    for num_tokens in (4096, 6144):  # also from the checkpoint that the resumed run saved
        assert "continuing" in pretrain(*common, f"num_tokens={num_tokens}").stdout
    assert [record["step"] for record in read_metrics(tmp_path / "run")] == list(range(1, 7))
    refused = pretrain(*common, "num_tokens=8192", "data.cut_text=true", code=2)
    assert "changed: data.cut_text" in refused.stderr
    filled = pretrain(*common, "num_tokens=2048", f"output_dir={tmp_path / 'new'}").stdout
    assert "(data.cut_text)" in filled
    assert "note: rows are" not in filled
