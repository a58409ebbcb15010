"""What a config may read from the environment, where tokens and passwords are.

`${…}` is another key, `${oc.env:NAME}` with or without a default, or `${oc.decode:${oc.env:NAME}}`. The name
of a resolver is written out: `${oc.${key}:NAME}` would read the environment unseen. A variable may decide a
place (a folder, a file, a name on the hub), a number or a choice. It may not decide a text that is trained on
or exported. No file has its value as the value of a key: where the environment took part, `${…}` stay as they
were written (load.py), in errors, too.
"""

import os
import re
from collections.abc import Collection, Iterator, Mapping
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
_VARIABLE = re.compile(r"oc\.env\s*:\s*(\w+)")
_CONTENT = re.compile(r"data\.((eval_)?source\.)?(\w+_template|\w+_column|system_prompt)")


def check_interpolations(raw: Mapping[str, Any], sections: Collection[str]) -> None:
    """Raises UserError, which begins with the key, for a `${…}` that is none of these.

    raw: the config, unresolved. sections: names of its sections.
    """
    reads = reads_environment(raw)
    for key, value in _texts(raw, ""):
        text = _ESCAPED.sub("", value)
        if "${" not in text:
            continue
        if reads and _CONTENT.match(key):
            raise UserError(
                f"{key}: holds ${{…}} in a config that reads the environment, and is trained on or exported; "
                "write it out"
            )
        if reads and key in sections:
            raise UserError(f"{key}: is ${{…}} in a config that reads the environment; write its keys out")
        for pattern, found in _ALLOWED:
            text = pattern.sub(found, text)
        if "${" in text:
            raise UserError(
                f"{key}: {value!r:.100}: a ${{…}} may be another key, oc.env:NAME or "
                "oc.decode:${oc.env:NAME}, with these names written out"
            )


def reads_environment(raw: Any) -> bool:
    """Whether a variable takes part in any value."""
    return "oc.env" in str(raw)


def masked(message: str, raw: Any) -> str:
    """`message` with `${oc.env:NAME}` in the place of the values of the variables that `raw` names."""
    for name in _VARIABLE.findall(str(raw)):
        value, mask = os.environ.get(name, ""), f"${{oc.env:{name}}}"
        for written in {value, repr(value)[1:-1]} - {""}:
            message = message.replace(written, mask)
            # An error shows the beginning of a long value, and an ellipsis.
            shown = next((n for n in range(len(written), 2, -1) if f"{written[:n]}…" in message), 0)
            message = message.replace(f"{written[:shown]}…", f"{mask}…") if shown else message
    return message


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _texts(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item, key)
