"""Reads source rows from files and from the hub, each with its place, so that an error can name it.

.json   a list of objects, an object that holds one such list, or (as many tools write it) one object per line
.jsonl  one object per line
.csv    a header and rows
.txt    the whole file is one text
.parquet needs the extra `data`, hub ids the extra `datasets`
builtin the instruction set that lptune generates
A folder or a glob is one source: the rows of its files, one file after the other.

Text is UTF-8; a byte order mark is dropped and CRLF read as a line feed. Lines and rows are counted from 1.
Lines of .jsonl and .csv, and rows of Parquet, are read only as far as they are needed; .json and .txt are
read whole. A line has at most MAX_ROW_BYTES: what has more is no row.
"""

import codecs
import csv
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy

from lptune.base import hub_requests
from lptune.base.errors import UserError, how_to_install
from lptune.base.files import MEBI, LongLineError, parse_json, raw_lines
from lptune.config import data_files
from lptune.data.errors import BadRows, RowError, listed
from lptune.data.messages import TOOLS_NAMES

MAX_ROW_BYTES = 1024 * MEBI
"""Far above any document."""
_TOO_MUCH = "nested too deeply, or a number of thousands of digits"

_Reader = Callable[[Any], Any]

_DATA, _SCHEMA, _NAMES, _VALUES = "data", "schema", "names", "values"
"""What the fields of a struct are: data, keywords of a JSON schema, names of parameters in one, or values of
a parameter there, whose nulls stay."""
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_OF_VALUES = ("default", "const", "enum", "examples")


class Row(NamedTuple):
    """One row of a source."""

    place: str
    """Where the row is: `rows.jsonl line 12`."""
    values: dict[str, Any]
    num_left_out: int = 0
    """Number of null fields of structs that were left out (StructReader)."""
    line: str = ""
    """The JSON that the values were read from, if each row has its own."""


def read_rows(
    source: str, bad: BadRows, *, split: str = "train", max_rows: int | None = None
) -> Iterator[Row]:
    """The rows of `source` (a file, a folder, a glob, a hub id or `builtin`), at most `max_rows`.

    A row that cannot be read goes to `bad`. Raises UserError for a source that is missing, empty or not data.
    """
    rows = _open(source, bad, split)
    first = next(rows, None)
    if first is None:
        skipped = f"; all {bad.count} rows are bad, the first: {bad.first}" if bad.count else ""
        raise UserError(f"{source}: holds no rows{skipped}; give data.source rows to train on")
    yield first
    yield from rows if max_rows is None else islice(rows, max_rows - 1)


def _open(source: str, bad: BadRows, split: str) -> Iterator[Row]:
    if source == "builtin":
        from lptune.data.builtin import DEFAULT_NUM_ROWS, builtin_rows

        return (Row(f"builtin row {i}", dict(row)) for i, row in enumerate(builtin_rows(DEFAULT_NUM_ROWS), 1))
    files = data_files(source)
    if files is None:
        return _read_hub(source, split)
    is_one = files == [Path(source).expanduser()]
    return chain.from_iterable(_read_file(source if is_one else str(file), file, bad) for file in files)


def _read_file(name: str, path: Path, bad: BadRows) -> Iterator[Row]:
    match path.suffix.lower():
        case ".json":
            return _read_json(name, path, bad)
        case ".jsonl":
            return _json_lines(name, _lines(name, path), bad)
        case ".csv":
            return _read_csv(name, path, bad)
        case ".txt":
            return iter([Row(name, {"text": _read_text(name, path)})])
        case suffix:
            assert suffix == ".parquet", suffix
            return _read_parquet(name, path)


def _json_lines(source: str, texts: Iterable[str], bad: BadRows) -> Iterator[Row]:
    for number, text in enumerate(texts, 1):
        line = text.removesuffix("\n")
        if not line or line.isspace():
            continue
        place = f"{source} line {number}"
        try:
            yield Row(place, _json_object(line), line=line)
        except RowError as problem:
            if number == 1 and line.lstrip().startswith("["):
                raise UserError(
                    f"{place}: starts a JSON list, not one object per line; name the file .json"
                ) from None
            bad.add(place, problem)


def _json_object(line: str) -> dict[str, Any]:
    try:
        values = _DECODER.decode(line)
    except json.JSONDecodeError as error:
        raise RowError(f"not valid JSON: {_problem(error)}; fix the line") from None
    except (ValueError, RecursionError):
        raise RowError(f"not valid JSON: {_TOO_MUCH}; fix the line") from None
    if not isinstance(values, dict):
        raise RowError(f'must be a JSON object such as {{"prompt": …}}, found a {_json_type(values)}')
    return values


def _problem(error: json.JSONDecodeError) -> str:
    """The problem as text: `Unterminated string starting at column 12`."""
    return f"{error.msg.removesuffix(' at')} at column {error.colno}"


def _json_type(value: Any) -> str:
    names = {list: "list", str: "string", bool: "boolean", type(None): "null", dict: "object"}
    return names.get(type(value), "number")


def _read_json(source: str, path: Path, bad: BadRows) -> Iterator[Row]:
    text = _read_text(source, path)
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip().startswith("{"):
            return _json_lines(source, text.split("\n"), bad)
        line = f"{source} line {error.lineno}: not valid JSON: {_problem(error)}; fix the file"
        raise UserError(line) from None
    except (ValueError, RecursionError):
        raise UserError(f"{source}: not valid JSON: {_TOO_MUCH}; fix the file") from None
    return _json_list(source, _the_list(source, value), bad)


def _the_list(source: str, values: Any) -> list[Any]:
    if isinstance(values, list):
        return values
    if not isinstance(values, dict):
        raise UserError(f"{source}: must hold a list of objects, found a {_json_type(values)}")
    lists = {key: value for key, value in values.items() if isinstance(value, list)}
    tables = [key for key in lists if lists[key] and all(isinstance(row, dict) for row in lists[key])]
    is_row = not {"messages", "conversations"}.isdisjoint(tables)
    if len(tables) == 1 and not is_row:
        return lists[tables[0]]
    if not lists or is_row:
        what = f"holds one object (keys {listed(values)}), not a list of rows"
        raise UserError(f"{source}: {what}; put it into a list: [{{…}}, …]")
    what = f"holds an object with {len(lists)} lists ({listed(lists)})"
    raise UserError(f"{source}: {what}; keep one list of row objects in the file")


def _json_list(source: str, rows: Iterable[Any], bad: BadRows) -> Iterator[Row]:
    for number, values in enumerate(rows, 1):
        place = f"{source} row {number}"
        if isinstance(values, dict):
            yield Row(place, values)
        else:
            bad.add(
                place, RowError(f'must be an object such as {{"prompt": …}}, found a {_json_type(values)}')
            )


def _read_csv(source: str, path: Path, bad: BadRows) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)
    lines = _lines(source, path)
    first = next(lines)
    # Spreadsheets of many languages, whose numbers have commas, separate fields by semicolons.
    separator = next((mark for mark in (",", ";", "\t", "|") if mark in first), ",")
    reader = csv.reader(itertools.chain([first], lines), delimiter=separator, strict=True)
    try:
        header = next(reader)
    except csv.Error as error:
        raise UserError(f"{source} line {reader.line_num}: not CSV: {error}") from None
    names = [name.strip() for name in header]
    repeated = sorted({name for name in names if names.count(name) > 1 or not name})
    if repeated:
        raise UserError(
            f"{source} line 1: the header names {repeated[0]!r} more than once or not at all; give each "
            "column a name"
        )
    while True:
        place = f"{source} line {reader.line_num + 1}"
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            # An open quote swallows the rest of the file.
            raise UserError(f"{place}: not CSV: {error}; check the quotes") from None
        if not fields:
            continue
        if len(fields) == len(names):
            yield Row(place, dict(zip(names, fields, strict=True)))
        else:
            bad.add(
                place,
                RowError(
                    f"has {len(fields)} fields, the header has {len(names)}; check quotes and each "
                    f"{separator!r}, which separates the fields of the header"
                ),
            )


def _read_parquet(source: str, path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{source}: Parquet files need pyarrow; {how_to_install('data')}") from None
    try:
        table = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{source}: not a Parquet file: {error}") from None
    reader, number = StructReader(table.schema_arrow), 0
    try:
        for batch in table.iter_batches(batch_size=1024):
            for values in batch.to_pylist():
                number += 1
                yield Row(f"{source} row {number}", *reader.read(values))
    except (OSError, ValueError) as error:  # pyarrow's own errors derive from these
        raise UserError(f"{source}: broken after row {number}: {error}") from None


def _read_hub(source: str, split: str) -> Iterator[Row]:
    name, _, config = source.partition(":")
    try:
        import datasets

        table = datasets.load_dataset(name, config or None, split=split)
    except ImportError:
        raise UserError(
            f"{source}: no such file; a hub id needs the package datasets; {how_to_install('datasets')}"
        ) from None
    except Exception as error:  # datasets raises many types, also for the network
        raise UserError(
            f"{source}: cannot load split {split!r} from the hub: {hub_requests.first_line(error)}; check "
            "data.source and data.split"
        ) from None
    number = 0
    try:
        features = getattr(table, "features", None)  # None if nobody has looked at the rows
        reader = StructReader(features.arrow_schema, is_decoded=True) if features else None
        for values in table:
            number += 1
            yield Row(f"{source} row {number}", *(reader.read(values) if reader else (dict(values),)))
    except Exception as error:  # as above
        raise UserError(
            f"{source}: broken after row {number}: {hub_requests.first_line(error)}; check data.source and "
            "run again"
        ) from None


def _read_text(source: str, path: Path) -> str:
    """The whole file, with line feeds as line breaks. Raises the same errors as `_lines`."""
    try:
        with _open_text(source, path) as file:
            text = file.read().decode()
    except UnicodeDecodeError:
        for _ in _lines(source, path):  # which finds the line
            pass
        raise
    except OSError as error:
        raise UserError(f"{source}: cannot be read: {error.strerror or error}") from None
    return text.replace("\r\n", "\n")


def _lines(source: str, path: Path) -> Iterator[str]:
    """The lines of the file, each with its line feed (CRLF is one).

    source: the name in messages. Raises UserError for a file that is empty, not UTF-8, or unreadable.
    """
    try:
        with _open_text(source, path) as file:
            number = 0
            for number, raw in enumerate(raw_lines(file, MAX_ROW_BYTES), 1):
                try:
                    line = raw.decode()
                except UnicodeDecodeError as error:
                    byte = raw[error.start]
                    raise UserError(
                        f"{source} line {number}: not UTF-8 text (byte 0x{byte:02x}); save the file as UTF-8"
                    ) from None
                yield f"{line[:-2]}\n" if line.endswith("\r\n") else line
    except LongLineError as error:
        raise UserError(f"{source} line {number + 1}: {error}; cut it into rows") from None
    except OSError as error:
        raise UserError(f"{source}: cannot be read: {error.strerror or error}") from None


def _open_text(source: str, path: Path) -> BinaryIO:
    """Opens the file, at its first character (after a byte order mark)."""
    file = path.open("rb")
    try:
        head = file.read(3)
        if head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise UserError(f"{source}: is UTF-16 text; save it as UTF-8")
        start = len(head) if head == codecs.BOM_UTF8 else 0
        file.seek(start)
        while (chunk := file.read(2**16)) and chunk.isspace():
            pass
        if not chunk:
            raise UserError(f"{source}: is empty; give data.source rows to train on")
        file.seek(start)
    except BaseException:
        file.close()
        raise
    return file


class JsonFloat(float):
    """A number of JSON with a fraction or an exponent, and its text: 1.10 is no other number than 1.1, but
    another answer.
    """

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


_DECODER = json.JSONDecoder(parse_float=JsonFloat)


class StructReader:
    """Gives rows of an Arrow table the keys that they have as JSON lines, and counts what it leaves out.

    A struct of Arrow has the fields of all rows in each row. So Parquet files and datasets of the hub hold a
    tool call `{"city": "Rome"}` as `{"city": "Rome", "a": None, "b": None}` if another row calls a tool with
    `a` and `b`, and the schemas of tools likewise. A model would learn these nulls. A field of a struct that
    is null is therefore left out, at any depth, as if the row did not have the key. The columns of a row and
    the items of a list stay: they are no fields of a struct. So do maps and JSON text, where each row has
    keys of its own.

    In the schema of a tool, `default`, `const`, `enum` and `examples` hold values of a user: nothing is left
    out inside of them. One that is null itself stays only if its type is null: then no row has another
    value, so that a row wrote it. (A null that a row wrote beside values of other rows cannot be told from a
    missing key.)

    A fraction of 32 or 16 bits is the number with the fewest digits that its bits stand for: 3.14, as the row
    had it before it was rounded, and not 3.140000104904175.
    """

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
