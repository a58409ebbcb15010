"""Rows of an Arrow table, with the keys that the same rows have as JSON lines.

A struct of Arrow has the fields of all rows in each row. So Parquet files and datasets of the hub hold a tool
call `{"city": "Rome"}` as `{"city": "Rome", "a": None, "b": None}` if another row calls a tool with `a` and
`b`, and the schemas of tools likewise. A model would learn these nulls. A field of a struct that is null is
therefore left out, at any depth, as if the row did not have the key. The columns of a row and the items of a
list stay: they are no fields of a struct. So do maps and JSON text, where each row has keys of its own.

In the schema of a tool, `default`, `const`, `enum` and `examples` hold values of a user: nothing is left out
inside of them. One that is null itself stays only if its type is null: then no row has another value, so
that a row wrote it. (A null that a row wrote beside values of other rows cannot be told from a missing key.)

A fraction of 32 or 16 bits is the number with the fewest digits that its bits stand for: 3.14, as the row had
it before it was rounded, and not 3.140000104904175.
"""

from collections.abc import Callable
from typing import Any

import numpy

from lptune.base.files import parse_json
from lptune.data.messages import TOOLS_NAMES

_Reader = Callable[[Any], Any]

_DATA, _SCHEMA, _NAMES, _VALUES = "data", "schema", "names", "values"
"""What the fields of a struct are: data, keywords of a JSON schema, names of parameters in one, or values of
a parameter there, whose nulls stay."""
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_OF_VALUES = ("default", "const", "enum", "examples")


class StructReader:
    """Leaves the null fields of structs out of rows, and counts them."""

    def __init__(self, schema: Any, *, is_decoded: bool = False) -> None:
        """schema: pyarrow's. is_decoded: JSON text is an object already, as datasets yields it."""
        import pyarrow

        self._types, self._is_decoded, self._num_left_out = pyarrow.types, is_decoded, 0
        self._readers = {field.name: self._reader(field, _DATA, 0) for field in schema}

    def read(self, values: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """The row `values` without null fields, and how many it had. Those of the outermost structs are not
        counted: messages have them in any file, and null means missing there.
        """
        before = self._num_left_out
        read = {name: self._readers[name](value) for name, value in values.items()}
        return read, self._num_left_out - before

    def _reader(self, field: Any, kind: str, depth: int) -> _Reader:
        """Reads the values of `field`. kind: of the innermost of the `depth` structs around it."""
        if kind == _VALUES or (kind == _SCHEMA and field.name in _OF_VALUES):
            kind = _VALUES
        elif kind == _NAMES or field.name.lower() in TOOLS_NAMES:
            kind = _SCHEMA
        elif kind == _SCHEMA and field.name in _OF_NAMES:
            kind = _NAMES
        type_ = field.type
        if self._types.is_struct(type_):
            return self._struct(type_, kind, depth)
        if self._types.is_map(type_):
            of_item = self._reader(type_.item_field, kind, depth)
            return _or_null(lambda pairs: {key: of_item(value) for key, value in pairs})
        if hasattr(type_, "value_field"):  # a list of any kind
            of_item = self._reader(type_.value_field, kind, depth)
            return of_item if of_item is _same else _or_null(lambda items: [*map(of_item, items)])
        if self._types.is_float32(type_) or self._types.is_float16(type_):
            bits = numpy.float32 if self._types.is_float32(type_) else numpy.float16
            return _or_null(lambda value: value if value.is_integer() else float(str(bits(value))))
        is_json = getattr(type_, "extension_name", None) == "arrow.json" and not self._is_decoded
        return _or_null(parse_json) if is_json else _same

    def _struct(self, type_: Any, kind: str, depth: int) -> _Reader:
        readers = {field.name: self._reader(field, kind, depth + 1) for field in type_}
        # Fields whose nulls a row has written.
        written = {
            field.name
            for field in type_
            if kind == _VALUES
            or (kind == _SCHEMA and field.name in _OF_VALUES and self._types.is_null(field.type))
        }

        def read(value: Any) -> Any:
            if not isinstance(value, dict):
                return value  # datasets has made something of it, an image
            kept = {name: each for name, each in value.items() if each is not None or name in written}
            self._num_left_out += len(value) - len(kept) if depth else 0
            return {name: readers[name](each) for name, each in kept.items()}

        return _or_null(read)


def _same(value: Any) -> Any:
    return value


def _or_null(read: _Reader) -> _Reader:
    return lambda value: None if value is None else read(value)
