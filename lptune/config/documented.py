"""The keys of a config class as a user reads them: name, type, default, choices and meaning.

Nothing is written twice. Names, types and defaults come from the dataclass. The meaning is the docstring
under the field, which Python does not keep, so the source file of the class is parsed. The choices of a key
are those that its check names: the class is made with a value that no check accepts, and the error is read.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import sys
import types
import typing
from contextlib import suppress
from pathlib import Path
from typing import Any

from lptune.base.errors import ChoiceError
from lptune.base.text import with_addresses

_NO_VALUE = "?"
"""A value that is no choice of any key."""
_TYPES = {int: "integer", float: "number", bool: "true or false", str: "text"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """One key of a config."""

    name: str
    """Dotted: `optimizer.lr`."""
    type: str
    """integer | number | true or false | text | choice | list."""
    nullable: bool
    """Whether `null` is a value, too."""
    default: str | None
    """As YAML; None: the key is required."""
    choices: tuple[str, ...]
    """Its possible values; empty: they cannot be listed."""
    text: str
    """Its meaning; empty if nothing stands under the field."""
    entry: tuple["Key", ...] = ()
    """The keys of an entry, if the value may be a list of mappings (data.source)."""

    @property
    def leaf(self) -> str:
        """The name without its section."""
        return self.name.rpartition(".")[2]

    @property
    def setting(self) -> str:
        """`lr: 2e-05`, as in a YAML file; the name alone if it is required."""
        return f"{self.leaf}:" if self.default is None else f"{self.leaf}: {self.default}"

    @property
    def values(self) -> str:
        """What a value looks like: `integer or null`, `true or false`, `required text`."""
        required = "required " if self.default is None else ""
        return f"{required}{self.type}{' or null' * self.nullable}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """Keys with a common first part, or (`name` is empty) those without a section."""

    name: str
    text: str
    keys: tuple[Key, ...]


@functools.cache
def sections(cls: type) -> tuple[Section, ...]:
    """The sections of the config class `cls`, in the order of its fields; the keys without a section last."""
    hints = typing.get_type_hints(cls)
    nested = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    found = [
        Section(name=name, text=_class_text(hint), keys=_keys(hint, f"{name}."))
        for name, hint in nested.items()
    ]
    return (*found, Section(name="", text="", keys=_keys(cls, "")))


def keys(cls: type) -> tuple[Key, ...]:
    """Every key of the config class `cls`."""
    return tuple(key for section in sections(cls) for key in section.keys)


def _keys(cls: Any, prefix: str) -> tuple[Key, ...]:
    hints = typing.get_type_hints(cls)
    return tuple(
        _key(cls, field, hints[field.name], f"{prefix}{field.name}")
        for field in dataclasses.fields(cls)
        if not dataclasses.is_dataclass(hints[field.name])
    )


def _key(cls: type, field: "dataclasses.Field[Any]", hint: Any, name: str) -> Key:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    choices = _choices(cls, field.name) if str in options else ()
    is_list = any(typing.get_origin(option) is tuple for option in options)
    base = options[0]
    kind = "choice" if choices else _TYPES.get(base, "list")
    return Key(
        name=name,
        type=f"{kind} or a list" if is_list and kind != "list" else kind,
        nullable=type(None) in options,
        default=_default(field),
        choices=choices,
        text=_field_text(cls, field.name),
        entry=tuple(key for option in options for key in _entry_keys(option)),
    )


def _entry_keys(option: Any) -> tuple[Key, ...]:
    items = typing.get_args(option) if typing.get_origin(option) is tuple else ()
    parts = [part for item in items for part in (typing.get_args(item) or (item,))]
    return tuple(key for part in parts if dataclasses.is_dataclass(part) for key in _keys(part, ""))


def _default(field: "dataclasses.Field[Any]") -> str | None:
    if field.default is not dataclasses.MISSING:
        return as_yaml(field.default)
    return None if field.default_factory is dataclasses.MISSING else as_yaml(field.default_factory())


def as_yaml(value: object) -> str:
    """A plain value as a config has it: `null`, `true`, `[lm_head]`, `2e-05`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(as_yaml, value))}]"
    return str(value) or "''"


def _choices(cls: type, name: str) -> tuple[str, ...]:
    """The choices of a field, by its check in `cls` or in the base class that has the check."""
    for owner in cls.__mro__:
        if not dataclasses.is_dataclass(owner) or name not in owner.__dataclass_fields__:
            continue
        try:
            owner(**_required(owner) | {name: _NO_VALUE})
        except ChoiceError as error:
            if error.key.rpartition(".")[2] == name:
                return error.choices
        except Exception:
            continue  # another check comes first; the config of a copied recipe may raise anything
    return ()


def _required(cls: Any) -> dict[str, Any]:
    """Values of the fields of `cls` that have no default."""
    hints, missing = typing.get_type_hints(cls), dataclasses.MISSING
    fields = [each for each in dataclasses.fields(cls) if each.default is each.default_factory is missing]
    return {each.name: _any_value(hints[each.name]) for each in fields}


def _any_value(hint: Any) -> Any:
    if dataclasses.is_dataclass(hint):
        return typing.cast(type, hint)(**_required(hint))
    return 1 if hint in (int, float) else "any"


def _class_text(cls: Any) -> str:
    """The docstring of a class in one line; empty if dataclass made it (`Name(field: int)`)."""
    text = cls.__doc__ or ""
    return "" if text.startswith(f"{cls.__name__}(") else " ".join(text.split())


def _field_text(cls: type, name: str) -> str:
    """The docstring under a field in one line, of the class nearest to `cls` that has one."""
    for owner in cls.__mro__:
        module = sys.modules.get(owner.__module__)
        file = getattr(module, "__file__", None)
        if file and (text := _texts(file).get(owner.__name__, {}).get(name)):
            return with_addresses(text)
    return ""


@functools.cache
def _texts(file: str) -> dict[str, dict[str, str]]:
    """Class -> field -> docstring, of a source file; empty if there is no source."""
    found: dict[str, dict[str, str]] = {}
    with suppress(OSError, SyntaxError, ValueError):
        for node in ast.parse(Path(file).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found[node.name] = dict(_below_fields(node.body))
    return found


def _below_fields(body: list[ast.stmt]) -> typing.Iterator[tuple[str, str]]:
    for field, after in itertools.pairwise(body):
        is_field = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if is_field and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = after.value.value
            if isinstance(text, str):
                assert isinstance(field, ast.AnnAssign)
                assert isinstance(field.target, ast.Name)
                yield field.target.id, " ".join(inspect.cleandoc(text).split())
