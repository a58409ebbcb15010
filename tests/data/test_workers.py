"""Chunks of rows, prepared by this process or by several: the same rows, order, notes and errors."""

import json
import os
import signal
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from lptune.base.errors import UserError
from lptune.config import DataConfig
from lptune.data import Prepared, Tokenizer, prepare, workers
from lptune.data.detect import detect_format
from lptune.data.errors import BadRows
from lptune.data.formats import Format
from lptune.data.sources import JsonFloat, Row
from lptune.data.workers import Made, Skipped, Work, chunks, made, num_workers, read_chunk, write_chunk
from tests.helpers import cold
from tests.helpers.documents import Write

Run = Callable[..., Prepared]
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1.10}}}],
}


def pairs(count: int) -> list[Any]:
    return [
        {"question": f"What is {i} + {i}?", "answer": f"It is {2 * i}.", "id": i + 0.50} for i in range(count)
    ]


def chats(count: int) -> list[Any]:
    """Conversations of every kind that the report counts, and rows that are bad in reading or in writing."""
    rows: list[Any] = []
    for i in range(count):
        user, answer = (
            {"role": "user", "content": f"Hi {i}"},
            {"role": "assistant", "content": "Yes. " * (1 + i % 4)},
        )
        rows.append({"messages": [user, answer] * (1 + i % 3), "score": 0.50 + i, "note": "n"})
        rows += ["{broken"] * (i % 7 == 3) + [{"messages": [user]}] * (i % 5 == 2)
        rows += [{"messages": [user, CALL, {"role": "tool", "content": "42"}, answer]}] * (i % 6 == 1)
        rows += [{"messages": [{"role": "system", "content": "Be brief."}, user, answer | {"weight": 0}]}] * (
            i % 8 == 0
        )
    return rows


def children() -> list[int]:
    """The workers of this process."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"lptune.data.workers" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except (OSError, ValueError):
            continue
    return found


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(workers, "CHUNK_ROWS", 16)
    yield
    assert not children()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    def run(num: int, source: str, tokenizer: Tokenizer, **keys: Any) -> Prepared:
        monkeypatch.setenv(workers.NUM_WORKERS, str(num))
        cfg = DataConfig(**{"source": source, "seq_len": 256, "cache": "none", **keys})
        return prepare(cfg, tokenizer, seed=0, vocab_size=600)

    return run


def assert_same(one: Prepared, other: Prepared) -> None:
    assert one.report == other.report
    assert one.train.digest == other.train.digest
    assert one.train.documents.prompt_keys_N.tolist() == other.train.documents.prompt_keys_N.tolist()
    assert one.train.documents.answers_N2.tolist() == other.train.documents.answers_N2.tolist()


def test_two_processes_prepare_the_chats_of_one(jsonl: Write, run: Run, chat: Tokenizer) -> None:
    source = jsonl(*chats(60))
    alone = run(1, source, chat, on_bad_row="skip")
    notes = "\n".join(alone.report)
    for part in ("as JSON text", "columns that are not used", "skipped 21 bad rows, the first", "dropped 8"):
        assert part in notes
    assert_same(run(2, source, chat, on_bad_row="skip"), alone)


def test_the_first_error_in_the_order_of_the_rows_ends_the_run(
    jsonl: Write, run: Run, tokenizer: Tokenizer
) -> None:
    rows = pairs(200)
    rows[120], rows[150] = "{broken", {"question": "no answer"}
    for bad, place in ((None, "line 121: not valid JSON"), (90, "line 91: has no column 'answer'")):
        if bad is not None:
            rows[bad] = {"question": "no answer"}
        for num in (1, 2):
            with pytest.raises(UserError, match=place):
                run(num, jsonl(*rows), tokenizer)


def work_of(source: str, tokenizer: Tokenizer, rows: list[Row]) -> Work:
    cfg = DataConfig(source=source, cache="none")
    return Work(cfg, tokenizer, detect_format(cfg, rows, source))


@pytest.fixture
def parts(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Generator[Made, None, None]:
    """The documents of 2,000 rows, by two workers."""
    monkeypatch.setenv(workers.NUM_WORKERS, "2")
    rows = [Row(f"row {i}", values) for i, values in enumerate(pairs(2000))]
    return made(chunks(iter(rows), BadRows("error")), work_of("rows.jsonl", tokenizer, rows))


def test_a_killed_worker_ends_the_run_and_leaves_none(parts: Generator[Made, None, None]) -> None:
    assert next(parts).documents.num_documents == 16
    for child in children():
        os.kill(child, signal.SIGKILL)
    with pytest.raises(
        UserError, match=r"rows.jsonl: a process that prepares rows was ended by SIGKILL.*=1 in the env"
    ):
        list(parts)


def test_no_worker_outlives_what_takes_its_rows(parts: Generator[Made, None, None]) -> None:
    next(parts)
    assert children()
    parts.close()


def test_workers_end_with_a_killed_parent(jsonl: Write, tokenizer: Tokenizer, tokenizer_folder: Any) -> None:
    program = (
        "import sys, time; from pathlib import Path; from lptune.config import DataConfig\n"
        "from lptune.data import load_tokenizer, workers; from lptune.data.sources import read_rows\n"
        "from lptune.data.errors import BadRows; from lptune.data.detect import detect_format\n"
        "workers.CHUNK_ROWS = 16; bad = BadRows('error')\n"
        "cfg = DataConfig(source=sys.argv[1], cache='none')\n"
        "rows = list(read_rows(cfg.source, bad)); tokenizer = load_tokenizer(Path(sys.argv[2]))\n"
        "work = workers.Work(cfg, tokenizer, detect_format(cfg, rows, cfg.source))\n"
        "parts = workers.made(workers.chunks(rows, bad), work); next(parts)\n"
        "print('on', flush=True); time.sleep(600)\n"
    )
    arguments = ("-c", program, jsonl(*pairs(200)), str(tokenizer.folder))
    with cold.start(*arguments, variables={workers.NUM_WORKERS: "2"}) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline()
        tasks = Path(f"/proc/{parent.pid}/task").iterdir()
        started = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
        assert started
        parent.kill()
    until = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in started):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_chunk_ends_by_rows_by_characters_and_never_loses_what_was_skipped() -> None:
    bad = BadRows("skip")

    def rows() -> Iterator[Row]:
        for i in range(20):
            if i in (3, 4, 17):
                bad.add(f"row {i}", ValueError("broken"))  # type: ignore[arg-type]
            else:
                yield Row(f"row {i}", {"text": "x" * (workers.CHUNK_CHARACTERS if i == 10 else 1)})
        raise UserError("the end is broken")

    found = list(chunks(rows(), bad))
    names = [[item.place if isinstance(item, Row) else item for item in chunk] for chunk in found]
    assert names[0] == [
        "row 0",
        "row 1",
        "row 2",
        Skipped(2, "row 3: broken"),
        *[f"row {i}" for i in range(5, 11)],
    ]
    assert names[1][-2] == "row 19"
    assert str(names[1][-1]) == "the end is broken"
    assert bad.count == 0  # they count where their turn comes


def test_a_chunk_passes_as_json_with_the_text_of_its_numbers() -> None:
    fmt = Format(kind="pairs", prompt="q", response="a")
    values = {
        "q": "half \ud83d",
        "a": [JsonFloat("1.10"), 1e300, None, True, {"b": JsonFloat("1e400")}],
        "n": 2**80,
    }
    chunk: list[Any] = [Row("r 1", values, 3), Skipped(2, "r 2: bad"), UserError("the end")]
    row, skipped, error = read_chunk(write_chunk(chunk, fmt))
    assert isinstance(row, Row)
    assert row == chunk[0]
    assert (row.values["a"][0].text, row.values["a"][4]["b"].text) == ("1.10", "1e400")
    assert (skipped, str(error)) == (chunk[1], "the end")
    line = '{"q": 1.10, "a": "x"}'
    assert read_chunk(write_chunk([Row("r", {"q": JsonFloat("1.10"), "a": "x"}, line=line)], fmt)) == [
        Row("r", {"q": 1.1, "a": "x"})
    ]
    for key in ("\0number", "n"):  # a key of the data is never taken for a number
        row = Row("r", {"q": {key: "1"}}, line=json.dumps({"q": {key: "1"}}))
        with pytest.raises(TypeError) if key != "n" else nullcontext():
            assert read_chunk(write_chunk([row], fmt)) == [row._replace(line="")]
    # A column that nothing reads may hold anything; one that is read goes no further than this process.
    (row,) = read_chunk(write_chunk([Row("r", {"q": "?", "image": b"\x89PNG"})], fmt))
    assert isinstance(row, Row)
    assert isinstance(row.values["image"], str)
    for value in (b"bytes", {1: "int"}, {"\0number": "1"}):
        with pytest.raises(TypeError):
            write_chunk([Row("r", {"q": value})], fmt)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, 8),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}, 8),  # the others wait for its cache
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}, 2),
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "32"}, 1),
        ({"LPTUNE_DATA_WORKERS": "3"}, 3),
    ],
)
def test_workers_share_the_cores(
    environment: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "LPTUNE_DATA_WORKERS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(workers, "num_cores", lambda: 16)
    monkeypatch.setattr(workers, "cpu_quota", lambda: 8.5)
    assert num_workers() == expected
    monkeypatch.setenv("LPTUNE_DATA_WORKERS", "none")
    with pytest.raises(UserError, match="LPTUNE_DATA_WORKERS: must be a number"):
        num_workers()
