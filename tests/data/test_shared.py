"""Machines that share the preparation of rows (`data.cache=ADDRESS`): each has what one alone would have."""

import errno
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lptune.base.errors import UnavailableError, UserError
from lptune.base.storage import Storage
from lptune.config import DataConfig, SourceConfig
from lptune.data import Prepared, Tokenizer, cache, load_tokenizer, prepare, shared, workers
from tests.data.test_workers import chats, pairs
from tests.helpers import fork_server
from tests.helpers.chat_templates import config
from tests.helpers.documents import Make, Write
from tests.helpers.faulty_storage import Faulty

CHUNK_ROWS = 8
"""A part has 32 rows."""


def told(prepared: Prepared) -> dict[str, Any]:
    """All that training sees of rows, and the report; what the cache says of itself apart."""
    marks = ("parts of", "cached in", "made here", "was damaged")
    about = [line for line in prepared.report if any(mark in line for mark in marks)]
    rows = [each for each in (prepared.train, prepared.evaluation) if each is not None]
    return {
        "digests": [each.digest for each in rows],
        "arrays": [
            [
                getattr(each.documents, name).tolist()
                for name in ("prompt_keys_N", "answers_N2", "is_desirable_N")
            ]
            for each in rows
        ],
        "report": [line for line in prepared.report if line not in about],
        "about": about,
    }


def machine(number: int, size: int, folder: Path, keys: dict[str, Any], how: dict[str, Any]) -> None:
    """One machine: a process with a cache folder of its own. Writes what it has prepared to `folder`.

    how: the machine that is `killed`, `after` so many encodings; `patience_s`; whether to read `preferences`.
    """
    tokenizer = load_tokenizer(folder / "tokenizer")  # before its answers are looked for in another cache
    place = folder / f"machine-{number}"
    os.environ |= {"GROUP_RANK": str(number), "GROUP_WORLD_SIZE": str(size), "XDG_CACHE_HOME": str(place)}
    os.environ[workers.NUM_WORKERS] = "1"
    os.dup2(os.open(folder / f"{number}.out", os.O_CREAT | os.O_WRONLY), 1)
    workers.CHUNK_ROWS, cache.MIN_BYTES = CHUNK_ROWS, 0
    shared._POLL_S, shared._TELL_S, shared.PATIENCE_S = 0.05, 1, how.get("patience_s", 60)
    is_preferences = how.get("preferences", False)
    count, before = 0, Tokenizer.encode_batch

    def encode_batch(self: Tokenizer, texts: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if number == how.get("killed") and count > how["after"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return before(self, texts, **options)

    Tokenizer.encode_batch = encode_batch  # type: ignore[method-assign]
    cfg = DataConfig(**{"seq_len": 256, **keys})
    try:
        found = told(prepare(cfg, tokenizer, seed=0, vocab_size=600, preferences=is_preferences))
    except UserError as error:
        found = {"error": str(error)}
    (folder / f"{number}.json").write_text(json.dumps(found | {"encodings": count}))


Start = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts machines `numbers` of `size` and returns what each has; None of one that was killed."""

    def start(size: int, keys: dict[str, Any], *, numbers: Any = None, **how: Any) -> list[Any]:
        numbers = range(size) if numbers is None else numbers
        processes = [fork_server.process(machine, number, size, tmp_path, keys, how) for number in numbers]
        found = []
        for number, process in zip(numbers, processes, strict=True):
            process.join(60)
            said = tmp_path / f"{number}.json"
            found.append(json.loads(said.read_text()) if process.exitcode == 0 else None)
            said.unlink(missing_ok=True)
        return found

    return start


@pytest.fixture
def rows(jsonl: Write, tokenizer_folder: Make) -> str:
    """Eight parts of rows, some of them bad in reading, others in writing."""
    tokenizer_folder()
    given = pairs(250)
    given[3] = given[4] = given[77] = "{broken"
    given[60] = given[200] = {"question": "no answer"}
    return jsonl(*given)


def forget(folder: Path) -> None:
    """All machines lose their disks."""
    for place in folder.glob("machine-*"):
        for file in sorted(place.rglob("*"), reverse=True):
            file.unlink() if file.is_file() else file.rmdir()


def alone(start: Start, keys: dict[str, Any], **how: Any) -> dict[str, Any]:
    """What one machine has that shares nothing."""
    (found,) = start(1, keys | {"cache": "none"}, **how)
    return dict(found)


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    assert "error" not in found, found
    return all(found[name] == expected[name] for name in ("digests", "arrays", "report"))


def test_two_and_three_machines_have_the_rows_the_order_and_the_report_of_one(
    start: Start, rows: str, tmp_path: Path
) -> None:
    keys = {"source": rows, "on_bad_row": "skip", "eval_fraction": 0.2}
    expected = alone(start, keys)
    assert any("bad rows, the first" in line for line in expected["report"])
    entries = set()
    for size, later in ((2, 3), (3, 1)):
        address = f"file://{tmp_path}/{size}"
        found = start(size, keys | {"cache": address})
        assert all(same(each, expected) for each in found)
        # Each has tokenized its share, and nothing twice.
        assert sum(each["encodings"] for each in found) == expected["encodings"]
        assert max(each["encodings"] for each in found) <= expected["encodings"] / size * 1.5
        entries |= {path.read_bytes() for path in tmp_path.glob("machine-*/lptune/data/*/manifest.json")}
        # Another number of machines without a disk of before takes all parts that are there.
        forget(tmp_path)
        again = start(later, keys | {"cache": address})
        assert all(same(each, expected) and each["encodings"] == 0 for each in again)
        assert all(
            re.search(r"note: 0 of \d+ parts of file:.* made here", each["about"][-1]) for each in again
        )
        forget(tmp_path)
    assert len(entries) == 1  # the digest of everything in it


def test_machines_share_chats(start: Start, jsonl: Write, tokenizer_folder: Make, tmp_path: Path) -> None:
    tokenizer_folder(**config("chatml"))
    keys = {"source": jsonl(*chats(100)), "on_bad_row": "skip"}
    expected = alone(start, keys)
    assert "as JSON text" in "".join(expected["report"])
    found = start(2, keys | {"cache": f"file://{tmp_path}/rows"})
    assert all(same(each, expected) for each in found)
    assert sum(each["encodings"] for each in found) == expected["encodings"]


def test_files_mixtures_evaluation_data_and_preferences_are_shared(
    start: Start, jsonl: Write, rows: str, tmp_path: Path
) -> None:
    for name, part in (("a", pairs(70)), ("b", pairs(170)[70:])):
        jsonl(*part, name=f"shards/{name}.jsonl")
    test = jsonl(*pairs(40), name="test.jsonl")
    mixture = ({"source": rows, "weight": 0.5}, {"source": f"{tmp_path}/shards", "weight": 2})
    text = tmp_path / "text.txt"
    text.write_text("What is the capital of France? " * 2000)
    chosen = jsonl(
        *({"prompt": f"Say {i}", "chosen": f"{i}", "rejected": f"{i}" * 2} for i in range(100)),
        name="p.jsonl",
    )
    for keys, how in (
        ({"source": tuple(SourceConfig(**each) for each in mixture), "eval_source": test}, {}),
        ({"source": str(text), "packing": False}, {}),
        ({"source": chosen, "eval_fraction": 0.1}, {"preferences": True}),
        ({"source": rows, "max_rows": 90}, {}),
    ):
        keys |= {"on_bad_row": "skip"}
        expected = alone(start, keys, **how)
        found = start(2, keys | {"cache": f"file://{tmp_path}/rows"}, **how)
        assert all(same(each, expected) for each in found), keys
        assert sum(each["encodings"] for each in found) == expected["encodings"]


def test_after_a_kill_a_start_makes_only_what_is_missing(start: Start, rows: str, tmp_path: Path) -> None:
    keys = {"source": rows, "on_bad_row": "skip"}
    expected = alone(start, keys)
    keys |= {"cache": f"file://{tmp_path}/rows"}
    # The launchers end the others, here by hand.
    assert start(2, keys, numbers=[1], killed=1, after=expected["encodings"] // 4) == [None]
    there = {path.name for path in tmp_path.glob("rows/*/*")}
    assert there
    assert all(re.fullmatch("[0-9]{6}", name) for name in there)
    found = start(2, keys)
    assert all(same(each, expected) for each in found)
    num_made = sum(each["encodings"] for each in found)
    assert 0.5 * expected["encodings"] < num_made < expected["encodings"]


def test_a_machine_that_does_not_deliver_is_waited_for_and_replaced(
    start: Start, rows: str, tmp_path: Path
) -> None:
    keys = {"source": rows, "on_bad_row": "skip"}
    expected = alone(start, keys)
    keys |= {"cache": f"file://{tmp_path}/rows"}
    begun = time.monotonic()
    survivor, _ = start(2, keys, killed=1, after=0, patience_s=2)
    assert time.monotonic() - begun > 2
    assert same(survivor, expected)
    assert survivor["encodings"] == expected["encodings"]
    assert re.search(r"machine 1 did not write file:.*/00000\d: made here, too", "".join(survivor["about"]))
    assert "waiting for machine 1 of 2: file://" in (tmp_path / "0.out").read_text()


def test_the_first_bad_row_ends_all_machines(start: Start, jsonl: Write, rows: str, tmp_path: Path) -> None:
    given = pairs(200)
    for bad in (50, 75, 150):  # of the second, the third and the fifth part
        given[bad] = {"question": "no answer"}
    given[190] = "{broken"
    source = jsonl(*given, name="bad.jsonl")
    keys = {"source": source, "cache": f"file://{tmp_path}/rows"}
    for size in (1, 2, 3):
        for each in start(size, keys, patience_s=0.5):
            assert f"{source} line 51: has no column 'answer'" in each["error"]
    assert all(each["digests"] for each in start(2, keys | {"on_bad_row": "skip"}))


def damaged(content: bytes) -> list[bytes]:
    """What may come of a part: one bit, half of it, nothing, another one, a seal without chunks."""
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    return [flipped, content[:middle], b"", b"0" * 64 + b"\n" + content[65:]]


def test_a_damaged_part_is_named_and_made_anew(start: Start, rows: str, tmp_path: Path) -> None:
    keys = {"source": rows, "on_bad_row": "skip"}
    expected = alone(start, keys)
    keys |= {"cache": f"file://{tmp_path}/rows"}
    start(2, keys)
    part, other = sorted(tmp_path.glob("rows/*/00000[12]"))
    whole = part.read_bytes()
    for content in [*damaged(whole), other.read_bytes()]:
        part.write_bytes(content)
        forget(tmp_path)
        (found,) = start(1, keys)
        assert same(found, expected)
        assert 0 < found["encodings"] < expected["encodings"] / 2
        assert any(f"note: file://{part} was damaged and is made anew" in line for line in found["about"])
        assert part.read_bytes() == whole
    number = part.with_name("parts")
    for content in (b"", b"5", *damaged(number.read_bytes())):
        number.write_bytes(content)
        forget(tmp_path)
        (found,) = start(1, keys)
        assert same(found, expected)
        assert found["encodings"] == 0


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rows: str) -> Callable[[str], Prepared]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv(workers.NUM_WORKERS, "1")
    monkeypatch.setattr(cache, "MIN_BYTES", 0)
    monkeypatch.setattr(workers, "CHUNK_ROWS", CHUNK_ROWS)
    tokenizer = load_tokenizer(tmp_path / "tokenizer")

    def run(address: str) -> Prepared:
        cfg = DataConfig(source=rows, seq_len=256, on_bad_row="skip", cache=address)
        return prepare(cfg, tokenizer, seed=0, vocab_size=600)

    return run


@pytest.mark.parametrize(("call", "reason"), [("list", errno.EACCES), ("put", errno.ENOSPC)])
def test_storage_that_refuses_is_one_line(
    run: Callable[[str], Prepared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, reason: int
) -> None:
    def refuses(called: str, path: str) -> None:
        if called == call:
            raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(Faulty, "fault", staticmethod(refuses))
    what = (
        rf"^data.cache: faulty://{tmp_path}/rows/.*: {os.strerror(reason)}; mend it, or set data.cache=auto$"
    )
    with pytest.raises(UserError, match=what):
        run(f"faulty://{tmp_path}/rows")
    assert not [*(tmp_path / "xdg/lptune/data").glob("[0-9a-f]*/")]
    monkeypatch.setattr(Faulty, "fault", staticmethod(lambda *_: None))
    run(f"faulty://{tmp_path}/rows")


def test_storage_that_does_not_answer_is_no_wrong_input(
    run: Callable[[str], Prepared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_away(called: str, path: str) -> None:
        raise TimeoutError("timed out")

    monkeypatch.setattr(Faulty, "fault", staticmethod(is_away))
    with pytest.raises(UnavailableError, match=r"^data.cache: .*; wait for it and run again"):
        run(f"faulty://{tmp_path}/rows")


@pytest.mark.parametrize(
    ("environment", "machine"),
    [({}, (0, 1)), ({"RANK": "5", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2"}, (2, 3))],
)
def test_a_rank_without_torchruns_agent_counts_machines_by_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, environment: dict[str, str], machine: tuple[int, int]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert shared.machine_here() == machine


def test_an_address_that_nothing_opens_and_a_package_that_is_missing_are_one_line(
    run: Callable[[str], Prepared], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UserError, match=r"^data.cache: gs://bucket/rows/.*: needs gcsfs; run: .* install"):
        run("gs://bucket/rows")
    with pytest.raises(UserError, match=r"^data.cache: nowhere://bucket/.*: Protocol not known"):
        run("nowhere://bucket/rows")


def test_a_source_that_changes_while_it_is_read_leaves_no_part(
    run: Callable[[str], Prepared], rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Tokenizer.encode_batch

    def encode_batch(self: Tokenizer, texts: Any, **keys: Any) -> Any:
        with Path(rows).open("a") as file:
            file.write("\n")
        return before(self, texts, **keys)

    monkeypatch.setattr(Tokenizer, "encode_batch", encode_batch)
    with pytest.raises(UserError, match=r"rows.jsonl: was changed while it was read; run again"):
        run(f"file://{tmp_path}/rows")
    assert not [*tmp_path.glob("rows/*/*")]


@pytest.mark.filterwarnings("default")  # of these packages, which are not ours to mend
def test_an_s3_server_holds_the_parts(
    start: Start, rows: str, tmp_path: Path, s3_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"source": rows, "on_bad_row": "skip"}
    expected = alone(start, keys)
    keys |= {"cache": "s3://bucket/rows"}
    found = start(2, keys)
    assert all(same(each, expected) for each in found)
    assert sum(each["encodings"] for each in found) == expected["encodings"]
    assert len(Storage("s3://bucket/rows").sizes()) == 1 + int(
        re.findall(r"of (\d+) parts", found[0]["about"][-1])[0]
    )
    forget(tmp_path)
    (each,) = start(1, keys | {"cache": "s3://none/rows"})
    assert re.search(
        r"^data.cache: s3://none/rows.*: The specified bucket does not exist; mend it", each["error"]
    )
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nobody listens there
    (each,) = start(1, keys)
    assert re.search(r"^data.cache: s3://bucket/rows/.*; wait for it and run again, or set", each["error"])
