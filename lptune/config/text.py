"""Text: sizes as text, text that is safe to print, and text files that may come from anyone.

A file is read if it is regular, UTF-8 and not larger than its kind can be. Each kind of file has a largest
size, far above any real file and far below what fills the memory. A larger file is refused before it is read.
"""

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

MEBI = 1024**2


def printable(text: str) -> str:
    """`text` with escapes (`\\x1b`) for characters that control, hide or reorder; line ends and tabs stay.

    Text that comes from files goes through here before it is printed: a column's name can hold a terminal
    sequence that rewrites the screen.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


class LongLineError(ValueError):
    """A line has more bytes than any real one."""


def raw_lines(file: BinaryIO, max_bytes: int) -> Iterator[bytes]:
    """The lines of `file`, each with its line feed. Raises LongLineError for one of more than `max_bytes`,
    of which no more is read.
    """
    while line := file.readline(max_bytes + 1):
        if len(line) > max_bytes:
            raise LongLineError(f"is longer than {max_bytes:,} bytes")
        yield line


def size_text(num_bytes: float) -> str:
    """A number of bytes as text: `512 B`, `12.3 MB`, in powers of 1000."""
    return _scaled(num_bytes, ("B", "kB", "MB", "GB"))


def flop_text(num_flops: float) -> str:
    """A number of FLOPs as text: `300 FLOP`, `12.3 MFLOP`, in powers of 1000."""
    return _scaled(num_flops, ("FLOP", "kFLOP", "MFLOP", "GFLOP"))


def _scaled(number: float, units: tuple[str, ...]) -> str:
    for unit in units:
        if number < 1000 or unit == units[-1]:
            break
        number /= 1000
    return f"{number:,.{0 if unit == units[0] else 1}f} {unit}"


def read_text(path: Path, max_chars: int, encoding: str = "utf-8") -> str:
    """The text of the file at `path`.

    Raises OSError and UnicodeDecodeError as `Path.read_text` does, and ValueError for a file that is longer
    than `max_chars` or not regular: reading a pipe would wait, and /dev/zero has no end.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # opening a folder is an OSError by itself
        raise ValueError("it is not a regular file")
    with path.open(encoding=encoding) as file:
        text = file.read(max_chars + 1)
    if len(text) > max_chars:
        raise ValueError(f"it is longer than {max_chars:,} characters, so it is something else")
    return text
