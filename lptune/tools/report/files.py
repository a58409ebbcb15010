"""Reading the files of a run, which may be anybody's.

A report must come out of whatever is there: a run that is being written, one that was killed, a folder that
somebody sent. So a file that cannot be used is no error here but a line of text that says why, which ends up
among the notes of the page. No link in a run's folder is followed, or a stranger's folder could show a
private file on a page that is meant to be passed on. A pipe is not waited for, and nothing is read beyond a
limit.
"""

from pathlib import Path
from typing import Any, NamedTuple

from lptune.base import files
from lptune.base.errors import UserError
from lptune.base.files import MAX_BYTES, LongLineError, kind_of, lines_of, object_of, read_bytes


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
        content = read_bytes(path, max_bytes, follow=False)
    except UserError as error:
        return Found(note=_note(path, error))
    return Found(content.decode("utf-8", errors="backslashreplace"))


def read_object(path: Path) -> Found:
    """The JSON object in `path`, as a dict."""
    if not kind_of(path):
        return Found()
    try:
        return Found(files.read_object(path, follow=False))
    except UserError as error:
        return Found(note=_note(path, error))


def read_objects(path: Path) -> Found:
    """The JSON objects in `path`, one a line, as a list; lines that hold none are counted in the note."""
    if not kind_of(path):
        return Found()
    found, num_bad, num_bytes = list[dict[str, Any]](), 0, 0
    try:
        for line in lines_of(path, MAX_BYTES):
            num_bytes += len(line)
            if num_bytes > MAX_BYTES:
                return Found(note=f"is larger than {MAX_BYTES:,} bytes")
            if (value := object_of(line)) is not None:
                found.append(value)
            elif line.endswith(b"\n"):  # else it is being written, or was when the run was killed
                num_bad += bool(line.strip())
    except LongLineError:
        return Found(note=f"is larger than {MAX_BYTES:,} bytes")
    except UserError as error:
        return Found(note=_note(path, error))
    except OSError as error:
        return Found(note=error.strerror or str(error))
    return Found(found, f"lines that were left out, being no JSON objects: {num_bad:,}" if num_bad else "")


def _note(path: Path, error: UserError) -> str:
    return str(error).removeprefix(f"{path}: ").partition(";")[0]
