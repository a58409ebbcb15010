"""Tokenized once: a later run maps the same documents, and what is damaged or half written is made anew."""

import copy
import errno
import fcntl
import json
import os
import resource
import shutil
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lptune.base.errors import UserError
from lptune.config import DataConfig
from lptune.data import Prepared, Tokenizer, cache, load_tokenizer, prepare
from lptune.data.cache import cache_folder, cached
from lptune.data.documents import Documents
from lptune.data.sources import Row
from tests.helpers.chat_templates import CHATML
from tests.helpers.documents import Make

ROWS = [{"question": f"What is {i} + {i}?", "answer": f"It is {2 * i}."} for i in range(60)]


@pytest.fixture(autouse=True)
def every_source_is_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MIN_BYTES", 0)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def run(tmp_path: Path, rows: Path, chat: Tokenizer) -> Callable[..., Prepared]:
    def run(tokenizer: Tokenizer = chat, seed: int = 0, **keys: Any) -> Prepared:
        values = {"source": str(rows), "seq_len": 128, "cache": str(tmp_path / "cache"), **keys}
        cfg = DataConfig(**values)
        made = tokenizer.with_chat_template(cfg.chat_template) if cfg.chat_template else tokenizer
        return prepare(cfg, made, seed=seed, vocab_size=600)

    return run


def entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir())


def report(prepared: Prepared) -> list[str]:
    return [line for line in prepared.report if "cached in" not in line and "was damaged" not in line]


def assert_equal(one: Prepared, other: Prepared) -> None:
    for a, b in ((one.train, other.train), (one.evaluation, other.evaluation)):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a.digest == b.digest
            for name in ("answers_N2", "prompt_keys_N", "num_targets_N", "offsets_N1"):
                assert np.array_equal(getattr(a.documents, name), getattr(b.documents, name)), name
            assert a.prompt_and_answer(0) == b.prompt_and_answer(0)
    assert report(one) == report(other)


def test_a_later_run_maps_what_an_earlier_one_has_tokenized(
    run: Callable, tmp_path: Path, tokenizations: list[int]
) -> None:
    fresh = run(cache="none", eval_fraction=0.2)
    assert not (tmp_path / "cache").exists()
    cold = run(eval_fraction=0.2)
    num_calls = len(tokenizations)
    warm = run(eval_fraction=0.2)
    assert len(tokenizations) == num_calls
    for other in (cold, warm):
        assert_equal(fresh, other)
    (entry,) = entries(tmp_path / "cache")
    assert any(f"documents cached in {entry} (0 MB)" in line for line in warm.report)
    assert not warm.train.documents.tokens_T.flags.writeable
    # What is applied later needs no other entry.
    assert_equal(run(packing=False, seed=5), run(packing=False, seed=5, cache="none"))
    assert len(tokenizations) == num_calls + 1
    assert entries(tmp_path / "cache") == [entry]


def test_entries_are_private(run: Callable, tmp_path: Path) -> None:
    run()
    for path in [tmp_path / "cache", *(tmp_path / "cache").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_two_ways_to_write_one_number_are_two_entries(run: Callable, rows: Path) -> None:
    made = []
    for number in ("1.1", "1.10"):
        rows.write_text(f'{{"question": "q", "answer": {number}}}\n' * 99)
        made.append(run(max_rows=90))
        assert_equal(made[-1], run(max_rows=90, cache="none"))
    assert made[0].train.digest != made[1].train.digest


def test_whatever_decides_the_documents_is_in_the_key(
    run: Callable, rows: Path, tmp_path: Path, tokenizer_folder: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    other = load_tokenizer(tokenizer_folder("other", eos_token="</s>"))
    changes: list[dict[str, Any]] = [
        {}, {"seq_len": 64}, {"train_on_prompt": True}, {"max_rows": 50}, {"max_rows": 49},
        {"on_bad_row": "skip"}, {"system_prompt": "x"}, {"chat_template": CHATML + " "},
        {"chat_template": "none"}, {"chat_template": "none", "prompt_template": "{question}: "},
        {"tokenizer": other, "chat_template": CHATML}, {"input_column": "none"},
    ]  # fmt: skip
    for number, keys in enumerate(changes, 1):
        run(**keys)
        assert len(entries(tmp_path / "cache")) == number, keys
    rows.write_text(rows.read_text().replace("What is 7 +", "What is 8 +"))
    run()
    assert len(entries(tmp_path / "cache")) == len(changes) + 1
    os.utime(rows)  # the content counts, not the date
    run()
    assert len(entries(tmp_path / "cache")) == len(changes) + 1
    monkeypatch.setattr(cache, "_code", lambda: "another version")
    run()
    assert len(entries(tmp_path / "cache")) == len(changes) + 2


def test_the_date_is_in_the_key_of_a_template_that_writes_it(
    run: Callable, tmp_path: Path, tokenizer_folder: Make
) -> None:
    dated = CHATML + "{{ '' if true else strftime_now('%d') }}"
    for number, template in ((1, CHATML), (3, dated)):
        folder = tokenizer_folder(f"t{number}", chat_template=template)
        for day in (1, 2):
            run(load_tokenizer(folder, date=date(2025, 1, day)))
        assert len(entries(tmp_path / "cache")) == number


DAMAGES: dict[str, Callable[[Path], object]] = {
    "bit": lambda entry: _flip(entry / "tokens_T.bin"),
    "cut": lambda entry: os.truncate(entry / "is_target_T.bin", 9),
    "file gone": lambda entry: (entry / "answers_N2.bin").unlink(),
    "manifest edited": lambda entry: _flip(entry / "manifest.json"),
    "manifest of another": lambda entry: (entry / "manifest.json").write_text("[]"),
    "file is a link": lambda entry: _link(entry / "tokens_T.bin"),
    "file is a pipe": lambda entry: _pipe(entry / "tokens_T.bin"),
    "entry is a link": lambda entry: _link(entry),
    "entry is a file": lambda entry: (shutil.rmtree(entry), entry.write_text("x")),
}


def _flip(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])


def _link(path: Path) -> None:
    """Moves it away and leaves a link to it, content unchanged."""
    path.rename(path.with_name(f"moved-{path.name}"))
    path.symlink_to(path.with_name(f"moved-{path.name}"))


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_made_anew_with_a_note(run: Callable, tmp_path: Path, damage: str) -> None:
    fresh = run(cache="none")  # cutting a file that is mapped would end the process
    run()
    (entry,) = entries(tmp_path / "cache")
    DAMAGES[damage](entry)
    again = run()
    assert_equal(fresh, again)
    assert any(f"note: the cache entry {entry} was damaged (" in line for line in again.report)
    assert entry.is_dir()
    assert not entry.is_symlink()
    assert not any("was damaged" in line for line in run().report)
    if damage == "entry is a link":
        assert (tmp_path / "cache" / f"moved-{entry.name}" / "tokens_T.bin").is_file()  # not what it led to


def test_what_a_kill_leaves_is_removed_but_not_what_another_process_is_at(tmp_path: Path) -> None:
    ours, killed, alive = ("o" * 32, "k" * 32, "l" * 32)
    for key in (ours, killed, alive):
        (tmp_path / f"{key}.lock").touch()
        (tmp_path / f".tmp-{key}-0").mkdir()
    with (tmp_path / f"{alive}.lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for _ in range(2):  # the entry is made, then found
            cached(str(tmp_path), ours, lambda add: {"n": add(_documents(1))})
            assert entries(tmp_path) == [tmp_path / f".tmp-{alive}-0", tmp_path / ours]


def _documents(value: int) -> Documents:
    return Documents(
        tokens_T=np.array([value, 2, 3], dtype=np.int32), is_target_T=np.array([False, True, True]),
        offsets_N1=np.array([0, 3]), answers_N2=np.array([[1, 3]], dtype=np.int32),
        prompt_keys_N=np.array([value], dtype=np.uint64),
    )  # fmt: skip


def test_of_those_who_ask_at_once_one_makes_the_entry(tmp_path: Path) -> None:
    """Threads, each with a lock of its own, as processes have."""
    barrier, made = threading.Barrier(4), list[int]()

    def make(add: Callable[[Documents], None]) -> dict[str, Any]:
        made.append(1)
        for value in range(50):
            add(_documents(value))
        return {"n": 50}

    def ask(_: int) -> list[int]:
        barrier.wait()
        tokens: list[int] = cached(str(tmp_path), "k" * 32, make).documents.tokens_T.tolist()
        return tokens

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(ask, range(4)))
    assert made == [1]
    assert found == [[token for value in range(50) for token in (value, 2, 3)]] * 4


def test_errors_are_not_cached_and_leave_nothing(run: Callable, rows: Path, tmp_path: Path) -> None:
    rows.write_text(rows.read_text() + "{broken\n")
    for _ in range(2):
        with pytest.raises(UserError, match=r"rows.jsonl line 61: not valid JSON"):
            run()
    assert not entries(tmp_path / "cache")
    assert run(on_bad_row="skip").train.num_documents == len(ROWS)


def test_a_source_that_changes_while_it_is_read_is_one_line(
    run: Callable, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Tokenizer.encode_batch

    def encode_batch(self: Tokenizer, texts: Any, **keys: Any) -> Any:
        with rows.open("a") as file:
            file.write("\n")
        return before(self, texts, **keys)

    monkeypatch.setattr(Tokenizer, "encode_batch", encode_batch)
    with pytest.raises(UserError, match=r"rows.jsonl: was changed while it was read; run again"):
        run()
    assert not entries(tmp_path / "cache")


@pytest.mark.parametrize(
    ("value", "is_cached"),
    [
        (b"\xff", True), (date(2024, 1, 2), True), (datetime(2024, 1, 2, 3), True), (time(3, 4), True),
        (Decimal("1.50"), True), (object(), False), ([{"image": object()}], False),
    ],
)  # fmt: skip
def test_values_that_are_not_json_are_in_the_key_or_their_source_is_not_cached(
    monkeypatch: pytest.MonkeyPatch, value: Any, is_cached: bool
) -> None:
    def digest(value: Any) -> str | None:
        monkeypatch.setattr(cache, "read_rows", lambda *_, **__: [Row("row 1", {"x": value})])
        content = cache.content_of("a/b", DataConfig(source="a/b"))
        return content.digest if content else None

    assert (digest(value) is not None) == is_cached
    if is_cached:
        assert digest(value) == digest(copy.deepcopy(value))
        assert digest(value) not in (digest(repr(value)), digest(str(value)))


def test_the_users_cache_directory_is_the_default(
    run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    run(cache="auto")
    assert len(entries(tmp_path / "xdg/lptune/data")) == 1
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the specification: ignored
    assert cache_folder("auto") == Path("~/.cache/lptune/data").expanduser()
    assert cache_folder("~/x") == Path("~/x").expanduser()


@pytest.mark.parametrize(
    ("call", "code", "todo"),
    [("fsync", errno.ENOSPC, "make room"), ("rename", errno.EMFILE, "raise the limit of open files")],
)
def test_a_full_disk_is_one_line_or_a_note_where_nobody_chose_the_folder(
    run: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: str, code: int, todo: str
) -> None:
    def full(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    fresh = run(cache="none")
    monkeypatch.setattr(*((os, "fsync", full) if call == "fsync" else (Path, "rename", full)))
    with pytest.raises(UserError, match=rf"data.cache: .* \({os.strerror(code)}\); {todo}"):
        run()
    assert not entries(tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    prepared = run(cache="auto")
    assert any(f"cannot be used ({os.strerror(code)}); " in line for line in prepared.report)
    assert prepared.train.digest == fresh.train.digest
    assert not entries(tmp_path / "xdg/lptune/data")


def test_a_write_that_fails_again_when_its_file_is_closed_is_the_caches(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(UserError, match=r"data.cache: .* \(File too large\); make room"):
            cached(str(tmp_path), "k" * 32, lambda add: {"n": [add(_documents(i)) for i in range(2000)]})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not entries(tmp_path)


def test_errors_of_the_source_are_not_the_caches(tmp_path: Path) -> None:
    error = OSError(errno.EIO, "Input/output error")

    def make(add: Callable[[Documents], None]) -> dict[str, Any]:
        add(_documents(1))
        raise error

    with pytest.raises(OSError) as raised:
        cached(str(tmp_path), "k" * 32, make)
    assert raised.value is error
    assert not entries(tmp_path)


def test_small_sources_and_the_builtin_one_are_not_cached(
    run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(source="builtin", max_rows=20)
    monkeypatch.setattr(cache, "MIN_BYTES", 1024 * 1024)
    run()
    assert not (tmp_path / "cache").exists()
