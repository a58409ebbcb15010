"""Guards for `tokenizers`, which is Rust and reads files of other people: errors, panics, memory."""

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lptune.base.errors import UserError

_MAX_GROWTH = 64


@contextlib.contextmanager
def errors_of(folder: Path) -> Iterator[None]:
    """Turns errors of `tokenizers` over a bad tokenizer.json into a UserError."""
    try:
        with held_back():
            yield
    except BaseException as error:
        # The Rust side raises bare Exception, or panics: a BaseException whose class cannot be imported.
        if type(error) is not Exception and not _is_panic(error):
            raise
        # The place in the message refers to our own rendering of the file, so it is dropped.
        reason = re.sub(r" at line \d+ column \d+$", "", str(error))
        raise UserError(
            f"{folder / 'tokenizer.json'}: not a tokenizer that `tokenizers` can use: {reason}; copy it "
            "again from the checkpoint"
        ) from None


def check_growth(spec: dict[str, Any], folder: Path) -> None:
    """Raises UserError if replacements, one after the other, can make more than 64 characters of one."""
    for key in ("normalizer", "decoder"):
        growth = 1.0
        for part in _parts(spec.get(key)):
            if part.get("type") == "Replace":
                pattern, content = part.get("pattern"), part.get("content")
                text = pattern.get("String") if isinstance(pattern, dict) else ""
                length = len(text) if isinstance(text, str) else 1  # a regex matches at least one
                growth *= max(1.0, len(content) / max(length, 1)) if isinstance(content, str) else 1.0
        if growth > _MAX_GROWTH:
            raise UserError(
                f"{folder / 'tokenizer.json'}: {key}: its replacements make {growth:,.0f} characters of one; "
                "that is not a tokenizer, copy it again from the checkpoint"
            )


def _parts(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for name in ("normalizers", "decoders"):
            for item in value.get(name) or () if isinstance(value.get(name), list) else ():
                yield from _parts(item)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Holds back what native code writes to stderr in the block. A panic drops it; otherwise it is passed on.

    sys.stderr still prints, since another thread may have to report how the process ends.
    """
    try:
        stderr, held = os.dup(2), os.memfd_create("lptune-stderr")
    except (OSError, AttributeError):  # stderr is closed, or this is not Linux
        yield
        return
    is_panic = False
    with open(stderr, "w", buffering=1, errors="backslashreplace") as stream, open(held, "w+b") as file:
        os.dup2(held, 2)
        try:
            with contextlib.redirect_stderr(stream) if _is_descriptor_2() else contextlib.nullcontext():
                yield
        except BaseException as error:
            is_panic = _is_panic(error)
            raise
        finally:
            os.dup2(stderr, 2)
            if not is_panic and file.seek(0, os.SEEK_END):
                file.seek(0)
                with contextlib.suppress(OSError):
                    os.write(2, file.read())


def _is_panic(error: BaseException) -> bool:
    return type(error).__name__ == "PanicException"


def _is_descriptor_2() -> bool:
    try:
        return sys.stderr.fileno() == 2
    except (OSError, ValueError, AttributeError):  # sys.stderr of a notebook or a test, or none
        return False
