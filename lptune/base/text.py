"""Text: safe to print, in lines and tables of a width; sizes, durations and names of layers as text.

Messages and help texts name a page of the documentation as `docs/resume.md`. In a clone the pages are beside
the code. Who has only the wheel has no such file, and gets an address on the web.
"""

import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from lptune import __version__

GITHUB = "https://github.com/lptune/lptune"
_ROOT = Path(__file__).parents[2]
# Both: some packages leave a folder docs/ in site-packages.
_IN_A_CLONE = all((_ROOT / name).is_file() for name in ("docs/README.md", "pyproject.toml"))
_NARROWEST, WIDEST = 40, 110
"""Columns. Lines of more than 110 are hard to read, however wide the terminal is."""


def printable(text: str) -> str:
    """`text` with escapes (`\\x1b`) for characters that control, hide or reorder; line ends and tabs stay.

    Text that comes from files goes through here before it is printed: a column's name can hold a terminal
    sequence that rewrites the screen.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def first_line(error: BaseException) -> str:
    """The first line of what an exception says; its class if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


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


def with_addresses(text: str) -> str:
    """`text`; without a clone with the web address of this version's page in place of each `docs/PAGE.md`."""
    if _IN_A_CLONE or "docs/" not in text:
        return text
    return re.sub(r"(?<![\w/])docs/(?=[\w-]+\.md\b)", f"{GITHUB}/blob/v{__version__}/docs/", text)


def duration_text(duration_s: float) -> str:
    """A duration as text: `0.4 s`, `57.2 s`, `3 min 20 s`, `1 h 5 min`."""
    if duration_s < 59.95:
        return f"{duration_s:.1f} s"
    minutes, seconds = divmod(round(duration_s), 60)
    return f"{minutes} min {seconds} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def text_width() -> int:
    """Columns for text: those of the terminal, at most 110. Without a terminal: COLUMNS, else 80."""
    return min(WIDEST, max(_NARROWEST, shutil.get_terminal_size((80, 24)).columns))


def line_width() -> int | None:
    """Columns for lines that a program may read: those of the terminal; None, for whole lines, in a pipe."""
    return max(_NARROWEST, shutil.get_terminal_size((80, 24)).columns) if sys.stdout.isatty() else None


def fitted(text: str) -> str:
    """`text` in lines that end between words on this terminal. In a pipe, and rows of tables, as they are."""
    width = line_width()
    lines = text.split("\n")
    if width is None:
        return text
    longer = [len(line) > width and "  " not in line.strip() for line in lines]
    return "\n".join(
        "\n".join(wrapped(line.strip(), width, len(line) - len(line.lstrip()), 2)) if is_longer else line
        for line, is_longer in zip(lines, longer, strict=True)
    )


def terminal_columns() -> int:
    """The width for lines that are drawn in place: that of the terminal, at most 120."""
    # A terminal that does not report its width reports 0, and tqdm then draws nothing; shutil returns 80.
    return min(shutil.get_terminal_size().columns, 120)


def shell_word(text: str) -> str:
    """`text` as one word of a command, in one line: bash's $'…' where it holds a line break or the like."""
    if text.isprintable():
        return shlex.quote(text)
    names = {"\n": "\\n", "\t": "\\t", "\\": "\\\\", "'": "\\'"}
    codes = (c if c.isprintable() else f"\\U{ord(c):08x}" for c in text)
    return "$'" + "".join(names.get(c, code) for c, code in zip(text, codes, strict=True)) + "'"


def wrapped(
    text: str, width: int = 80, indent: int = 0, hang: int = 0, *, break_words: bool = False
) -> list[str]:
    """`text` in lines of at most `width` columns.

    indent: blanks before each line. hang: further ones before all but the first. break_words: cut words that
    are longer than a line (paths).
    """
    return textwrap.wrap(
        text,
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + hang),
        break_long_words=break_words,
        break_on_hyphens=False,
    )


def table(
    rows: Sequence[Sequence[str]], align: str = "<", *, indent: int = 0, rule: bool = False
) -> list[str]:
    """Lines of `rows`, in columns two blanks apart. align: a `<` or `>` for each column; the last one holds
    for the further columns. rule: a line under the first row.
    """
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    signs = align.ljust(len(widths), align[-1])
    lines = []
    for row in rows:
        cells = [f"{cell:{sign}{width}}" for cell, sign, width in zip(row, signs, widths, strict=True)]
        lines.append((" " * indent + "  ".join(cells)).rstrip())
    return [lines[0], "-" * len(lines[0]), *lines[1:]] if rule else lines


def cut(line: str, width: int | None) -> str:
    """`line` in at most `width` columns; `…` stands for what was cut. width: None for any number."""
    return line if width is None or len(line) <= width else f"{line[: width - 1].rstrip()}…"


def columns(left: str, text: str, start: int, width: int, *, break_words: bool = False) -> Iterator[str]:
    """Lines that begin with `left`, with `text` from column `start` on. A longer `left` has its own line."""
    lines = wrapped(text, width, start, break_words=break_words)
    if len(left) + 2 > start or not lines:
        yield left
        yield from lines
    else:
        yield left.ljust(start) + lines[0].lstrip()
        yield from lines[1:]


def without_number(name: str) -> str:
    """The name of a layer for all blocks: `layers.7.mlp.up_proj` -> `layers.#.mlp.up_proj`."""
    return re.sub(r"\.[0-9]+\.", ".#.", name, count=1)


def number_of(name: str) -> int | None:
    """The number of a layer's block, 7 of `model.layers.7.mlp.up_proj`; None if it has none."""
    found = re.search(r"\.([0-9]{1,9})\.", name)
    return int(found[1]) if found else None


def group_name(names: Sequence[str]) -> str:
    """The name of one layer, or of several that differ in their first number: `layers.0-27.mlp.up_proj`."""
    numbers = sorted({number for name in names if (number := number_of(name)) is not None})
    if len(names) == 1 or len(numbers) != len(names):
        return names[0]
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    ranges = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return without_number(names[0]).replace(".#.", f".{ranges}.", 1)


def names_of_group(name: str) -> list[str]:
    """The names of the layers that `group_name` has made one name of."""
    found = re.search(r"\.([0-9]+(?:[-,][0-9]+)*)\.", name)
    if found is None:
        return [name]
    ends = [(run.split("-")[0], run.split("-")[-1]) for run in found[1].split(",")]
    numbers = [number for first, last in ends for number in range(int(first), int(last) + 1)]
    return [f"{name[: found.start()]}.{number}.{name[found.end() :]}" for number in numbers]
