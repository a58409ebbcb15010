"""Rows of an Arrow table, with the keys that the same rows have as JSON lines.

A struct of Arrow has the fields of all rows in each row. So Parquet files and datasets of the hub hold a tool
call `{"city": "Rome"}` as `{"city": "Rome", "a": None, "b": None}` if another row calls a tool with `a` and
`b`, and the schemas of tools likewise. A model would learn these nulls. A field of a struct that is null is
therefore left out, at any depth, as if the row did not have the key. The columns of a row and the items of a
list stay: they are no fields of a struct. So do maps and JSON text, where each row has keys of its own.

In the schema of a tool, `default`, `const`, `enum` and `examples` hold values of a user: nothing is left out
inside of them. One that is null itself stays only if its type is null: then no row has another value, so
that a row wrote it. (A null that a row wrote beside values of other rows cannot be told from a missing key.)
"""

import json
from collections.abc import Callable
from typing import Any

from lptune.data.messages import TOOLS_NAMES

_Reader = Callable[[Any], Any]

_DATA, _SCHEMA, _NAMES = "data", "schema", "names"
"""What the fields of a struct are: data, keywords of a JSON schema, or names of parameters in one."""
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_OF_VALUES = ("default", "const", "enum", "examples")


class StructReader:
    """Leaves the null fields of structs out of rows, and counts them."""

    def __init__(self, schema: Any, *, is_decoded: bool = False) -> None:
        """schema: pyarrow's. is_decoded: JSON text is an object already, as datasets yields it."""
        import pyarrow

        self._types = pyarrow.types
        self._is_decoded = is_decoded
        self._num_left_out = 0
        readers = {field.name: self._field(field, _DATA, 0) for field in schema}
        self._readers = {name: reader for name, reader in readers.items() if reader is not None}

    def read(self, values: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """The row `values` without null fields, and how many it had. Those of the outermost structs are not
        counted: messages have them in any file, and null means missing there.
        """
        before = self._num_left_out
        read = {
            name: reader(value) if (reader := self._readers.get(name)) else value
            for name, value in values.items()
        }
        return read, self._num_left_out - before

    def _field(self, field: Any, kind: str, depth: int) -> _Reader | None:
        """The reader for the values of `field`; None if they stay as they are. kind: of the struct around it.
        depth: number of structs around it.
        """
        if kind == _SCHEMA and field.name in _OF_VALUES:
            return None
        if kind == _NAMES or field.name.lower() in TOOLS_NAMES:
            kind = _SCHEMA
        elif kind == _SCHEMA and field.name in _OF_NAMES:
            kind = _NAMES
        return self._value(field.type, kind, depth)

    def _value(self, type_: Any, kind: str, depth: int) -> _Reader | None:
        types = self._types
        if types.is_struct(type_):
            return self._struct(type_, kind, depth)
        if types.is_map(type_):
            read = self._value(type_.item_type, kind, depth) or _same
            return lambda pairs: pairs if pairs is None else {key: read(value) for key, value in pairs}
        if hasattr(type_, "value_type") and not types.is_dictionary(type_):  # each of the kinds of list
            each = self._value(type_.value_type, kind, depth)
            return None if each is None else lambda items: items if items is None else [*map(each, items)]
        if getattr(type_, "extension_name", None) == "arrow.json" and not self._is_decoded:
            return lambda text: text if text is None else json.loads(text)
        return None

    def _struct(self, type_: Any, kind: str, depth: int) -> _Reader:
        readers = {field.name: self._field(field, kind, depth + 1) or _same for field in type_}
        written = {
            field.name
            for field in type_
            if kind == _SCHEMA and field.name in _OF_VALUES and self._types.is_null(field.type)
        }

        def read(value: Any) -> Any:
            if not isinstance(value, dict):  # null, or an object that datasets makes of it
                return value
            kept = {name: each for name, each in value.items() if each is not None or name in written}
            if depth:
                self._num_left_out += len(value) - len(kept)
            return {name: readers[name](each) for name, each in kept.items()}

        return read


def _same(value: Any) -> Any:
    return value
