"""A dataclass <- a YAML file <- `key=value` arguments, with errors that name the key and where it stands.

OmegaConf reads the YAML (safe loader, duplicate keys refused) and checks types against the dataclass. What it reports is turned
into one line: file or argument, key, what was found, and the nearest key that exists.
"""

import dataclasses
import re
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf, ValidationError
from omegaconf.errors import OmegaConfBaseException

from lptune.config.errors import UserError, closest

T = TypeVar("T")


def load_config(cls: type[T], path: Path, overrides: Sequence[str] = ()) -> T:
    """The config `cls` described by the YAML at `path`, with `key=value` overrides applied.

    Raises UserError (one line) for an unreadable file, an unknown key, a wrong type, a missing or illegal value.
    """
    values = _read_yaml(path)
    _check_keys(cls, values, str(path))
    for override in overrides:
        values = OmegaConf.merge(values, _parse_override(cls, override))  # type: ignore[assignment]
    assert isinstance(values, DictConfig)
    try:
        resolved = OmegaConf.to_container(values, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: {_first_line(error)}") from None
    assert isinstance(resolved, dict)
    try:
        return _build(cls, typing.cast("dict[str, Any]", resolved), "")
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def to_yaml(cfg: Any) -> str:
    """`cfg` (a config dataclass) as YAML that `load_config` reads back to an equal object."""
    return yaml.safe_dump(_plain(dataclasses.asdict(cfg)), sort_keys=False, allow_unicode=True)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _read_yaml(path: Path) -> DictConfig:
    try:
        values = OmegaConf.load(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such config file") from None
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}:" if error.problem_mark else ""
        raise UserError(f"{path}:{line} not valid YAML: {error.problem}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{path}: cannot be read: {_first_line(error)}") from None
    if not isinstance(values, DictConfig):
        raise UserError(f"{path}: must hold `key: value` lines, found a {type(values).__name__}")
    return values


def _parse_override(cls: type, override: str) -> DictConfig:
    key, separator, text = override.partition("=")
    if not separator or not re.fullmatch(r"[A-Za-z_][\w.]*", key):
        raise UserError(f"argument {override!r}: overrides have the form key=value, e.g. optimizer.lr=1e-5")
    if _wants_text(cls, key) and not text.startswith(("'", '"')) and text not in ("null", "~"):
        # A template or a path is taken as it stands: `{% for … %}` and `Q: {question}` are no YAML.
        values = OmegaConf.create()
        OmegaConf.update(values, key, text)
    else:
        try:
            values = OmegaConf.from_dotlist([override])
        except (yaml.YAMLError, OmegaConfBaseException) as error:
            raise UserError(f"argument {override!r}: {_first_line(error)}") from None
    _check_keys(cls, values, f"argument {override!r}")
    return values


def _wants_text(cls: type, key: str) -> bool:
    hint: Any = cls
    for part in key.split("."):
        hint = typing.get_type_hints(hint).get(part) if dataclasses.is_dataclass(hint) else None
    return hint is str or (isinstance(hint, types.UnionType) and str in typing.get_args(hint))


def _check_keys(cls: type, values: DictConfig, where: str) -> None:
    for name in _unknown_keys(cls, values, ""):
        section, _, leaf = name.rpartition(".")
        known = [field.name for field in dataclasses.fields(_section(cls, section))]
        hint = closest(leaf, known)
        if not hint:
            everywhere = {path.rpartition(".")[2]: path for path in key_paths(cls)}
            hint = f" (did you mean {everywhere[leaf]!r}?)" if leaf in everywhere else f"; known: {', '.join(known)}"
        raise UserError(f"{where}: unknown key {name!r}{hint}")


def _unknown_keys(cls: type, values: DictConfig, prefix: str) -> Iterator[str]:
    hints = typing.get_type_hints(cls)
    for key in values:
        name = f"{prefix}{key}"
        if key not in hints:
            yield name
        elif dataclasses.is_dataclass(hints[str(key)]):
            child = None if OmegaConf.is_missing(values, key) else values._get_node(key)
            if isinstance(child, DictConfig) and not child._is_none() and not child._is_interpolation():
                yield from _unknown_keys(typing.cast(type, hints[str(key)]), child, f"{name}.")


def key_paths(cls: type, prefix: str = "") -> list[str]:
    """Every key of the config `cls`, dotted: `["model.path", "data.source", ...]`."""
    paths = []
    for name, hint in typing.get_type_hints(cls).items():
        paths += key_paths(hint, f"{prefix}{name}.") if dataclasses.is_dataclass(hint) else [f"{prefix}{name}"]
    return paths


def _section(cls: type, dotted: str) -> type:
    for part in filter(None, dotted.split(".")):
        cls = typing.get_type_hints(cls)[part]
    return cls


def _build(cls: type[T], values: dict[str, Any], prefix: str) -> T:
    """`cls(**values)` with every leaf checked and converted by OmegaConf's node of the annotated type."""
    arguments: dict[str, Any] = {}
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        name, hint = f"{prefix}{field.name}", hints[field.name]
        if dataclasses.is_dataclass(hint):
            section = values.get(field.name)
            if section is not None and not isinstance(section, dict):
                raise UserError(f"{name}: is a section of keys, found {section!r}")
            arguments[field.name] = _build(typing.cast(type, hint), section or {}, f"{name}.")
        elif field.name in values:
            arguments[field.name] = _convert(name, hint, values[field.name])
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise UserError(f"{name}: is required; set it in the file or as an argument {name}=…")
    return cls(**arguments)


def _convert(name: str, hint: Any, value: Any) -> Any:
    if typing.get_origin(hint) is tuple:
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
            raise UserError(f"{name}: must be a list of names, found {value!r}")
        return tuple(value)
    optional = isinstance(hint, types.UnionType) and type(None) in typing.get_args(hint)
    base = next(a for a in typing.get_args(hint) if a is not type(None)) if optional else hint
    if value is None:
        if optional:
            return None
        raise UserError(f"{name}: must be a {base.__name__}, found nothing")
    # OmegaConf converts 1 to True and "3" to 3; a number for a string or a bool for a number is a mistake, though.
    if isinstance(value, (dict, list)) or (isinstance(value, bool) and base is not bool and base is not str):
        raise UserError(f"{name}: must be {_article(base)}, found {value!r}")
    try:
        schema = OmegaConf.structured(dataclasses.make_dataclass("Leaf", [("value", base)])(value))
    except (ValidationError, OmegaConfBaseException):
        raise UserError(f"{name}: must be {_article(base)}, found {value!r}") from None
    return schema.value


def _article(base: type) -> str:
    return {int: "an integer", float: "a number", bool: "true or false", str: "text"}[base]


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
