"""A dataclass <- a YAML file <- `key=value` arguments, with errors that name the key and where it stands.

OmegaConf reads the YAML (safe loader, duplicate keys refused), merges the arguments and resolves `${…}`; the
dataclass says which keys exist and of which type. Whatever is wrong becomes one line: file or argument, key,
what was found, the nearest key that exists.
"""

import dataclasses
import io
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml  # type: ignore[import-untyped]
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lptune.base.errors import UnknownKeyError, UserError, closest
from lptune.base.files import read_text
from lptune.config.elsewhere import SWITCHES, key_here


class Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes text that looks like a number: OmegaConf reads 0E0 as a number, PyYAML does not and would not
    quote it.
    """


def _represent_text(dumper: Any, text: str) -> Any:
    style = "'" if text[:1] in tuple("+-.0123456789") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


Dumper.add_representer(str, _represent_text)


_MAX_LISTED = 10
"""Number of keys that a message names."""


def check_keys(cls: type, paths: Sequence[str], values: DictConfig, where: str) -> None:
    """Raises UnknownKeyError for the first key of `values` that the config class `cls` lacks.

    paths: every key of `cls`, dotted. where: the file or the argument, for the message.
    """
    for prefix, key, section in _unknown_keys(cls, values, ""):
        known = [field.name for field in dataclasses.fields(section)]
        sections = {path.rpartition(".")[0] for path in paths} - {""}
        everywhere = {path.rpartition(".")[2]: path for path in paths}
        hint = key_here(prefix + key, sections)
        if key in paths:
            hint = f"; write it nested, {key.replace('.', ': {')}: …{'}' * key.count('.')}"
        elif not hint and key in everywhere and "." in everywhere[key]:  # right word, wrong section
            hint = f" (did you mean {everywhere[key]!r}?)"
        elif not hint:
            hint = closest(key, known).replace("'", f"'{prefix}", 1)
        if not hint and not prefix and (leaf := _leaf(values, key)):
            # A section of another recipe: `data.source` of generate is prompts.source.
            similar = everywhere.get(leaf.rpartition(".")[2])
            hint = f" (did you mean {similar!r}?)" if similar else _listed(known, prefix)
            raise UnknownKeyError(where, leaf if similar else key, hint, leaf=leaf, similar=similar)
        raise UnknownKeyError(where, prefix + key, hint or _listed(known, prefix))


def _listed(known: Sequence[str], prefix: str) -> str:
    """The keys of a section, or the first of many and where the others are."""
    if len(known) <= _MAX_LISTED:
        return f"; known: {', '.join(known)}"
    command = f"lptune keys {prefix.rstrip('.')}".strip()
    return f"; known: {', '.join(known[:_MAX_LISTED])}, …: `{command}` lists all"


def _leaf(values: DictConfig, key: str) -> str | None:
    """`key` with the first key below it, dotted; None if its value is no section."""
    child = values._get_node(key)
    names = list(child) if isinstance(child, DictConfig) and not child._is_none() else []
    return f"{key}.{names[0]}" if names else None


def _unknown_keys(cls: type, values: DictConfig, prefix: str) -> Iterator[tuple[str, str, type]]:
    """(prefix, key, dataclass) of each key that the dataclass of its section lacks."""
    hints = typing.get_type_hints(cls)
    for key in values:
        if key not in hints:
            yield prefix, str(key), cls
        elif dataclasses.is_dataclass(hints[str(key)]):
            child = values._get_node(key)
            if isinstance(child, DictConfig) and not child._is_none() and not child._is_interpolation():
                yield from _unknown_keys(typing.cast(type, hints[str(key)]), child, f"{prefix}{key}.")


T = TypeVar("T")

_MAX_CHARS = 256 * 1024
_MAX_DEPTH = 20
"""Levels of nesting in a YAML file. The sections of a config nest two deep."""
_MAX_INTERPOLATIONS = 16
"""Number of `${…}` in a config. Each can double a text that another doubles: the size is exponential."""
_REFERENCE = re.compile(r"\$\{\s*[\w.\[\]\-]+\s*\}")
_VARIABLE = re.compile(r"\$\{\s*oc\.env\s*:\s*\w+\s*\}")
_ESCAPED = re.compile(r"(?<!\\)(?:\\\\)*\\\$\{")
_PLACES = frozenset({
    "model.path", "teacher.path", "logits.folder", "data.source", "data.source.source", "data.eval_source",
    "data.eval_source.source", "data.cache", "checkpoint.copy_to", "resume", "output_dir",
})  # fmt: skip
"""Keys that may read a variable of the environment."""


def load_config(cls: type[T], path: Path, overrides: Sequence[str] = ()) -> T:
    """The config `cls` described by the YAML at `path`, with `key=value` overrides applied.

    Raises UserError (one line) for an unreadable file, an unknown key, a wrong type, a missing or illegal
    value.
    """
    values = _values(cls, path, overrides)
    _fill_in_defaults(cls, values)
    raw = OmegaConf.to_container(values, resolve=False)
    if str(raw).count("${") > _MAX_INTERPOLATIONS:
        raise UserError(f"{path}: holds more than {_MAX_INTERPOLATIONS} ${{…}}; write some values out")
    try:
        _check_references(raw)
        return _build(cls, typing.cast("dict[str, Any]", OmegaConf.to_container(values, resolve=True)), "")
    except (UserError, OmegaConfBaseException) as error:
        message = str(error) if isinstance(error, UserError) else f"{error.full_key}: {_first_line(error)}"
        raise UserError(f"{_blame(message, path, overrides)}: {message}") from None


def read_values(cls: type, path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The keys that the YAML at `path` and the overrides set, nested and as written there, `${…}` included.
    Raises UserError for an unreadable file and an unknown key.
    """
    values = OmegaConf.to_container(_values(cls, path, overrides), resolve=False)
    return typing.cast("dict[str, Any]", values)


def _values(cls: type, path: Path, overrides: Sequence[str]) -> DictConfig:
    values = read_yaml(path)
    check_keys(cls, key_paths(cls), values, str(path))
    for override in overrides:
        values = _merge(values, _parse_override(cls, override), f"argument {_short(override)}")
    return values


def to_yaml(cfg: Any) -> str:
    """`cfg` (a config dataclass) as YAML that `load_config` reads back to an equal object.

    Every key is written out.
    """
    text: str = yaml.dump(to_dict(cfg), Dumper=Dumper, sort_keys=False, allow_unicode=True)
    return text


def to_dict(cfg: Any) -> dict[str, Any]:
    """Every key of `cfg` (a config dataclass) in nested dicts of plain values."""
    plain: dict[str, Any] = _plain(dataclasses.asdict(cfg))
    return plain


def changed_yaml(
    cls: type, path: Path, overrides: Sequence[str], changes: Mapping[str, Any], assumed: Sequence[str] = ()
) -> str:
    """The YAML of the config `cls` at `path`, with `key=value` overrides, and then `changes`: dotted key ->
    value. assumed: further ones, before `overrides`, that may be missing and are not written. Values stay as
    they are written, `${…}` included; keys that have their default are left out, as in the configs of this
    repository. Raises UserError as `load_config` does.
    """
    load_config(cls, path, [*assumed, *overrides])  # every error of the input
    values = read_values(cls, path, overrides)
    for key, value in changes.items():
        *sections, leaf = key.split(".")
        holder = values
        for name in sections:
            holder = holder.setdefault(name, {})
        holder[leaf] = list(value) if isinstance(value, tuple) else value
    for key in key_paths(cls):
        _drop_default(values, key.split("."), default(cls, key))
    return "".join(f"{name}: {_flow(value)}\n" for name, value in values.items())


def key_paths(cls: type, prefix: str = "") -> list[str]:
    """Every key of the config `cls`, dotted: `["model.path", "data.source", ...]`."""
    paths = []
    for name, hint in typing.get_type_hints(cls).items():
        nested = dataclasses.is_dataclass(hint)
        paths += key_paths(typing.cast(type, hint), f"{prefix}{name}.") if nested else [f"{prefix}{name}"]
    return paths


def default(cls: type, key: str) -> Any:
    """The default of a dotted key of the config `cls`, as a plain value; None for a key without a default."""
    section, _, leaf = key.rpartition(".")
    owner = _hint(cls, section) if section else cls
    value = next(field.default for field in dataclasses.fields(owner) if field.name == leaf)
    return None if value is dataclasses.MISSING else _plain(value)


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


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if not isinstance(value, (list, tuple)):
        return value
    # An entry of a list shows only the keys that are set; the default of each is None.
    entries = [
        {key: leaf for key, leaf in item.items() if leaf is not None} if isinstance(item, dict) else item
        for item in value
    ]
    return [_plain(item) for item in entries]


def _check_references(raw: Any) -> None:
    """Raises UserError, which begins with the key, for a `${…}` that is neither another key nor, in a place,
    a variable. The environment holds tokens, and a config may come from a stranger: what is trained, exported
    or logged must not get one, nor get it through another key.
    """
    texts = list(_texts(raw, ""))
    reads = any(_VARIABLE.search(text) for _, text in texts)
    for key, text in texts:
        is_place = key in _PLACES
        rest = _VARIABLE.sub("\0", text) if is_place else text  # no \w, so that no name is built of parts
        rest = rest if reads and not is_place else _REFERENCE.sub("\0", rest)
        if "${" in rest:
            only = " (in a config that reads the environment: in places alone)" if reads else ""
            raise UserError(
                f"{key}: {text!r:.100}: a ${{…}} may be another key{only}, or oc.env:NAME in a place such as "
                "output_dir, each written out"
            )


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """(dotted key, text without escaped `${`) of all texts. An item of a list has the key of the list."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _texts(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, key)
    elif isinstance(value, str):
        yield key, _ESCAPED.sub("", value)


def read_yaml(path: Path) -> DictConfig:
    """The YAML at `path`, without a config class. Raises UserError as `load_config` does."""
    try:
        text = read_text(path, _MAX_CHARS)
        _check_depth(text)
        values = OmegaConf.load(io.StringIO(text))
    except FileNotFoundError:
        raise UserError(f"{path}: no such config file") from None
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}:" if error.problem_mark else ""
        raise UserError(f"{path}:{line} {_first_line(error)}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8 text; a config is a YAML file, saved as UTF-8") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{path}: cannot be read: {_first_line(error)}") from None
    if not isinstance(values, DictConfig):
        raise UserError(f"{path}: must hold `key: value` lines, found a list")
    return values


def _check_depth(text: str) -> None:
    """Counts nesting by events, one by one: the loader recurses, and libyaml's crashes at 50,000 brackets."""
    depth = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise yaml.MarkedYAMLError(
                problem=f"more than {_MAX_DEPTH} levels of nesting", problem_mark=event.start_mark
            )


def _parse_override(cls: type, override: str) -> DictConfig:
    key, separator, text = override.partition("=")
    where = f"argument {_short(override)}"
    if not separator or not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", key):
        raise UserError(f"{where}: overrides have the form key=value, e.g. optimizer.lr=1e-5")
    try:
        hint = _hint(cls, key)
        if typing.get_origin(hint) is tuple:
            if text.strip() in ("null", "~"):
                raise UserError(f"{where}: {key} is a list; [] is the empty one")
            # Globs such as *.o_proj are not valid YAML.
            names = [name.strip(" '\"") for name in text.removeprefix("[").removesuffix("]").split(",")]
            values = OmegaConf.create()
            OmegaConf.update(values, key, [name for name in names if name])
        elif _is_text(hint) and not _is_yaml(hint, text):
            # A template or path is taken literally: `{% for … %}` and `Q: {question}` are not the YAML meant.
            values = OmegaConf.create()
            OmegaConf.update(values, key, text)
        else:
            _check_depth(text)
            values = OmegaConf.from_dotlist([override])
    except UnicodeEncodeError:
        raise UserError(f"{where}: holds a byte that is no UTF-8; write it as text") from None
    except (yaml.YAMLError, ValueError, RecursionError, OmegaConfBaseException) as error:
        raise UserError(f"{where}: {_first_line(error)}") from None
    check_keys(cls, key_paths(cls), values, where)
    return values


def _fill_in_defaults(cls: type, values: DictConfig) -> None:
    """Sets each key that a `${key}` refers to and that is not set to its default, if that is one value."""
    raw = OmegaConf.to_container(values, resolve=False)
    for key in set(re.findall(r"\$\{([a-z0-9_.]+)\}", str(raw))).intersection(key_paths(cls)):
        *sections, leaf = key.split(".")
        value = default(cls, key)
        holder: Any = raw
        for name in sections:
            holder = (holder.get(name) or {}) if isinstance(holder, dict) else None
        if isinstance(holder, dict) and leaf not in holder and isinstance(value, (str, int, float)):
            OmegaConf.update(values, key, value)


def _merge(values: DictConfig, update: DictConfig, where: str) -> DictConfig:
    try:
        return typing.cast(DictConfig, OmegaConf.merge(values, update))
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        raise UserError(f"{where}: {_first_line(error)}") from None


def _hint(cls: type, key: str) -> Any:
    """The annotation of a dotted key; None for an unknown one."""
    hint: Any = cls
    for name in key.split("."):
        hint = typing.get_type_hints(hint).get(name) if dataclasses.is_dataclass(hint) else None
    return hint


def _is_text(hint: Any) -> bool:
    return hint is str or (isinstance(hint, types.UnionType) and str in typing.get_args(hint))


def _is_yaml(hint: Any, text: str) -> bool:
    """Whether the argument of a text key must be read as YAML: quoted text, null, or a list."""
    is_list = text.startswith("[") and text.endswith("]") and _list_of(hint) is not None
    return is_list or text.startswith(("'", '"')) or text in ("null", "~")


def _list_of(hint: Any) -> Any:
    """The type of the items, if the annotation also allows a list; None if it allows no list."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else ()
    return next((typing.get_args(one)[0] for one in options if typing.get_origin(one) is tuple), None)


def _build(cls: type[T], values: dict[str, Any], prefix: str) -> T:
    """`cls(**values)`, every leaf of the annotated type."""
    arguments: dict[str, Any] = {}
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        name, hint, value = f"{prefix}{field.name}", hints[field.name], values.get(field.name)
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if dataclasses.is_dataclass(hint):
            if value is not None and not isinstance(value, dict):
                first = key_paths(typing.cast(type, hint), f"{name}.")[0]
                raise UserError(f"{name}: is a section of keys, found {value!r}; set one of them, {first}=…")
            if required and not value:
                first = key_paths(typing.cast(type, hint), f"{name}.")[0]
                raise UserError(f"{name}: is required; set it in the file or as an argument {first}=…")
            arguments[field.name] = _build(typing.cast(type, hint), value or {}, f"{name}.")
        elif field.name in values and value != "???":  # OmegaConf's mark for a missing value
            arguments[field.name] = _convert(name, hint, value)
        elif required:
            raise UserError(f"{name}: is required; set it in the file or as an argument {name}=…")
    return cls(**arguments)


def _convert(name: str, hint: Any, value: Any) -> Any:
    if typing.get_origin(hint) is tuple:
        names = value.split(",") if isinstance(value, str) else value
        if not isinstance(names, list) or not all(isinstance(item, str) for item in names):
            raise UserError(f"{name}: must be a list of names, found {value!r}")
        return tuple(item.strip() for item in names)
    if hint is str:
        value = SWITCHES.get(name, {}).get(str(value).lower(), value)
    optional = isinstance(hint, types.UnionType) and type(None) in typing.get_args(hint)
    base = typing.get_args(hint)[0] if isinstance(hint, types.UnionType) else hint
    if value is None and optional:
        return None
    item_hint = _list_of(hint)
    if item_hint is not None and isinstance(value, list):
        return tuple(_entry(f"{name}[{i}]", item_hint, item) for i, item in enumerate(value))
    try:
        return _parse(base, value)
    except (ValueError, OverflowError):
        found = "nothing" if value is None else repr(value)
        what = _ARTICLES[base] + (" or a list" if item_hint is not None else "")
        raise UserError(f"{name}: must be {what}, found {_short(found, quote=False)}") from None


def _entry(name: str, hint: Any, value: Any) -> Any:
    """An item of a list: text, or a mapping that becomes the dataclass of the annotation."""
    cls = next((option for option in typing.get_args(hint) if dataclasses.is_dataclass(option)), None)
    if cls is None or not isinstance(value, dict):
        return _convert(name, str, value)
    fields = dataclasses.fields(cls)
    known = [field.name for field in fields]
    for key in map(str, value):
        if key not in known:
            hint = closest(key, known) or f"; known: {', '.join(known)}"
            raise UserError(f"{name}: unknown key {key!r}{hint}")
    for field in fields:
        if field.default is dataclasses.MISSING and field.name not in value:
            raise UserError(f"{name}: needs the key {field.name!r}, found {_short(repr(value), quote=False)}")
    return _build(typing.cast(type, cls), value, f"{name}.")


def _parse(base: type, value: Any) -> Any:
    """`value` as a `base`. Digits in quotes (or from the environment) are a number; a bool or text is not."""
    if base is bool and str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    accepted = (int, str) if base is int else (int, float, str)
    if base is bool or isinstance(value, bool) or not isinstance(value, accepted):
        raise ValueError
    return base(value)


_ARTICLES = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


def _blame(message: str, path: Path, overrides: Sequence[str]) -> str:
    """Where the error is: the argument for the key that `message` begins with or mentions; else the file."""
    keys = {override.partition("=")[0]: override for override in overrides}
    blamed = message.partition(":")[0]
    for pattern in (r"{}[.:]", r".*(?<![\w.'\"]){}(?![\w.])"):
        for key, override in keys.items():
            # `seed.x=1` makes `seed` a section, so that argument is to blame for `seed`.
            if re.match(pattern.format(re.escape(key)), message) or key.startswith(f"{blamed}."):
                return f"argument {_short(override)}"
    return str(path)


def _short(text: str, quote: bool = True) -> str:
    text = text if len(text) <= 100 else f"{text[:99]}…"
    return repr(text) if quote else text


def _first_line(error: BaseException) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        remedy = "; put text that starts with * or & in quotes" if "alias" in str(error.context) else ""
        return f"not valid YAML: {error.problem}{remedy}"
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    # OmegaConf wraps what a resolver raised: `KeyError raised while resolving interpolation: "…"`.
    return re.sub(r'^\w+ raised while resolving interpolation: "?(.*?)"?$', r"\1", first)
