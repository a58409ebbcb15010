"""Every row carries its place; a file that cannot be read is one line with file, line, problem and remedy."""

import json
import sys
import tracemalloc
import types
from pathlib import Path
from typing import Any

import pytest

from lptune.base.errors import UserError
from lptune.data import sources
from lptune.data.errors import BadRows
from lptune.data.sources import Row, read_rows


def read(path: Path | str, *, skip: bool = False, max_rows: int | None = None) -> tuple[list[Row], BadRows]:
    bad = BadRows("skip" if skip else "error")
    return list(read_rows(str(path), bad, max_rows=max_rows)), bad


def write(tmp_path: Path, name: str, content: str | bytes) -> Path:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


ROWS = [{"q": "a", "a": "b"}, {"q": "ü\u2028x", "a": "d\ne"}]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", "\n".join(map(json.dumps, ROWS))),
        (
            "rows.jsonl",
            "\n\n" + "\r\n\r\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\r\n",
        ),
        ("rows.jsonl", "\ufeff" + "\n".join(map(json.dumps, ROWS)) + "\n"),
        ("rows.json", json.dumps(ROWS)),
        ("rows.json", json.dumps({"version": 3, "data": ROWS, "empty": []})),
        ("rows.json", "\n".join(map(json.dumps, ROWS))),
        ("ROWS.JSON", "\ufeff" + json.dumps(ROWS, indent=2, ensure_ascii=False)),
        ("rows.csv", 'q,a\na,b\n\nü\u2028x,"d\ne"\n'),
        ("rows.csv", 'q;a\na;b\n\nü\u2028x;"d\ne"\n'),
        ("rows.csv", 'q\ta\na\tb\nü\u2028x\t"d\ne"\n'),
        ("rows.csv", '\ufeffq, a \r\na,b\r\nü\u2028x,"d\r\ne"'),
    ],
)
def test_the_same_rows_come_out_of_every_kind_of_file(tmp_path: Path, name: str, content: str) -> None:
    rows, _ = read(write(tmp_path, name, content))
    assert [row.values for row in rows] == ROWS


def test_places_count_lines_as_an_editor_does(tmp_path: Path) -> None:
    path = write(tmp_path, "rows.jsonl", '{"a": 1}\n\n{"a": 2}\n')
    assert [row.place for row in read(path)[0]] == [f"{path} line 1", f"{path} line 3"]
    path = write(tmp_path, "rows.csv", 'a,b\n"x\ny",2\n3,4\n')
    assert [row.place for row in read(path)[0]] == [f"{path} line 2", f"{path} line 4"]
    path = write(tmp_path, "rows.json", '[{"a": 1}, {"a": 2}]')
    assert [row.place for row in read(path)[0]] == [f"{path} row 1", f"{path} row 2"]


def test_a_text_file_is_one_text_to_the_last_character(tmp_path: Path) -> None:
    path = write(tmp_path, "a.txt", "One\r\n\r\n  two\n\n\n")
    assert read(path)[0] == [Row(str(path), {"text": "One\n\n  two\n\n\n"})]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("r.jsonl", '{"a": 1}\n{"a": \n', "r.jsonl line 2: not valid JSON: Expecting value at column 7"),
        ("r.jsonl", '{"a": 1}\n{"a": "x}\n', "r.jsonl line 2: not valid JSON: Unterminated string"),
        ("r.jsonl", '{"a": 1}\n[1]\n', "r.jsonl line 2: must be a JSON object .* found a list"),
        ("r.jsonl", '{"a": 1}\nnull\n', "r.jsonl line 2: must be a JSON object .* found a null"),
        ("r.jsonl", '[\n{"a": 1}\n]\n', "r.jsonl line 1: starts a JSON list.*name the file .json"),
        ("r.jsonl", "[" * 100_000, "r.jsonl line 1: (not valid JSON|starts a JSON list)"),
        ("r.jsonl", '{"a": ' + "9" * 5000 + "}", "r.jsonl line 1: not valid JSON: .*thousands of digits"),
        (
            "r.jsonl",
            b'{"a": 1}\n{"a": "\xe4"}\n',
            "r.jsonl line 2: not UTF-8 text .byte 0xe4.; save the file",
        ),
        ("r.jsonl", '{"a": 1}'.encode("utf-16"), "r.jsonl: is UTF-16 text; save it as UTF-8"),
        ("r.jsonl", "", "r.jsonl: is empty"),
        ("r.jsonl", "\ufeff\n \r\n", "r.jsonl: is empty"),
        ("r.json", "", "r.json: is empty"),
        ("r.json", "[]", "r.json: holds no rows"),
        ("r.json", '[{"a": 1},\n{"a": 2},\n]', "r.json line 3: not valid JSON"),
        ("r.json", '[{"a": 1}, 3]', "r.json row 2: must be an object .* found a number"),
        ("r.json", "3", "r.json: must hold a list of objects, found a number"),
        (
            "r.json",
            '{"prompt": "x", "response": "y"}',
            "r.json: holds one object .keys prompt, response., not",
        ),
        (
            "r.json",
            '{"messages": [{"role": "user"}]}',
            "r.json: holds one object .keys messages., not a list",
        ),
        (
            "r.json",
            '{"prompt": ["a"], "response": ["b"]}',
            "r.json: holds an object with 2 lists .prompt, resp",
        ),
        (
            "r.json",
            '{"train": [{"a": 1}], "test": [{"a": 1}]}',
            "r.json: .* an object with 2 lists .train, test",
        ),
        ("r.json", "[" * 100_000 + "]" * 100_000, "r.json: not valid JSON: nested too deeply"),
        ("r.csv", "a,b\n1\n", "r.csv line 2: has 1 fields, the header has 2; check quotes and each ','"),
        ("r.csv", "a;b\n1,2\n", "r.csv line 2: has 1 fields, the header has 2; check quotes and each ';'"),
        ("r.csv", "a,b\n1,2,3\n", "r.csv line 2: has 3 fields, the header has 2"),
        ("r.csv", 'a,b\n1,"2\n3,4\n', "r.csv line 2: not CSV: .*; check the quotes"),
        ("r.csv", "a,a\n1,2\n", "r.csv line 1: the header names 'a' more than once"),
        ("r.csv", "a,,b\n1,2,3\n", "r.csv line 1: the header names '' more than once or not at all"),
        ("r.csv", "a,b\n", "r.csv: holds no rows"),
        ("r.txt", " \n\n", "r.txt: is empty"),
        ("r.xlsx", "x", "r.xlsx: unknown kind of file '.xlsx'; data.source reads .json, .jsonl, .csv, .txt,"),
        ("r.parquet", "no parquet", "r.parquet: not a Parquet file"),
    ],
)
def test_what_cannot_be_read_is_one_line_with_its_place(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    with pytest.raises(UserError, match=message) as caught:
        read(write(tmp_path, name, content))
    assert str(caught.value).startswith(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_bad_rows_are_skipped_and_counted_when_asked(tmp_path: Path) -> None:
    path = write(tmp_path, "r.jsonl", '{"a": 1}\n{"a"\n\n7\n{"a": 2}\n')
    rows, bad = read(path, skip=True)
    assert [row.values["a"] for row in rows] == [1, 2]
    assert bad.count == 2
    assert bad.first.startswith(f"{path} line 2: not valid JSON")
    path = write(tmp_path, "r.csv", "a,b\n1\n2,3\n4,5,6\n")
    rows, bad = read(path, skip=True)
    assert ([row.values for row in rows], bad.count) == ([{"a": "2", "b": "3"}], 2)
    with pytest.raises(
        UserError, match=r"holds no rows; all 2 rows are bad, the first: .*line 1: not valid JSON"
    ):
        read(write(tmp_path, "r.jsonl", "x\ny\n"), skip=True)


MANY = [{"q": f"{i} " + "word " * 40, "a": "ü"} for i in range(5_000)]
BODIES = {
    "rows.jsonl": "".join(json.dumps(row) + "\n" for row in MANY),
    "rows.csv": "q,a\n" + "".join(f"{row['q']},{row['a']}\n" for row in MANY),
}


@pytest.mark.parametrize("name", BODIES)
def test_lines_pass_one_by_one_and_max_rows_stops_reading(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, name, BODIES[name])
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_rows(str(path), BadRows("error"))) == len(MANY)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < path.stat().st_size / 4, "a buffer and a row, not the file"
    path = write(tmp_path, name, BODIES[name].encode() + b'\xff{"broken')
    assert [row.values for row in read(path, max_rows=300)[0]] == MANY[:300]
    with pytest.raises(UserError, match=r"rows\.\w+ line \d+: not UTF-8 text .byte 0xff."):
        read(path, skip=True)


@pytest.mark.parametrize("name", ["x.jsonl", "x.csv"])
def test_a_line_without_an_end_is_refused_with_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(sources, "MAX_ROW_BYTES", 100)
    first = "text" if name == "x.csv" else '{"text": "a"}'
    with pytest.raises(UserError, match=rf"{name} line 2: is longer than 100 bytes; cut it into rows"):
        read(write(tmp_path, name, f"{first}\n" + 200 * "b" + "\n"))


def test_a_missing_file_names_the_closest_one_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "train.jsonl", "{}")
    with pytest.raises(UserError, match=r"trian.jsonl: no such file \(did you mean 'train.jsonl'\?\)"):
        read(tmp_path / "trian.jsonl")
    with pytest.raises(UserError, match=r"no such file, nor a folder .*nowhere"):
        read(tmp_path / "nowhere" / "train.jsonl")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"builtn: no such file \(did you mean 'builtin'\?\)"):
        read("builtn")


def test_the_rows_of_a_folder_and_a_glob_follow_each_other_and_name_their_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is a folder without a file that data.source reads"):
        read(tmp_path)
    write(tmp_path, "b.csv", "a\n1\n2\n")
    write(tmp_path, "c.json", '[{"a": 5}]')
    write(tmp_path, "a.jsonl", '{"a": 0}\n')
    expected = [("a.jsonl line 1", 0), ("b.csv line 2", "1"), ("b.csv line 3", "2"), ("c.json row 1", 5)]
    for source in (tmp_path, tmp_path / "[abc].*"):
        rows, _ = read(source)
        assert [(row.place, row.values["a"]) for row in rows] == [
            (f"{tmp_path}/{place}", value) for place, value in expected
        ]
        assert len(read(source, max_rows=2)[0]) == 2
    write(tmp_path, "b.csv", "a,b\n1\n")
    with pytest.raises(UserError, match=rf"^{tmp_path}/b.csv line 2: has 1 fields, the header has 2"):
        read(tmp_path)


def test_a_missing_package_is_one_line_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pyarrow", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails
    path = write(tmp_path, "r.parquet", b"PAR1")
    with pytest.raises(UserError, match=r"Parquet files need pyarrow; run: .* -m pip install 'pyarrow>=\d"):
        read(path)
    monkeypatch.chdir(tmp_path)
    for hub_id in ("openai/gsm8k", "openai/gsm8k:main"):
        with pytest.raises(UserError, match=rf"{hub_id}: .* a hub id .*; run: .* install 'datasets>=\d"):
            read(hub_id)


def test_parquet_rows_are_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS * 2000), tmp_path / "r.parquet")
    rows, _ = read(tmp_path / "r.parquet")
    assert [row.values for row in rows] == ROWS * 2000
    assert rows[-1].place.endswith("r.parquet row 4000")
    data = (tmp_path / "r.parquet").read_bytes()
    with pytest.raises(UserError, match=r"r.parquet: (not a Parquet file|broken)"):
        read(write(tmp_path, "cut.parquet".replace("cut", "r"), data[:-9]))


def on_the_hub(monkeypatch: pytest.MonkeyPatch, folder: Path, load_dataset: Any) -> None:
    """A stand-in for the package datasets."""
    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.chdir(folder)


def test_the_hub_is_asked_for_the_split_and_its_errors_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def load_dataset(name: str, config: str | None, *, split: str) -> list[dict[str, Any]]:
        asked.append((name, config, split))
        if split == "trian":
            raise ValueError("Unknown split 'trian'.\nmore lines")
        return ROWS

    on_the_hub(monkeypatch, tmp_path, load_dataset)
    assert [row.values for row in read("openai/gsm8k:main")[0]] == ROWS
    assert asked == [("openai/gsm8k", "main", "train")]
    with pytest.raises(
        UserError, match=r"cannot load split 'trian' from the hub: Unknown split 'trian'.; check"
    ):
        list(read_rows("openai/gsm8k", BadRows("error"), split="trian"))


@pytest.mark.parametrize("error", [ConnectionError("reset by peer"), ValueError("bad feature\nmore")])
def test_an_error_while_rows_of_the_hub_are_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def table() -> Any:
        yield ROWS[0]
        raise error

    on_the_hub(monkeypatch, tmp_path, lambda *_, **__: table())
    reason = str(error).splitlines()[0]
    with pytest.raises(UserError, match=rf"^openai/gsm8k: broken after row 1: {reason}; check data.source"):
        read("openai/gsm8k")
