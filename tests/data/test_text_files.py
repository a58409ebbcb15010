"""Files are read as far as they are asked for, and what is wrong is named as if they had been read whole."""

import json
import tracemalloc
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lptune.base.errors import UserError
from lptune.data import text_files
from lptune.data.errors import BadRows
from lptune.data.sources import read_rows
from lptune.data.text_files import JsonText

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
WINDOWS = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(params=[1, 5])
def window(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "CHUNK_BYTES", request.param)


def elements(path: Path) -> list[Any]:
    with closing(JsonText("x", path)) as text:
        return list(text.elements())


@pytest.mark.usefixtures("window")
@WINDOWS
@given(st.lists(VALUES, max_size=5), st.sampled_from([None, 1]), st.booleans())
def test_a_list_is_the_same_in_any_window(
    tmp_path: Path, values: list[Any], indent: int | None, ascii_only: bool
) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(values, indent=indent, ensure_ascii=ascii_only) + "\n", encoding="utf-8")
    assert elements(path) == values


@pytest.mark.usefixtures("window")
@WINDOWS
@given(st.lists(VALUES, min_size=1, max_size=4), st.data())
def test_what_is_wrong_with_a_list_is_named_where_json_names_it(
    tmp_path: Path, values: list[Any], data: st.DataObject
) -> None:
    whole = json.dumps(values, indent=1)
    place = data.draw(st.integers(1, len(whole) - 1))
    text = whole[:place] + data.draw(st.sampled_from(["", ",", "]", "x", '"', "\n"])) + whole[place + 1 :]
    path = tmp_path / "x.json"
    path.write_text(text)
    wrong = problem(text)
    if wrong is None:
        assert elements(path) == json.loads(text)
        return
    with pytest.raises(UserError) as caught:
        elements(path)
    found = str(caught.value)
    if "trailing comma" in wrong.msg and wrong.msg not in found:
        # Since Python 3.13, json names the comma. At the end of the outer list, this reader has passed it.
        assert "not valid JSON: Expecting value at column " in found
        return
    assert found.startswith(f"x line {wrong.lineno}: not valid JSON: ")
    assert f" at column {wrong.colno}; fix the file" in found


def problem(text: str) -> json.JSONDecodeError | None:
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error
    return None


MANY = [{"q": f"{i} " + "word " * 40, "a": "ü"} for i in range(5_000)]
BODIES = {
    "rows.jsonl": "".join(json.dumps(row) + "\n" for row in MANY),
    "rows.json": json.dumps(MANY),
    "rows.csv": "q,a\n" + "".join(f"{row['q']},{row['a']}\n" for row in MANY),
}


@pytest.mark.parametrize("name", BODIES)
def test_max_rows_stops_reading(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / name
    monkeypatch.setattr(text_files, "CHUNK_BYTES", 32 * 1024)
    path.write_bytes(BODIES[name].encode() + b'\xff{"broken')
    tracemalloc.start()
    try:
        rows = [row.values for row in read_rows(str(path), BadRows("error"), max_rows=300)]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert rows == MANY[:300]
    assert peak < path.stat().st_size / 2, "the whole file was in memory"
    with pytest.raises(UserError, match=r"rows\.\w+ line \d+: not UTF-8 text .byte 0xff."):
        list(read_rows(str(path), BadRows("skip")))


@pytest.mark.parametrize("name", BODIES)
def test_rows_pass_one_by_one(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "CHUNK_BYTES", 32 * 1024)
    path = tmp_path / name
    path.write_text(BODIES[name])
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_rows(str(path), BadRows("error"))) == len(MANY)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 1_000_000
    assert peak < 16 * text_files.CHUNK_BYTES, "more than a window, what its decoding takes, and a row"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", '{"text": "a"}\n{"text": "' + 200 * "b" + '"}\n', "line 2: is longer than 100 bytes"),
        ("x.csv", "text\n" + 200 * "b" + "\n", "line 2: is longer than 100 bytes"),
        ("x.json", '[{"text": "a"}, {"text": "' + 300 * "b", "line 1: a value is longer than 100 characters"),
        ("x.txt", 200 * "b", "is one text of more than 100 bytes"),
    ],
)
def test_what_has_no_end_is_refused_with_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str, message: str
) -> None:
    monkeypatch.setattr(text_files, "MAX_ROW_BYTES", 100)
    monkeypatch.setattr(text_files, "CHUNK_BYTES", 50)
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=rf"{name}.* {message}; cut it into rows"):
        list(read_rows(str(tmp_path / name), BadRows("error")))
