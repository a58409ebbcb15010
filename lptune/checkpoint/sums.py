"""SHA256SUMS: the digests of an export's files, as `sha256sum` writes and `sha256sum --check` reads them.

Digests find a flipped bit, which a check of the index and of finite values misses. README.md is not listed,
because users may edit it. A comment has the digest of the original README.md, which shows whether it was
edited.
"""

import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lptune.base.errors import UserError
from lptune.base.files import MEBI, kind_of, read_bytes, write_text
from lptune.checkpoint.files import Scratch, num_threads, sha256, why

NAME = "SHA256SUMS"
_CARD = "README.md"
TEMPLATES = "additional_chat_templates"
"""The one folder within an export, as transformers has it: templates of a tokenizer that has several."""
_LINE = re.compile(rf"([0-9a-f]{{64}})  ((?:{TEMPLATES}/)?[^/\s][^/]*)")
_COMMENT = f"# {_CARD} as it was written: "
_MAX_BYTES = MEBI  # ten thousand files


def lines_of(folder: Path, files: Iterable[str]) -> list[str]:
    """The lines of SHA256SUMS for `files` in `folder`."""
    names = list(files)
    return [f"{digest}  {name}\n" for digest, name in zip(_digests(folder, names), names, strict=True)]


def write_sums(folder: Path, lines: Sequence[str]) -> list[str]:
    """Writes SHA256SUMS of an export: `lines`, those of all ranks, digests of files in `folder` that no rank
    listed, and the comment for README.md. Returns the names of the files that no rank listed.
    """
    named = {line.split("  ", 1)[1].rstrip("\n") for line in lines} | {_CARD, Scratch.MARK}
    others = [name for name in _files(folder) if name not in named]
    lines = sorted([*lines, *lines_of(folder, others)], key=lambda line: line.split("  ", 1)[1])
    write_text(folder / NAME, "".join([*lines, f"{_COMMENT}{sha256(folder / _CARD)}\n"]))
    return [*others, _CARD]


def verify_sums(folder: Path) -> int:
    """Compares the files of an export with SHA256SUMS; returns their number, 0 without SHA256SUMS. Raises
    UserError that names the first fault.
    """
    wanted, _ = read_sums(folder)
    try:
        found = dict(zip(wanted, _digests(folder, wanted), strict=True))
    except OSError as error:
        raise UserError(f"{why(error)}; {NAME} names it; export again") from None
    for name, digest in wanted.items():
        if found[name] != digest:
            raise UserError(f"{folder / name}: is not what was exported (see {NAME}); export again")
    return len(wanted)


def is_as_written(folder: Path) -> bool:
    """Whether `folder` is an unchanged export: no file was added, removed or changed."""
    if folder.is_symlink() or not (folder / NAME).is_file():
        return False
    if any(kind_of(path) != "a file" for path in folder.iterdir() if path.name != TEMPLATES):
        return False
    if any(kind_of(path) != "a file" for path in (folder / TEMPLATES).glob("*")):
        return False
    try:
        wanted, card = read_sums(folder)
        if {*_files(folder)} != {*wanted, _CARD, NAME}:
            return False
        return verify_sums(folder) > 0 and sha256(folder / _CARD) == card
    except (OSError, UserError):
        return False


def _files(folder: Path) -> list[str]:
    """The names of the files in `folder`, and of those in its folder of templates, relative to it."""
    at_top = [path.name for path in folder.iterdir() if path.name != TEMPLATES]
    return at_top + [f"{TEMPLATES}/{path.name}" for path in (folder / TEMPLATES).glob("*")]


def read_sums(folder: Path) -> tuple[dict[str, str], str]:
    """(digests by file name, digest of the original README.md). Both are empty without SHA256SUMS."""
    path = folder / NAME
    if not kind_of(path):
        return {}, ""
    lines = read_bytes(path, _MAX_BYTES).decode("utf-8", errors="replace").splitlines()
    entries = [_LINE.fullmatch(line) for line in lines if not line.startswith("#")]
    if not entries or None in entries:
        raise UserError(f"{path}: is not what sha256sum writes; the file was changed")
    cards = [line.removeprefix(_COMMENT) for line in lines if line.startswith(_COMMENT)]
    return {entry[2]: entry[1] for entry in entries if entry}, "".join(cards)


def _digests(folder: Path, names: Iterable[str]) -> list[str]:
    with ThreadPoolExecutor(num_threads()) as pool:  # hashing releases the GIL
        return list(pool.map(lambda name: sha256(folder / name), names))
