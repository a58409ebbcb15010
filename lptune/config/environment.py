"""What a config may read from the environment. The environment also holds tokens and passwords.

Three forms are allowed: `${key}`, another key; `${oc.env:NAME}`, with or without a default; and
`${oc.decode:${oc.env:NAME}}`. The name of a resolver must be written out, since `${oc.${key}:NAME}` would
read the environment without a trace in the text.

A list names the keys whose value a variable may decide, directly or through another key, so that a new key is
not among them: places, numbers and choices. Any other text ends up in what is trained, exported or logged:
the pattern of a layer is a note in the precision plan and in the model card. A variable decides one value,
never a list or a section, since a section would bring keys of its own. The value of a variable is never
written to a file or into an error: there, `${…}` stays as the config has it (load.py).
"""

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from lptune.base.errors import UserError

_KEY, _READ = "\0", "\1"  # stand for allowed parts; no \w, so that no name can be built of parts
_ALLOWED = (
    (re.compile(r"\$\{\s*[\w.\[\]\-]+\s*\}"), _KEY),
    (re.compile(r"\$\{\s*oc\.env\s*:\s*\w+\s*(?:,[^${}]*)?\}"), _READ),
    # oc.decode resolves the `${…}` in a value, so it may be given a variable and nothing else.
    (re.compile(rf"\$\{{\s*oc\.decode\s*:\s*{_READ}\s*\}}"), _READ),
)
_ESCAPED = re.compile(r"(?<!\\)(?:\\\\)*\\\$\{")
_LEAST = 4  # characters: a shorter value is no secret, and its letters are in every message
_VARIABLE = re.compile(r"oc\.env\s*:\s*(\w+)")
_DECODED = re.compile(r"oc\.decode\s*:\s*\$\{\s*oc\.env\s*:\s*(\w+)")  # and resolved, where it holds a ${…}

_PLACES = {
    "model.path",
    "teacher.path",
    "logits.folder",
    "data.source",
    "data.eval_source",
    "data.cache",
    "resume",
    "output_dir",
}
_CHOICES = {
    "data.format", "data.on_bad_row", "precision.kind", "precision.output", "precision.grad_input",
    "precision.grad_weight", "precision.grad_format", "precision.all_gather", "precision.tp_all_gather",
    "optimizer.kind", "schedule.kind", "export.dtype", "device", "compute_dtype", "compile",
    "activation_checkpointing", "teacher.precision", "logits.dtype",
}  # fmt: skip
_OF_A_SOURCE = {
    f"data.{key}.{leaf}" for key in ("source", "eval_source") for leaf in ("source", "weight", "format")
}
TEXTS = frozenset(_PLACES | _CHOICES | _OF_A_SOURCE)
"""Keys that a variable may decide, besides numbers and switches. A choice is one of a few words; any other
value is refused."""


def check_interpolations(raw: Mapping[str, Any], sections: Collection[str]) -> None:
    """Raises UserError, which begins with the key, for a `${…}` that is not one of the three forms.

    raw: the config, unresolved. sections: names of its sections.
    """
    reads = reads_environment(raw)
    for key, value in _texts(raw, ""):
        text = _reduced(value)
        if reads and key in sections and text != value:
            raise UserError(f"{key}: is ${{…}} in a config that reads the environment; write its keys out")
        if "${" in text:
            raise UserError(
                f"{key}: {value!r:.100}: a ${{…}} may be another key, oc.env:NAME or "
                "oc.decode:${oc.env:NAME}, with these names written out"
            )
        for name in _DECODED.findall(_ESCAPED.sub("", value)):
            if "${" in os.environ.get(name, ""):
                raise UserError(f"{key}: the variable {name} holds a ${{…}} itself; set it to a value")


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


def check_reads(marks: Any, values: Any, may_read: Callable[[str], bool]) -> list[str]:
    """The texts and numbers that the environment decides, wholly or in part, as they are printed.

    Raises UserError, which begins with the key and shows no value, where a key may not read the environment,
    or reads a list or a section from it. marks: the result of `marked`, resolved; values: the config,
    resolved. may_read: called with a dotted key.
    """
    read = []
    for key, value in _read(marks, values, ""):
        if not may_read(key):
            raise UserError(
                f"{key}: reads the environment, itself or through another key, which only places, numbers "
                "and choices may; write the value out"
            )
        if isinstance(value, (list, Mapping)):
            raise UserError(
                f"{key}: the environment gives a list or a section, and may give one value; write it out"
            )
        read += [] if isinstance(value, bool) else [str(value)]
    return read


def _read(marks: Any, values: Any, key: str) -> Iterator[tuple[str, Any]]:
    """(key, value) of each value that has a mark; an item of a list has the key of the list."""
    if isinstance(marks, Mapping):
        for name, item in marks.items():
            yield from _read(item, values[name], f"{key}.{name}" if key else str(name))
    elif isinstance(marks, list):
        for item, value in zip(marks, values, strict=True):
            yield from _read(item, value, key)
    elif isinstance(marks, str) and _READ in marks:
        yield key, values


def reads_environment(raw: Any) -> bool:
    """Whether any value of the config reads a variable."""
    return "oc.env" in str(raw)


def masked(message: str, raw: Any, read: Sequence[str] = ()) -> str:
    """`message` without values of the environment: `${oc.env:NAME}` replaces the value of each variable that
    `raw` names, and `${oc.env}` replaces each of `read`, the texts and numbers that oc.decode made.
    """
    hidden = [(os.environ.get(name, ""), f"${{oc.env:{name}}}") for name in _VARIABLE.findall(str(raw))]
    for value, mask in [*hidden, *((text, "${oc.env}") for text in read)]:
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
