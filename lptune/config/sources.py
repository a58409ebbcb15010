"""`data.source` as a list: one entry per data source, with its weight and its own keys."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lptune.base.errors import UserError
from lptune.config.checks import check_path, one_of, positive

FORMATS = ("auto", "pairs", "chat", "text")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,40}")
MAX_WEIGHT = 1000
"""Each copy of a document takes 48 bytes on every rank: a typing error must not take all memory."""


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One data source. A key other than `source`, `name` and `weight` overrides the key of the same name in
    `data` for this source; None: as in `data`.
    """

    source: str
    """A file, a folder, a glob, a hub dataset id, or `builtin`."""
    weight: float = 1.0
    """How often an epoch uses each document of this source. 2: each document twice. 0.5: a random half of the
    documents, the same half in all epochs, chosen by the seed. 2.5: each twice, and a half once more."""
    name: str | None = None
    """What metrics call this source: letters, digits and ._-. None: the file, the folder or the hub id."""
    split: str | None = None
    format: str | None = None
    prompt_column: str | None = None
    input_column: str | None = None
    response_column: str | None = None
    messages_column: str | None = None
    text_column: str | None = None
    chosen_column: str | None = None
    rejected_column: str | None = None
    label_column: str | None = None
    system_column: str | None = None
    prompt_template: str | None = None
    system_prompt: str | None = None


Source = str | tuple[str | SourceConfig, ...]
"""The type of `data.source`."""


def entries(source: Source | None) -> tuple[SourceConfig, ...]:
    """One entry for each item of a list, one for a string, none for None."""
    listed = () if source is None else (source,) if isinstance(source, str) else source
    return tuple(SourceConfig(source=item) if isinstance(item, str) else item for item in listed)


def check_source(key: str, source: Source) -> None:
    """Raises UserError unless `source` is legal for `key`, which is data.source or data.eval_source."""
    if not source and not isinstance(source, str):
        raise UserError(f"{key}: is an empty list; put a source into it")
    for number, entry in enumerate(entries(source)):
        name = key if isinstance(source, str) else f"{key}[{number}]"
        check_path(name, entry.source)
        positive(f"{name}.weight", entry.weight)
        if entry.weight > MAX_WEIGHT:
            raise UserError(f"{name}.weight: must be at most {MAX_WEIGHT}, found {entry.weight}")
        if entry.weight != 1 and key == "data.eval_source":
            raise UserError(f"{name}.weight: evaluation sees each document once; leave the weight out")
        if entry.format is not None:
            one_of(f"{name}.format", entry.format, FORMATS)
        if entry.name is not None and not _NAME.fullmatch(entry.name):
            raise UserError(
                f"{name}.name: must be at most 40 letters, digits, '.', '_' or '-', found {entry.name!r:.60}"
            )
    given = [entry.name for entry in entries(source) if entry.name is not None]
    for name in given:
        if given.count(name) > 1:
            raise UserError(f"{key}: two entries have the name {name!r}; metrics need one for each")


def source_names(sources: Sequence[SourceConfig]) -> str:
    """The sources without their folders, for a model card: `a.jsonl (weight 2), shards/*.jsonl`."""
    return ", ".join(_name(entry) for entry in sources)


def _name(entry: SourceConfig) -> str:
    path = Path(entry.source)
    is_glob = any(mark in path.name for mark in "*?[")  # keeps its last folder: `*.jsonl` says little
    name = "/".join(path.parts[-2:]) if is_glob else path.name or entry.source
    return name if entry.weight == 1 else f"{name} (weight {entry.weight:g})"
