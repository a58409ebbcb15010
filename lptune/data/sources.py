"""Reads source rows from files and from the hub, each with its place, so that an error can name it.

.json   a list of objects, an object that holds one such list, or (as many tools write it) one object per line
.jsonl  one object per line
.csv    a header and rows
.txt    the whole file is one text
.parquet needs the extra `data`, hub ids the extra `datasets`
builtin the instruction set that lptune generates
A folder or a glob is one source: the rows of its files, one file after the other.

Text is UTF-8; a byte order mark is dropped and CRLF read as a line feed. Lines and rows are counted from 1.
A file is read only as far as its rows are needed.
"""

import csv
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from lptune.base import hub_requests
from lptune.base.errors import UserError, how_to_install
from lptune.config import data_files
from lptune.data.errors import BadRows, RowError
from lptune.data.structs import StructReader
from lptune.data.text_files import DECODER, JsonFloat, JsonText, lines, read_text


class Row(NamedTuple):
    """One row of a source."""

    place: str
    """Where the row is: `rows.jsonl line 12`."""
    values: dict[str, Any]
    num_left_out: int = 0
    """Number of null fields of structs that were left out (structs.py)."""


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
    readers = {
        ".json": _read_json,
        ".jsonl": _read_jsonl,
        ".csv": _read_csv,
        ".txt": _read_txt,
        ".parquet": _read_parquet,
    }
    return readers[path.suffix.lower()](name, path, bad)


def _read_txt(source: str, path: Path, bad: BadRows) -> Iterator[Row]:
    yield Row(source, {"text": read_text(source, path)})


def _read_jsonl(source: str, path: Path, bad: BadRows) -> Iterator[Row]:
    return _json_lines(source, lines(source, path), bad)


def _json_lines(source: str, texts: Iterable[str], bad: BadRows) -> Iterator[Row]:
    for number, text in enumerate(texts, 1):
        line = text.removesuffix("\n")
        if not line or line.isspace():
            continue
        place = f"{source} line {number}"
        try:
            yield Row(place, _json_object(line))
        except RowError as problem:
            if number == 1 and line.lstrip().startswith("["):
                raise UserError(
                    f"{place}: starts a JSON list, not one object per line; name the file .json"
                ) from None
            bad.add(place, problem)


def _json_object(line: str) -> dict[str, Any]:
    try:
        values = DECODER.decode(line)
    except json.JSONDecodeError as error:
        raise RowError(f"not valid JSON: {_json_problem(error)}; fix the line") from None
    except RecursionError:
        raise RowError("not valid JSON: nested too deeply; fix the line") from None
    except ValueError:
        raise RowError("not valid JSON: a number of thousands of digits; fix the line") from None
    if not isinstance(values, dict):
        raise RowError(f'must be a JSON object such as {{"prompt": …}}, found a {_json_type(values)}')
    return values


def _json_problem(error: json.JSONDecodeError) -> str:
    """The problem as text: `Unterminated string starting at column 12`."""
    return f"{error.msg.removesuffix(' at')} at column {error.colno}"


def _json_type(value: Any) -> str:
    names = {
        list: "list",
        str: "string",
        bool: "boolean",
        int: "number",
        JsonFloat: "number",
        float: "number",  # NaN
        type(None): "null",
        dict: "object",
    }
    return names[type(value)]


def _read_json(source: str, path: Path, bad: BadRows) -> Iterator[Row]:
    with closing(JsonText(source, path)) as text:
        if text.next_character() == "[":
            yield from _json_list(source, text.elements(), bad)
            return
        value = text.value()
        if not text.next_character():
            yield from _json_list(source, _the_list(source, value), bad)
            return
        first = next(line for line in lines(source, path) if line.strip())
        if not _is_object(first):
            raise text.extra_data()
    yield from _json_lines(source, lines(source, path), bad)


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _the_list(source: str, values: Any) -> list[Any]:
    if isinstance(values, list):
        return values
    if not isinstance(values, dict):
        raise UserError(f"{source}: must hold a list of objects, found a {_json_type(values)}")
    lists = {key: value for key, value in values.items() if isinstance(value, list)}
    tables = {
        key: value for key, value in lists.items() if value and all(isinstance(row, dict) for row in value)
    }
    if len(tables) == 1 and not {"messages", "conversations"} & tables.keys():
        return next(iter(tables.values()))
    if not lists or {"messages", "conversations"} & tables.keys():
        raise UserError(
            f"{source}: holds one object (keys {_listed(values)}), not a list of rows; put it into a list: "
            f"[{{…}}, …]"
        )
    raise UserError(
        f"{source}: holds an object with {len(lists)} lists ({_listed(lists)}); keep one list of row "
        "objects in the file"
    )


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
    reader = csv.reader(lines(source, path), strict=True)
    try:
        header = next(reader)
    except csv.Error as error:
        raise UserError(f"{source} line {reader.line_num}: not CSV: {error}") from None
    names = [name.strip() for name in header]
    other = next((mark for mark in (";", "\t", "|") if mark in names[0]), None) if len(names) == 1 else None
    if other is not None:
        raise UserError(f"{source} line 1: the fields are separated by {other!r}; save the file with commas")
    repeated = sorted({name for name in names if names.count(name) > 1 or not name})
    if repeated:
        raise UserError(
            f"{source} line 1: the header names {repeated[0]!r} more than once or not at all; give each "
            "column a name"
        )
    return _csv_rows(source, reader, names, bad)


def _csv_rows(source: str, reader: Any, names: list[str], bad: BadRows) -> Iterator[Row]:
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
                RowError(f"has {len(fields)} fields, the header has {len(names)}; check commas and quotes"),
            )


def _read_parquet(source: str, path: Path, bad: BadRows) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{source}: Parquet files need pyarrow; {how_to_install('data')}") from None
    try:
        table = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{source}: not a Parquet file: {error}") from None
    return _parquet_rows(source, table)


def _parquet_rows(source: str, table: Any) -> Iterator[Row]:
    number = 0
    reader = StructReader(table.schema_arrow)
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
    return _hub_rows(source, table)


def _hub_rows(source: str, table: Any) -> Iterator[Row]:
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


def _listed(names: Any) -> str:
    """At most eight of the names, as `a, b, c`."""
    names = [str(name) for name in names]
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
