"""Files are written whole or not at all; what anyone may have put there is read, or refused in one line."""

import json
import os
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from lptune.base.errors import UserError
from lptune.base.files import (
    HeldFolder,
    LongLineError,
    lines_of,
    object_of,
    open_regular,
    read_object,
    replacing,
    write_errors,
    write_text,
)


def nested(levels: int) -> str:
    """A JSON object of so many levels."""
    return '{"a":' * (levels - 1) + "{}" + "}" * (levels - 1)


NOT_FILES: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to a folder": lambda path: path.symlink_to("."),
    "a link to itself": lambda path: path.symlink_to(path.name),
}


# ---- reading


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "line 1"),
        (b'{\n"a": 1,\n}', "line 3"),
        (b"[1]", "expected a JSON object, found list"),
        (b'{"a": "\xe9"}', "UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "UTF-8"),
        (nested(101).encode(), "nested too deep"),
        (nested(900).encode(), "nested too deep"),
        (b'{"a":' + b"[" * 100_000, "nested too deep"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too long"),
        (b" " * 1001, "larger than 1,000 bytes"),
        (None, "no such file"),
    ],
)
def test_what_is_no_json_object_is_one_line(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)
    max_bytes = 1000 if said.startswith("larger") else 1_000_000
    with pytest.raises(UserError) as refused:
        read_object(path, max_bytes=max_bytes, todo="move it away")
    line = str(refused.value)
    assert line.startswith(f"{path}: ")
    assert said in line
    if content is not None:
        assert object_of(content) is None or said.startswith("larger")


@pytest.mark.parametrize("kind", NOT_FILES)
def test_what_is_no_file_is_neither_read_nor_replaced_nor_waited_for(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.json"
    NOT_FILES[kind](path)
    before = path.lstat()
    with pytest.raises(UserError, match=r"x\.json: "):
        read_object(path)
    with pytest.raises(UserError, match=r"x\.json: "):
        list(lines_of(path))
    with pytest.raises(UserError, match=r"here: cannot be written: .*; go"), write_errors("here:", "go"):
        write_text(path, "new")
    assert os.path.samestat(path.lstat(), before)
    assert os.listdir(tmp_path) == ["x.json"]


def test_json_of_any_real_depth_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(nested(100), encoding="utf-8")
    assert read_object(path) == object_of(path.read_bytes()) == json.loads(nested(100))
    assert read_object(tmp_path / "none.json", missing={"b": 2}) == {"b": 2}


def test_a_link_is_followed_only_where_the_reader_says_so(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("{}\n", encoding="utf-8")
    path = tmp_path / "x.json"
    path.symlink_to("real")
    assert read_object(path) == {}
    with pytest.raises(UserError, match="is a link"):
        read_object(path, follow=False)
    with pytest.raises(UserError, match="is a link"):
        list(lines_of(path))


def test_json_lines_are_read_one_by_one_up_to_a_line_that_is_too_long(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    assert list(lines_of(path)) == []
    path.write_bytes(b'{"a": 1}\r\n[2]\n{"b": \xff}\n{"c": 3}')
    assert [object_of(line) for line in lines_of(path)] == [{"a": 1}, None, None, {"c": 3}]
    path.write_bytes(b'{"a": 1}\n' + 100 * b"x")
    lines = lines_of(path, 20)
    assert next(lines) == b'{"a": 1}\n'
    with pytest.raises(LongLineError):
        next(lines)


# ---- writing


def test_the_content_is_on_the_disk_before_the_name_and_the_name_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, flushed, fsync = tmp_path / "x", [], os.fsync
    write_text(path, "old")

    def watched(descriptor: int) -> None:
        flushed.append((os.readlink(f"/proc/self/fd/{descriptor}"), path.read_text(encoding="utf-8")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    write_text(path, "new")
    assert [(Path(name).parent == tmp_path, text) for name, text in flushed] == [
        (True, "old"),
        (False, "new"),
    ]
    assert flushed[1][0] == str(tmp_path)


@pytest.mark.parametrize("shared", [False, True])
def test_a_full_disk_or_an_error_leaves_the_old_file_alone(tmp_path: Path, shared: bool) -> None:
    path = tmp_path / "x"
    write_text(path, "old", shared=shared)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="File too large") as failed:
            write_text(path, 2000 * "x", shared=shared)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert Path(failed.value.filename).parent == tmp_path
    with suppress(KeyboardInterrupt), replacing(path, shared=shared) as partial:
        partial.write_text("half", encoding="utf-8")
        raise KeyboardInterrupt
    assert path.read_text(encoding="utf-8") == "old"
    assert os.listdir(tmp_path) == ["x"]


def test_several_writers_at_once_leave_the_whole_content_of_one(tmp_path: Path) -> None:
    path, texts = tmp_path / "x", [letter * 100_000 for letter in 20 * "abc"]
    with ThreadPoolExecutor(3) as pool:
        written = [pool.submit(write_text, path, text, shared=True) for text in texts]
        while not all(each.done() for each in written):
            with suppress(FileNotFoundError):
                assert path.read_text(encoding="utf-8") in texts
    assert [each.exception() for each in written] == 60 * [None]
    assert os.listdir(tmp_path) == ["x"]


def test_a_link_is_replaced_and_its_target_stays(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("kept", encoding="utf-8")
    path = tmp_path / "x"
    for target in ("target", "nothing"):
        path.unlink(missing_ok=True)
        path.symlink_to(target)
        write_text(path, "new")
        assert not path.is_symlink()
    assert (tmp_path / "target").read_text(encoding="utf-8") == "kept"
    assert sorted(os.listdir(tmp_path)) == ["target", "x"]


def test_a_link_to_a_stream_is_not_replaced(tmp_path: Path) -> None:
    """/dev/stdout is one, also where the stream is redirected into a file."""
    link, target = tmp_path / "stdout", tmp_path / "redirected"
    with target.open("w") as file:
        link.symlink_to(f"/proc/self/fd/{file.fileno()}")
        with pytest.raises(OSError, match="link to a stream"):
            write_text(link, "a")
    assert link.is_symlink()


# ---- paths


def test_only_a_regular_file_is_opened_and_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("kept")
    (tmp_path / "link").symlink_to(victim)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for flags in (os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, os.O_WRONLY | os.O_APPEND):
        for name in ("link", "folder", "pipe"):
            with pytest.raises(UserError, match=rf"{name}: is a {name}, where a regular file is needed"):
                open_regular(tmp_path / name, flags)
    assert victim.read_text() == "kept"
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none", os.O_RDONLY)
    os.close(open_regular(victim, os.O_RDONLY))


@pytest.mark.parametrize("how", ["removed", "renamed", "replaced", "its parent renamed"])
def test_a_folder_that_is_no_longer_the_one_that_was_opened_is_told(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    held = HeldFolder(folder)
    held.check()
    if how == "its parent renamed":
        folder.parent.rename(tmp_path / "c")
    else:
        folder.rename(tmp_path / "other")
        if how == "replaced":
            folder.mkdir()
        if how == "removed":
            (tmp_path / "other").rmdir()
    with pytest.raises(UserError, match="a/b was removed, renamed or unmounted while the run was writing"):
        held.check()
    held.close()
