"""What a config may read from the environment. The environment also holds tokens and passwords.

Two forms are allowed: `${key}`, another key; and `${oc.env:NAME}`, with or without a default. The name of
a resolver must be written out: `${oc.${key}:NAME}` would read the environment without a trace in the text.

A list names the keys whose value a variable may decide, directly or through another key, so that a new key is
not among them: places, numbers and choices. Any other text ends up in what is trained, exported or logged:
the pattern of a layer is a note in the precision plan and in the model card. The value of a variable is never
written to a file or, as it is, into an error: there, `${…}` stays as the config has it (load.py).
"""

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from lptune.base.errors import UserError

_KEY, _READ = "\0", "\1"  # stand for allowed parts; no \w, so that no name can be built of parts
_ALLOWED = (
    (re.compile(r"\$\{\s*[\w.\[\]\-]+\s*\}"), _KEY),
    (re.compile(r"\$\{\s*oc\.env\s*:\s*\w+\s*(?:,[^${}]*)?\}"), _READ),
)
_ESCAPED = re.compile(r"(?<!\\)(?:\\\\)*\\\$\{")
_LEAST = 4  # characters: a shorter value is no secret, and its letters are in every message
_VARIABLE = re.compile(r"oc\.env\s*:\s*(\w+)")

_PLACES = {
    "model.path",
    "teacher.path",
    "logits.folder",
    "data.source",
    "data.eval_source",
    "data.cache",
    "checkpoint.copy_to",
    "resume",
    "output_dir",
}
_CHOICES = {
    "data.format", "data.on_bad_row", "precision.kind", "precision.output", "precision.grad_input",
    "precision.grad_weight", "precision.grad_format", "precision.all_gather", "precision.tp_all_gather",
    "optimizer.kind", "optimizer.master", "schedule.kind", "export.dtype", "device", "compute_dtype",
    "compile", "activation_checkpointing", "teacher.precision", "logits.dtype",
}  # fmt: skip
_OF_A_SOURCE = {
    f"data.{key}.{leaf}" for key in ("source", "eval_source") for leaf in ("source", "weight", "format")
}
TEXTS = frozenset(_PLACES | _CHOICES | _OF_A_SOURCE)
"""Keys that a variable may decide, besides numbers and switches. A choice is one of a few words; any other
value is refused."""


def check_interpolations(raw: Mapping[str, Any], sections: Collection[str]) -> None:
    """Raises UserError, which begins with the key, for a `${…}` that is not one of the two forms.

    raw: the config, unresolved. sections: names of its sections.
    """
    reads = reads_environment(raw)
    for key, value in _texts(raw, ""):
        text = _reduced(value)
        if reads and key in sections and text != value:
            raise UserError(f"{key}: is ${{…}} in a config that reads the environment; write its keys out")
        if "${" in text:
            raise UserError(
                f"{key}: {value!r:.100}: a ${{…}} may be another key or oc.env:NAME, with these names "
                "written out"
            )


def marked(raw: Any) -> Any:
    """`raw`, after `check_interpolations`, with a mark in place of each text that reads the environment. When
    the result is resolved, the mark spreads to every key that uses such a text.
    """
    if isinstance(raw, Mapping):
        return {name: marked(item) for name, item in raw.items()}
    if isinstance(raw, (list, tuple)):
        return [marked(item) for item in raw]
    if not isinstance(raw, str) or _READ not in _reduced(raw):
        return raw
    # The keys in the text stay, so that an unknown one is an error here already.
    return _READ + "".join(_ALLOWED[0][0].findall(_ESCAPED.sub("", raw)))


def check_reads(marks: Any, may_read: Callable[[str], bool]) -> None:
    """Raises UserError, which begins with the key, where a key may not read the environment.

    marks: the result of `marked`, resolved. may_read: called with a dotted key; an item of a list has that of
    the list.
    """
    for name, text in _texts(marks, ""):
        if _READ in text and not may_read(name):
            raise UserError(
                f"{name}: reads the environment, itself or through another key, which only places, numbers "
                "and choices may; write the value out"
            )


def reads_environment(raw: Any) -> bool:
    """Whether any value of the config reads a variable."""
    return "oc.env" in str(raw)


def masked(message: str, raw: Any) -> str:
    """`message` with `${oc.env:NAME}` in place of the value of each variable that `raw` names."""
    for name in _VARIABLE.findall(str(raw)):
        value, mask = os.environ.get(name, ""), f"${{oc.env:{name}}}"
        if len(value) < _LEAST:
            continue
        for written in {value, repr(value)[1:-1]}:
            message = message.replace(written, mask)
            # An error shows the beginning of a long value, and an ellipsis.
            shown = next((n for n in range(len(written), 2, -1) if f"{written[:n]}…" in message), 0)
            message = message.replace(f"{written[:shown]}…", f"{mask}…") if shown else message
    return message


def _reduced(text: str) -> str:
    """`text` without escapes, and with one character in place of each allowed `${…}`."""
    text = _ESCAPED.sub("", text)
    for pattern, found in _ALLOWED if "${" in text else ():
        text = pattern.sub(found, text)
    return text


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _texts(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item, key)
