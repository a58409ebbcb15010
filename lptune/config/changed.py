"""A config file with a few keys changed: what `lptune plan --write` and `lptune advise --write` write.

The values are those of the file and of the arguments, as they are written there, `${…}` included; keys that
have their default are left out, as in the configs of this repository.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from lptune.config import load
from lptune.config.load import Dumper


def changed_yaml(
    cls: type, path: Path, overrides: Sequence[str], changes: Mapping[str, Any], assumed: Sequence[str] = ()
) -> str:
    """The YAML of the config `cls` at `path`, with `key=value` overrides, and then `changes`: dotted key ->
    value. assumed: further ones, before `overrides`, that may be missing and are not written. Raises
    UserError as `load_config` does.
    """
    load.load_config(cls, path, [*assumed, *overrides])  # every error of the input
    values = load.read_values(cls, path, overrides)
    for key, value in changes.items():
        *sections, leaf = key.split(".")
        holder = values
        for name in sections:
            holder = holder.setdefault(name, {})
        holder[leaf] = list(value) if isinstance(value, tuple) else value
    for key in load.key_paths(cls):
        _drop_default(values, key.split("."), load.default(cls, key))
    return "".join(f"{name}: {_flow(value)}\n" for name, value in values.items())


def _flow(value: Any) -> str:
    """`value` as YAML on one line, as the configs of this repository have sections."""
    text: str = yaml.dump(
        value, Dumper=Dumper, sort_keys=False, allow_unicode=True, default_flow_style=True, width=math.inf
    )
    return text.strip().removesuffix("...").strip()


def _drop_default(values: dict[str, Any], names: Sequence[str], default: Any) -> None:
    name, *rest = names
    if name not in values:
        return
    if rest:
        if isinstance(values[name], dict):
            _drop_default(values[name], rest, default)
        if values[name] == {}:
            del values[name]
    elif values[name] == default and type(values[name]) is type(default):
        del values[name]
