"""What a config may read from the environment, where tokens and passwords are.

`${…}` is another key, `${oc.env:NAME}` with or without a default, or `${oc.decode:${oc.env:NAME}}`. The name
of a resolver is written out: `${oc.${key}:NAME}` would read the environment unseen.

Which keys a variable may decide, itself or through another key, is a list of what may, so that a new key may
not: places, numbers and choices. Any other text ends up in what is trained, exported or logged: a layer's
pattern is a note of the plan and of the model card. A variable decides one value, never a list or a section,
which would bring keys of its own. No file has its value as the value of a key: where the environment took
part, `${…}` stay as they were written (load.py), in errors, too.
"""

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from lptune.config.errors import UserError

_KEY, _READ = "\0", "\1"  # stand for what was found allowed; no \w, as no name may be made of parts
_ALLOWED = (
    (re.compile(r"\$\{\s*[\w.\[\]\-]+\s*\}"), _KEY),
    (re.compile(r"\$\{\s*oc\.env\s*:\s*\w+\s*(?:,[^${}]*)?\}"), _READ),
    # Of anything else: it resolves the `${…}` that it finds in a value.
    (re.compile(rf"\$\{{\s*oc\.decode\s*:\s*{_READ}\s*\}}"), _READ),
)
_ESCAPED = re.compile(r"(?<!\\)(?:\\\\)*\\\$\{")
_LEAST = 4  # characters: a shorter value is no secret, and its letters are in every message
_VARIABLE = re.compile(r"oc\.env\s*:\s*(\w+)")
_DECODED = re.compile(r"oc\.decode\s*:\s*\$\{\s*oc\.env\s*:\s*(\w+)")  # and resolved, where it holds a ${…}

_PLACES = {"model.path", "data.source", "data.eval_source", "data.cache", "resume", "output_dir"}
_CHOICES = {
    "data.format", "data.on_bad_row", "precision.kind", "precision.output", "precision.grad_input",
    "precision.grad_weight", "precision.grad_format", "precision.all_gather", "precision.tp_all_gather",
    "optimizer.kind", "schedule.kind", "export.dtype", "device", "compute_dtype", "compile",
    "activation_checkpointing",
}  # fmt: skip
_OF_A_SOURCE = {
    f"data.{key}.{leaf}" for key in ("source", "eval_source") for leaf in ("source", "weight", "format")
}
TEXTS = frozenset(_PLACES | _CHOICES | _OF_A_SOURCE)
"""The keys, besides numbers and switches, that a variable may decide. A choice is one of a few words; any
other value of it is refused."""


def check_interpolations(raw: Mapping[str, Any], sections: Collection[str]) -> None:
    """Raises UserError, which begins with the key, for a `${…}` that is none of these.

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
    """`raw`, checked as above, with a mark in the place of each text that reads the environment. What other
    keys make of that text has the mark, too, once it is resolved.
    """
    if isinstance(raw, Mapping):
        return {name: marked(item) for name, item in raw.items()}
    if isinstance(raw, (list, tuple)):
        return [marked(item) for item in raw]
    if not isinstance(raw, str) or _READ not in _reduced(raw):
        return raw
    # The keys in the text stay, so that one which is not there is missing here already.
    return _READ + "".join(_ALLOWED[0][0].findall(_ESCAPED.sub("", raw)))


def check_reads(marks: Any, values: Any, may_read: Callable[[str], bool]) -> list[str]:
    """The texts and numbers that the environment decides, alone or in part, as they are printed.

    Raises UserError, which begins with the key and holds no value, where a key may not read it, or has a list
    or a section of it. marks: `marked`, resolved; values: the config, resolved. may_read: called with a
    dotted key.
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
    """(key, value) of each that has a mark; the items of a list have the list's key."""
    if isinstance(marks, Mapping):
        for name, item in marks.items():
            yield from _read(item, values[name], f"{key}.{name}" if key else str(name))
    elif isinstance(marks, list):
        for item, value in zip(marks, values, strict=True):
            yield from _read(item, value, key)
    elif isinstance(marks, str) and _READ in marks:
        yield key, values


def reads_environment(raw: Any) -> bool:
    """Whether a variable takes part in any value."""
    return "oc.env" in str(raw)


def masked(message: str, raw: Any, read: Sequence[str] = ()) -> str:
    """`message` with `${oc.env:NAME}` in the place of the values of the variables that `raw` names, and
    `${oc.env}` in that of the texts and numbers `read`, as oc.decode has made them.
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
    """Without what is escaped, and with one character for each `${…}` that is allowed."""
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
