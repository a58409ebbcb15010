"""Reading the files of a run, which may be anybody's, and writing a page in one piece.

A report must come out of whatever is there: a run that is being written, one that was killed, a folder that
somebody sent. So a file that cannot be used is no error here but a line of text that says why, which ends up
among the notes of the page. No link in a run's folder is followed, or a stranger's folder could show a
private file on a page that is meant to be passed on. A pipe is not waited for, and nothing is read beyond a
limit.
"""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from lptune.config import MEBI, TEMPORARY, UserError, kind_of, open_regular

MAX_BYTES = 64 * MEBI
"""Of a file that is read whole. The plan of a model with 2,000 linear layers takes 2 MB."""
_UNREADABLE = (OSError, ValueError, RecursionError)


class Found(NamedTuple):
    """What a file holds, or why it cannot be used."""

    content: Any = None
    """None: there is no such file, or it cannot be used."""
    note: str = ""
    """Why it cannot be used; empty if it can, and if there is none."""


def read_text(path: Path, max_bytes: int = MAX_BYTES) -> Found:
    """The text of `path`; bytes that are no UTF-8 appear as escapes."""
    if not kind_of(path):
        return Found()
    try:
        with open(open_regular(path, os.O_RDONLY), "rb") as file:
            content = file.read(max_bytes + 1)
    except UserError as error:
        return Found(note=str(error).removeprefix(f"{path}: ").partition(";")[0])
    except OSError as error:
        return Found(note=_why(error))
    if len(content) > max_bytes:
        return Found(note=f"is larger than {max_bytes:,} bytes")
    return Found(content.decode("utf-8", errors="backslashreplace"))


def read_object(path: Path) -> Found:
    """The JSON object in `path`, as a dict."""
    text, note = read_text(path)
    if text is None:
        return Found(note=note)
    try:
        content = json.loads(text)
    except _UNREADABLE as error:
        return Found(note=f"is no JSON ({_why(error)})")
    if not isinstance(content, dict):
        return Found(note="is no JSON object")
    return Found(content)


def read_objects(path: Path) -> Found:
    """The JSON objects in `path`, one a line, as a list; lines that hold none are counted in the note."""
    text, note = read_text(path)
    if text is None:
        return Found(note=note)
    found, num_bad = list[dict[str, Any]](), 0
    lines = text.split("\n")
    for line in lines[:-1]:
        value = None
        with suppress(*_UNREADABLE):
            value = json.loads(line)
        if isinstance(value, dict):
            found.append(value)
        else:
            num_bad += bool(line.strip())
    # What follows the last line end is being written, or was when the run was killed.
    with suppress(*_UNREADABLE):
        value = json.loads(lines[-1])
        if isinstance(value, dict):
            found.append(value)
    return Found(found, f"lines that were left out, being no JSON objects: {num_bad:,}" if num_bad else "")


def write_in_one_piece(path: Path, text: str | bytes) -> None:
    """Writes a file by a rename: a browser that reloads it sees the old page or the new one, whole. Raises
    UserError if that fails. A link at `path` is replaced, not followed.

    Unlike a checkpoint it is not flushed to the disk: it can be made again.
    """
    # The number keeps apart a run that writes its report, and a command that does so at the same time.
    partial = path.with_name(f"{TEMPORARY}{path.name}-{os.getpid()}")
    try:
        with suppress(FileNotFoundError):
            partial.unlink()
        content = text if isinstance(text, bytes) else text.encode()
        with open(open_regular(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(content)
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise UserError(f"{path}: cannot be written ({_why(error)}); choose another with --output") from None


def _why(error: BaseException) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, RecursionError):
        return "its brackets are nested too deep"
    return str(error).partition("\n")[0][:100]
