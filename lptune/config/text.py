"""Reading a text file that someone else wrote: an ordinary file, of a size that such files have, in UTF-8.

Each kind of file has a largest size that is far above any real one and far below what hurts. Beyond it the
file is none of that kind, and reading it first would fill the memory before anything could be said.
"""

import stat
from pathlib import Path

MEBI = 1024**2


def printable(text: str) -> str:
    """`text` with escapes (`\\x1b`) for what a terminal obeys, hides or reorders; line ends and tabs stay.

    What is printed of files goes through here: a column's name can hold a sequence that rewrites the screen.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def read_text(path: Path, max_chars: int, encoding: str = "utf-8") -> str:
    """The text of the file at `path`.

    Raises OSError and UnicodeDecodeError as `Path.read_text` does, and ValueError for what is longer than
    `max_chars` or no ordinary file: a pipe would be waited for, and /dev/zero has no end.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # opening a folder is an OSError by itself
        raise ValueError("it is no ordinary file")
    with path.open(encoding=encoding) as file:
        text = file.read(max_chars + 1)
    if len(text) > max_chars:
        raise ValueError(f"it is longer than {max_chars:,} characters, so it is something else")
    return text
