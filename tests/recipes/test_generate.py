"""The recipe generate through the command line: jobs, chats, interruptions and wrong input."""

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from lptune.base.errors import UserError
from lptune.cli import catalog, recipe
from tests.helpers import cold, warm
from tests.helpers.cold import Finished
from tests.recipes.conftest import read_lines, refusal

Generate = Callable[..., Finished]


@pytest.fixture
def generate(tiny_checkpoint: Path, tmp_path: Path) -> Generate:
    """`generate("key=value")`: `lptune run generate` with the tiny checkpoint, greedy unless keys differ."""

    def call(*keys: str, ranks: int = 1, code: int = 0) -> Finished:
        done = warm.lptune(arguments(tiny_checkpoint, *keys), folder=tmp_path, ranks=ranks)
        assert done.returncode == code, done.stderr
        return done

    return call


def arguments(checkpoint: Path, *keys: str) -> list[str]:
    fixed = [f"model.path={checkpoint}", "compute_dtype=float32", "device=cpu", "sampling.max_new_tokens=12"]
    if any(key.startswith("prompts.source=") for key in keys):
        # A template takes a process of its own, a CPU second: the chat below has one, and the rows that
        # test_every_recipe.py answers.
        fixed.append("prompts.chat_template=none")
    return ["run", "generate", "--config", "generation", *fixed, *keys]


def write_rows(folder: Path, num: int) -> Path:
    path = folder / "rows.jsonl"
    rows = [
        {"question": "What comes after " + "Monday, " * (i % 5) + "Tuesday?", "id": i} for i in range(num)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def test_a_row_gets_the_same_answer_in_any_batch(generate: Generate, tmp_path: Path) -> None:
    source = write_rows(tmp_path, 7)
    for size in (1, 4):
        done = generate(f"prompts.source={source}", f"output=by{size}.jsonl", f"batch_size={size}")
        assert done.stdout == ""
    one, four = read_lines(tmp_path / "by1.jsonl"), read_lines(tmp_path / "by4.jsonl")
    assert one == four
    assert [row | {"generated": ""} for row in read_lines(source)] == [row | {"generated": ""} for row in one]
    assert len({row["generated"] for row in one}) > 3, "temperature 0.7: rows of equal prompts differ"


def test_a_job_that_was_stopped_continues_with_the_answers_of_an_uninterrupted_one_on_any_ranks(
    generate: Generate, tmp_path: Path
) -> None:
    # int8_tensorwise quantizes a batch with one scale, so other batches would give other answers; the
    # temperature is above 0, so that rows draw by their number in the job.
    source = write_rows(tmp_path, 9)
    keys = (f"prompts.source={source}", "batch_size=2", "precision.kind=int8_tensorwise")
    keys += ("sampling.max_new_tokens=4",)
    generate(*keys, "output=whole.jsonl")
    whole = (tmp_path / "whole.jsonl").read_bytes()
    generate(*keys, "output=two.jsonl", ranks=2)
    assert (tmp_path / "two.jsonl").read_bytes() == whole

    cut, lines = tmp_path / "cut.jsonl", whole.splitlines(keepends=True)
    settings = (tmp_path / "whole.jsonl.settings.json").read_bytes()
    cut.with_suffix(".jsonl.settings.json").write_bytes(settings)
    # Killed in the middle of a line, as a full disk or a crash of the machine leaves it.
    cut.write_bytes(b"".join(lines[:5]) + lines[5][:9] + 9999 * b"x")
    done = generate(*keys, "output=cut.jsonl")
    assert cut.read_bytes() == whole
    assert "6 answers\n8 answers\n9 answers" in done.stderr
    # Stopped by one rank after 3 of 5 batches: two ranks begin with the fourth.
    cut.write_bytes(b"".join(lines[:7]))
    for _ in range(2):  # the second time, nothing is left to do
        generate(*keys, "output=cut.jsonl", ranks=2)
        assert cut.read_bytes() == whole


def test_a_signal_ends_a_job_between_two_tokens_and_loses_no_answer(
    generate: Generate, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    source, stopped = write_rows(tmp_path, 5), tmp_path / "stopped.jsonl"
    keys = (f"prompts.source={source}", "batch_size=1", "output=stopped.jsonl", "sampling.max_new_tokens=60")

    def once() -> bool:
        return stopped.exists() and stopped.stat().st_size > 0

    code = warm.kill(arguments(tiny_checkpoint, *keys), tmp_path, once, signal.SIGTERM)
    stderr = (tmp_path / "stderr").read_text(encoding="utf-8")
    assert code == 143, stderr
    kept = stopped.read_bytes()
    num_kept = len(kept.splitlines())
    assert 1 <= num_kept < 5
    assert f"stopped by SIGTERM: stopped.jsonl has {num_kept} answers; run again to continue" in stderr
    generate(*keys)
    assert stopped.read_bytes().startswith(kept)
    assert [row["id"] for row in read_lines(stopped)] == list(range(5))


def test_a_chat_answers_each_line_and_ctrl_c_ends_it_cleanly(
    generate: Generate, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    generate()  # stdin is empty: there is nothing to answer
    process = cold.start(*cold.LPTUNE, *arguments(tiny_checkpoint), folder=tmp_path, stdin=subprocess.PIPE)
    assert process.stdin
    assert process.stdout
    for line in ("What comes after Monday?\n", "\n/reset\nAnd after that?\n"):  # no answer to the first two
        process.stdin.write(line)
        process.stdin.flush()
        assert process.stdout.readline().strip()
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stdout.strip()) == (130, "")
    assert stderr.splitlines() == [
        f"{tiny_checkpoint}: precision none: all 15 linear layers run in compute dtype"
    ]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["prompts.source=rows.jsonl"], "output: is not set, and prompts.source is"),
        (["output=a.jsonl"], "prompts.source: is not set, and output is"),
        (["sampling.top_p=0"], "sampling.top_p: must be above 0"),
        (["sampling.min_p=1.1"], "sampling.min_p: must be within 0 and 1"),
        (["sampling.repetition_penalty=0"], "sampling.repetition_penalty: must be above 0"),
        (["sampling.temperature=-1"], "sampling.temperature"),
    ],
)
def test_a_wrong_config_is_refused(keys: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        recipe.load(
            catalog.find_recipe("generate"), catalog.find_config("generation"), ["model.path=x", *keys]
        )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["model.path=nowhere"], "nowhere"),
        (["output={source}"], "does not say that it has answers"),
        (["answer_column=question"], "has a column 'question'"),
        (["prompts.text_column=txt"], "prompts.text_column"),
        (["precision.kind=float8_rowwise"], "float8_rowwise"),
        (["prompts.chat_template=no.jinja"], "prompts.chat_template: 'no.jinja' is neither"),
        (["prompts.system_prompt=x", "prompts.chat_template=none"], "prompts.system_prompt"),
    ],
)
def test_wrong_input_gets_one_line_and_code_2(
    generate: Generate, tmp_path: Path, keys: list[str], message: str
) -> None:
    source = write_rows(tmp_path, 3)
    before = source.read_bytes()
    job = (f"prompts.source={source}", "output=a.jsonl")
    done = generate(*job, *(key.format(source=source) for key in keys), code=2)
    error = done.stderr.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
    assert source.read_bytes() == before
    if "prompts." in message:  # before weights are read, after which the plan is printed
        assert "linear layers" not in done.stderr


def test_answers_of_other_settings_or_rows_are_not_continued(generate: Generate, tmp_path: Path) -> None:
    source = write_rows(tmp_path, 3)
    keys = (f"prompts.source={source}", "output=a.jsonl")
    generate(*keys)
    answers = (tmp_path / "a.jsonl").read_bytes()
    assert "other settings (seed)" in generate(*keys, "seed=1", code=2).stderr
    source.write_text(source.read_text(encoding="utf-8").replace("Tuesday", "Friday"), encoding="utf-8")
    assert "an answer is not that of" in generate(*keys, code=2).stderr
    write_rows(tmp_path, 2)
    said = generate(*keys, "batch_size=1", code=2).stderr
    assert "has more answers than prompts.source has rows" in said
    assert (tmp_path / "a.jsonl").read_bytes() == answers


def test_typed_prompts_on_several_ranks_get_one_line(generate: Generate) -> None:
    said = refusal(generate(ranks=2, code=2))
    assert "generate: typed prompts need one rank, found 2; set prompts.source" in said
