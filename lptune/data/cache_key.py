"""The key of a cache entry: equal keys mean equal documents, in any process.

The key is a digest of the content of the files, without their dates; of every setting but those that are
applied later; of the tokenizer and the template as they are used; of the versions of the libraries that do
the work; and of the source of this package, so that an entry of another version of lptune is never used.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from datetime import date, time
from decimal import Decimal
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from lptune.config import DataConfig, data_files
from lptune.data.cache import FORMAT
from lptune.data.errors import BadRows
from lptune.data.sources import read_rows
from lptune.data.text_files import JsonFloat
from lptune.data.tokenizer import Tokenizer

MIN_BYTES = 1024 * 1024
"""Preparing a source smaller than this is faster than looking it up."""
_APPLIED_LATER = (
    "packing", "eval_fraction", "eval_source", "eval_split", "cache",
    "chat_template",  # part of the tokenizer
)  # fmt: skip


class Content(NamedTuple):
    """The content of a source, for the key."""

    digest: str
    stat: tuple[tuple[int, int, int], ...]
    """Of each file, to notice a change while it is read; empty if the source has no files."""


def content_of(source: str, cfg: DataConfig) -> Content | None:
    """The content of a source: the bytes and names of files; for other sources and with `max_rows`, the rows.

    cfg: the config of this source alone.

    None if the source must not be cached: `builtin`, a source below MIN_BYTES, a file that cannot be opened,
    rows with values such as images, which neither JSON nor `_encoded` can write.
    """
    if source == "builtin":
        return None
    files = data_files(source)
    stat = files_stat(files)
    if files is not None and sum(size for _, size, _ in stat) < MIN_BYTES:
        return None
    sha = hashlib.sha256()
    if files is not None and cfg.max_rows is None:
        try:
            for path in files:
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                    sha.update(f"{digest} {path}\0".encode(errors="surrogateescape"))
        except OSError:
            return None
        return Content(sha.hexdigest(), stat)
    num_bytes = 0
    for row in read_rows(source, BadRows(cfg.on_bad_row), split=cfg.split, max_rows=cfg.max_rows):
        try:
            texts = [each.text for each in row.values.values() if isinstance(each, JsonFloat)]
            data = json.dumps([*row, texts], default=_encoded).encode() + b"\0"
        except (TypeError, ValueError, RecursionError):
            return None
        sha.update(data)
        num_bytes += len(data)
    return Content(sha.hexdigest(), stat) if num_bytes >= MIN_BYTES else None


def _encoded(value: Any) -> dict[str, str]:
    """JSON for values of Parquet and of hub datasets that JSON lacks; equal in any process. TypeError for
    other types, whose repr may hold an address.
    """
    if isinstance(value, bytes):
        text = value.hex()
    elif isinstance(value, date | time):  # a datetime is a date, too
        text = value.isoformat()
    elif isinstance(value, Decimal):
        text = str(value)
    else:
        raise TypeError(type(value).__name__)
    return {f"\0{type(value).__name__}": text}


def files_stat(files: Sequence[Path] | None) -> tuple[tuple[int, int, int], ...]:
    """Inode, size and time of change of each file of a source; empty if it has no files."""
    stats = [path.stat() for path in files or []]
    return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)


def cache_key(
    content: Content, cfg: DataConfig, tokenizer: Tokenizer, *, is_training: bool, reading: str
) -> str:
    """The key, 32 hexadecimal digits. cfg: the config of this source alone.

    reading: how its rows are read, as in `prepare.py`.
    """
    settings = {key: value for key, value in dataclasses.asdict(cfg).items() if key not in _APPLIED_LATER}
    parts = {
        "format": FORMAT,
        "code": _code(),
        "versions": [tokenizers.__version__, version("jinja2"), version("transformers")],
        "content": content.digest,
        "settings": settings,  # with the name of the source, which report and errors show
        "reading": reading,
        "is_training": is_training,  # an evaluation source may lack a few things
        "tokenizer": _tokenizer(tokenizer),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    template = tokenizer.template
    sources = template.sources if template else {}
    return {
        "backend": hashlib.sha256(tokenizer.backend.to_str().encode()).hexdigest(),
        "special_tokens": tokenizer.special_tokens,
        "ids": [tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id],
        "around": [tokenizer.prefix_ids, tokenizer.suffix_ids, tokenizer.continuation],
        "template": sources,
        # The date counts only if the template can write it.
        "date": str(template.date) if template and "strftime_now" in "".join(sources.values()) else None,
    }


@cache
def _code() -> str:
    """A digest of this package's source."""
    sha = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        sha.update(path.name.encode() + b"\0" + path.read_bytes())
    return sha.hexdigest()
