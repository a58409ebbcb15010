"""The recipe evaluate through the command line, against transformers, its run, and known rates."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lptune.base.errors import UserError
from lptune.cli import catalog, recipe
from lptune.inference import ExactMatch, extracted
from tests.helpers import warm
from tests.helpers.cold import Finished
from tests.helpers.tiny_recipe import write_config

Evaluate = Callable[..., Finished]
TEXTS = [
    "The old clock in the hall had stopped at noon, and nobody knew why it never ran again.",
    "Rain fell on the harbour all morning. The boats stayed in, and the men mended their nets.",
    "One two three. " * 40,
]


@pytest.fixture
def evaluate(tiny_checkpoint: Path, tmp_path: Path) -> Evaluate:
    """`evaluate("key=value")`: `lptune run evaluate` with the tiny checkpoint in float32."""

    def call(*keys: str, ranks: int = 1, code: int = 0) -> Finished:
        fixed = [f"model.path={tiny_checkpoint}", "compute_dtype=float32", "device=cpu", "data.cache=none"]
        arguments = ["run", "evaluate", "--config", "evaluation", *fixed, "data.seq_len=128", *keys]
        done = warm.lptune(arguments, folder=tmp_path, ranks=ranks)
        assert done.returncode == code, done.stderr
        return done

    return call


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def result(folder: Path, name: str = "evaluation.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
    return found


def loss_by_transformers(folder: Path, documents: list[list[int]]) -> tuple[float, int]:
    """The summed loss and the number of targets, document by document, in float64."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    loss_sum, num_targets = 0.0, 0
    for ids in documents:
        tokens = torch.tensor([ids])
        with torch.no_grad():
            mean = model(tokens, labels=tokens).loss  # over all tokens but the first
        loss_sum, num_targets = loss_sum + float(mean) * (len(ids) - 1), num_targets + len(ids) - 1
    return loss_sum, num_targets


def chunks(ids: list[int], seq_len: int) -> list[list[int]]:
    """Raw text as the documents that training makes of it: each token is a target once."""
    return [ids[first : first + seq_len] for first in range(0, len(ids) - 1, seq_len - 1)]


def documents_of(checkpoint: Path, texts: list[str], seq_len: int) -> list[list[int]]:
    from lptune.data import load_tokenizer

    tokenizer = load_tokenizer(checkpoint)
    found = []
    for text in texts:
        ids = [*tokenizer.prefix_ids, *tokenizer.encode(text, add_special=False), tokenizer.eos_id]
        found += chunks(ids, seq_len)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_loss_and_perplexity_are_those_of_transformers_for_each_source(
    evaluate: Evaluate, tiny_checkpoint: Path, tmp_path: Path, ranks: int
) -> None:
    sums = []
    for number, texts in enumerate((TEXTS[:2], TEXTS[2:])):
        write_rows(tmp_path / f"{number}.jsonl", [{"text": text} for text in texts])
        sums.append(loss_by_transformers(tiny_checkpoint, documents_of(tiny_checkpoint, texts, 128)))
    evaluate("data.source=[0.jsonl, 1.jsonl]", "batch_size=1", ranks=ranks)
    found = result(tmp_path)["held_out"]
    for name, (loss_sum, num_targets) in zip(("0.jsonl", "1.jsonl"), sums, strict=True):
        one = found["sources"][name]
        assert one["num_targets"] == num_targets
        # float32 rounds a logit of size 10 to about 1e-6; the mean over targets averages such errors.
        assert one["loss"] == pytest.approx(loss_sum / num_targets, rel=1e-5)
        assert one["perplexity"] == pytest.approx(math.exp(loss_sum / num_targets), rel=1e-4)
    loss_sum, num_targets = (sum(values) for values in zip(*sums, strict=True))
    assert found["loss"] == pytest.approx(loss_sum / num_targets, rel=1e-5)
    assert result(tmp_path)["num_ranks"] == ranks


def test_perplexity_of_a_trained_model_on_real_text_is_that_of_transformers(
    assets: Path, evaluate: Evaluate, tmp_path: Path
) -> None:
    model, source = assets / "models/story_llama", assets / "data/c4_demo.jsonl"
    texts = [json.loads(line)["text"] for line in source.read_text(encoding="utf-8").splitlines()[:4]]
    loss_sum, num_targets = loss_by_transformers(model, documents_of(model, texts, 256))
    keys = (f"data.source={source}", "data.max_rows=4", "data.seq_len=256")
    evaluate(f"model.path={model}", *keys)
    found = result(tmp_path)["held_out"]
    assert found["num_targets"] == num_targets
    assert found["perplexity"] == pytest.approx(math.exp(loss_sum / num_targets), rel=1e-4)


def test_a_run_is_evaluated_on_the_rows_that_it_held_out(
    evaluate: Evaluate, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "tiny.yaml", tiny_checkpoint, tmp_path / "run")
    keys = ("num_steps=2", "eval_every_steps=2", "data.eval_fraction=0.05", "seed=3")
    run = warm.lptune(["run", "full_finetune", "--config", str(config), *keys], folder=tmp_path)
    assert run.returncode == 0, run.stderr
    last = json.loads((tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    of_run = ("data.source=builtin", "data.max_rows=900", "data.eval_fraction=0.05", "seed=3")
    evaluate("model.path=run", *of_run, "batch_size=2")
    # The run sums in float32: an error of at most 2^-24 for each of its batches.
    assert result(tmp_path)["held_out"]["loss"] == pytest.approx(last["eval_loss"], rel=1e-5)


def test_kinds_differ_by_their_rounding_alone(evaluate: Evaluate, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in TEXTS])
    losses = {}
    for kind in ("none", "int8_rowcol", "int8_weight_only", "float8_rowwise"):
        keys = [f"precision.kind={kind}", *(["precision.emulate=true"] if kind.startswith("float8") else [])]
        evaluate("data.source=rows.jsonl", *keys, f"output={kind}.json")
        found = result(tmp_path, f"{kind}.json")
        losses[kind] = found["held_out"]["loss"]
        assert f"precision {kind}" in found["plan"]
        found["config"].pop("precision")
        found["config"].pop("output")
        if kind != "none":
            first = result(tmp_path, "none.json")
            assert found["config"] == {k: first["config"][k] for k in found["config"]}
            assert (found["model"], found["versions"]) == (first["model"], first["versions"])
    assert len(set(losses.values())) == 4
    assert all(abs(loss / losses["none"] - 1) < 0.02 for loss in losses.values()), losses


def test_exact_match_counts_the_answers_that_generate_gives(
    evaluate: Evaluate, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    questions = write_rows(
        tmp_path / "questions.jsonl",
        [{"question": f"What comes after Monday{end}"} for end in ("?", "!", " (", " Tu", " X")],
    )
    # The random model repeats the end of its prompt, which must therefore be visible.
    asked = [f"prompts.source={questions}", "prompts.chat_template=none"]
    asked += ["prompts.prompt_template={question}"]
    keys = ["sampling.temperature=0", "sampling.max_new_tokens=6", "output=answers.jsonl"]
    fixed = [f"model.path={tiny_checkpoint}", "compute_dtype=float32", "device=cpu"]
    arguments = ["run", "generate", "--config", "generation", *fixed, *asked, *keys]
    assert warm.lptune(arguments, folder=tmp_path).returncode == 0
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text("utf-8").splitlines()]
    for number, row in enumerate(rows):  # three of five references are what the model says
        said = row.pop("generated").strip()
        assert said
        row["answer"] = f" {said}\n" if number < 3 else f"{said} and more"
    write_rows(tmp_path / "questions.jsonl", rows)
    done = evaluate(*asked, "answers.max_new_tokens=6", "answers.output=out.jsonl", "batch_size=2")
    found = result(tmp_path)["questions"]
    assert (found["num_correct"], found["num_questions"], found["exact_match"]) == (3, 5, 0.6)
    assert found["standard_error"] == pytest.approx(math.sqrt(0.6 * 0.4 / 5))
    assert "60.00% +- 21.91%, 3 of 5" in done.stdout
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    assert [row["is_correct"] for row in written] == [True, True, True, False, False]
    assert [row["row"] for row in written] == rows


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("6 * 3 = <<6*3=18>>18\n#### 18", "18"),
        ("#### 1,234,567", "1234567"),
        ("#### $1,200.50.", "1200.50"),
        ("####-7 apples", "-7"),
        ("#### -$7", "-7"),
        ("#### 3\n#### 4", "4"),
        ("#### .5", ".5"),
        ("the answer is 18", None),
        ("#### eighteen", None),
        ("", None),
    ],
)
def test_the_gsm8k_rule_takes_the_number_after_the_last_mark(text: str, number: str | None) -> None:
    assert extracted(text, "gsm8k") == number


def test_every_reference_of_gsm8k_matches_itself_and_no_other_number(assets: Path) -> None:
    lines = (assets / "data/gsm8k_train.jsonl").read_text(encoding="utf-8").splitlines()
    numbers = [extracted(json.loads(line)["answer"], "gsm8k") for line in lines]
    assert len(numbers) == 7473
    assert all(number is not None and math.isfinite(float(number)) for number in numbers)
    # The rule of grade-school-math: the first match of this pattern, without commas.
    official = [re.search(r"#### (\-?[0-9\.\,]+)", json.loads(line)["answer"]) for line in lines]
    same = [a == b[1].replace(",", "") for a, b in zip(numbers, official, strict=True) if b]
    assert all(same)
    assert len(same) == 7473


def test_an_answer_without_a_number_is_wrong() -> None:
    match = ExactMatch("gsm8k")
    row = SimpleNamespace(values={})
    asked: Any = SimpleNamespace(reference="#### 4", prompt=SimpleNamespace(row=row))
    said: Any = SimpleNamespace(text="no idea", ended_by="length")
    match.add(asked, said)
    found = match.result()
    assert (found["num_correct"], found["num_without_extract"], found["num_at_max_new_tokens"]) == (0, 1, 1)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["data.source=q", "harness.output=a"], "harness.output: needs harness.tasks"),
        (["prompts.source=q", "answers.extract=number"], "'number' is not one of exact, gsm8k"),
        (["harness.tasks=[x]", "harness.output=evaluation.json"], "harness.output: is the same file"),
        (["data.source=q", "data.chat_template=none", "prompts.chat_template=x"], "differ"),
    ],
)
def test_a_wrong_config_is_refused(keys: list[str], message: str) -> None:
    path, config = catalog.find_recipe("evaluate"), catalog.find_config("evaluation")
    with pytest.raises(UserError, match=message):
        recipe.load(path, config, ["model.path=x", *keys])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["model.path=nowhere", "data.source=qa.jsonl"], "nowhere"),
        (["data.source=missing.jsonl"], "missing.jsonl"),
        (["prompts.source=qa.jsonl", "answers.extract=gsm8k"], "line 1: the reference answer has no number"),
        (["prompts.source=qa.jsonl", "answers.reference_column=anser"], "(did you mean 'answer'?)"),
        (["prompts.source=no.jsonl"], "no column is the reference answer"),
        (
            ["data.source=qa.jsonl", "output=qa.jsonl"],
            "output: qa.jsonl exists; add output=qa-2.jsonl, or remove it",
        ),
        ([], "nothing to evaluate; set data.source"),
        (["data.source=qa.jsonl", "answers.output=a"], "answers.output: needs prompts.source"),
        (["harness.tasks=[no_task]"], "harness.tasks: lm_eval "),  # not installed, or has no such task
        (["data.source=qa.jsonl", "precision.kind=float8_rowwise"], "float8_rowwise"),
        (["data.source=qa.jsonl", "data.chat_template=no.jinja"], "data.chat_template: 'no.jinja'"),
    ],
)
def test_wrong_input_gets_one_line_and_code_2(
    evaluate: Evaluate, tmp_path: Path, keys: list[str], message: str
) -> None:
    write_rows(tmp_path / "qa.jsonl", [{"question": "What is 2 + 2?", "answer": "four"}])
    write_rows(tmp_path / "no.jsonl", [{"question": "What is 2 + 2?"}])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    error = evaluate(*keys, code=2).stderr.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_questions_on_two_ranks_get_the_result_of_one(evaluate: Evaluate, tmp_path: Path) -> None:
    rows = [{"question": f"What comes after {number}?", "answer": "four"} for number in range(5)]
    write_rows(tmp_path / "qa.jsonl", rows)
    keys = ("prompts.source=qa.jsonl", "prompts.chat_template=none", "answers.max_new_tokens=4")
    found = {}
    for ranks in (1, 2):
        files = (f"output={ranks}.json", f"answers.output={ranks}.jsonl")
        evaluate(*keys, *files, "batch_size=2", "precision.kind=int8_tensorwise", ranks=ranks)
        counts = result(tmp_path, f"{ranks}.json")["questions"]
        found[ranks] = counts, (tmp_path / f"{ranks}.jsonl").read_bytes()
    assert found[1] == found[2]
    assert found[1][0]["num_questions"] == 5
