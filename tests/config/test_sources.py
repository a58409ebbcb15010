"""`data.source` as a list, and the files that a source names."""

from pathlib import Path
from typing import Any

import pytest

from lptune.base.errors import UserError
from lptune.config import (
    DataConfig,
    SourceConfig,
    check_sources,
    data_files,
    left_out,
    source_names,
    to_dict,
    to_yaml,
)
from lptune.config.sources import MAX_WEIGHT
from tests.config.test_load import load, refused

MODEL = "model: {path: a}\n"
BASE = MODEL + "data: {source: builtin}\n"


@pytest.mark.parametrize(
    ("written", "source"),
    [
        ("shards/*.jsonl", "shards/*.jsonl"),
        ("[ab]*.jsonl", "[ab]*.jsonl"),
        ("[shards/*.jsonl, ~/b, openai/gsm8k:main]", ("shards/*.jsonl", "~/b", "openai/gsm8k:main")),
        ("['*.jsonl']", ("*.jsonl",)),
        (
            "[{source: a.jsonl, weight: 2}, b.jsonl, {source: c/d, split: test, format: chat}]",
            (
                SourceConfig(source="a.jsonl", weight=2.0),
                "b.jsonl",
                SourceConfig(source="c/d", split="test", format="chat"),
            ),
        ),
    ],
)
def test_a_list_is_read_from_yaml_and_from_an_argument_and_written_back(
    tmp_path: Path, written: str, source: Any
) -> None:
    cfg = load(tmp_path, BASE, f"data.source={written}")
    assert cfg.data.source == source
    if not written.startswith("[ab]"):  # which is no YAML
        assert load(tmp_path, MODEL + f"data: {{source: {written}}}") == cfg
    assert load(tmp_path, to_yaml(cfg)) == cfg
    listed = MODEL + "data: {source: [x.jsonl, y.jsonl]}"
    assert load(tmp_path, listed, f"data.source={written}") == cfg
    if "weight" not in written and "'" not in written:
        assert load(tmp_path, BASE, f"data.eval_source={written}").data.eval_source == source


def test_a_written_list_shows_what_is_set_in_it(tmp_path: Path) -> None:
    cfg = load(tmp_path, BASE, "data.source=[a, {source: b, weight: 0.5, text_column: t}]")
    assert to_dict(cfg)["data"]["source"] == ["a", {"source": "b", "weight": 0.5, "text_column": "t"}]
    assert source_names(cfg.data.sources) == "a, b (weight 0.5)"
    names = [SourceConfig(source="/data/x/shards/*.jsonl"), SourceConfig(source="/data/rows.jsonl", weight=2)]
    assert source_names(names) == "shards/*.jsonl, rows.jsonl (weight 2)"
    odd = (SourceConfig(source="a[!hf_token]/r?[!]secret].jsonl"),)
    assert source_names(odd) == "a[…]/r?[…].jsonl", "a variable of the environment may stand there"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[]", "data.source: is an empty list; put a source into it"),
        ("[{source: a, wieght: 2}]", "data.source[0]: unknown key 'wieght' (did you mean 'weight'?)"),
        (
            "[a, {path: b}]",
            "data.source[1]: unknown key 'path'; known: source, weight, name, split, format, ",
        ),
        ("[{weight: 2}]", "data.source[0]: needs the key 'source', found {'weight': 2}"),
        ("[{source: a, weight: 0}]", "data.source[0].weight: must be greater than 0 and finite, found 0"),
        ("[{source: a, weight: 1e9}]", f"data.source[0].weight: must be at most {MAX_WEIGHT}"),
        ("[{source: a, weight: true}]", "data.source[0].weight: must be a number, found True"),
        ("[a, {source: b, format: pair}]", "data.source[1].format: 'pair' is not one of auto, pairs, chat"),
        ("[a, '']", "data.source[1]: is empty; name a file or folder"),
        ("[a, [b]]", "data.source[1]: must be text, found ['b']"),
        ("[~]", "data.source[0]: must be text, found nothing"),
        ("[*.jsonl]", "put text that starts with * or & in quotes"),
        ("{source: a, weight: 2}", "data.source: must be text or a list, found {'source': 'a', 'weight': 2}"),
    ],
)
def test_what_a_list_cannot_hold_is_one_line(tmp_path: Path, value: str, message: str) -> None:
    assert message in refused(tmp_path, MODEL + f"data: {{source: {value}}}")
    if value.startswith("["):
        said = refused(tmp_path, BASE, f"data.source={value}")
        assert said.startswith(("argument 'data.source=[", 'argument "data.source=['))
        assert message in said


def test_evaluation_takes_no_weights(tmp_path: Path) -> None:
    said = refused(tmp_path, BASE, "data.eval_source=[{source: a, weight: 2}]")
    assert "data.eval_source[0].weight: evaluation sees each document once; leave the weight out" in said
    assert DataConfig(source="a", eval_source=(SourceConfig(source="b"),)).eval_sources[0].source == "b"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """shards/ with files of three kinds and what is not read, and shards/old/c.jsonl."""
    (tmp_path / "shards" / "old").mkdir(parents=True)
    for name in ("b.jsonl", "a.JSONL", "10.csv", ".hidden.jsonl", "README.md", "old/c.jsonl"):
        (tmp_path / "shards" / name).write_text("x")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "shards"


def files(source: str) -> list[str] | None:
    found = data_files(source)
    return None if found is None else [str(path) for path in found]


def test_a_folder_is_its_files_of_known_kinds_by_name(folder: Path) -> None:
    named = ["shards/10.csv", "shards/a.JSONL", "shards/b.jsonl"]
    assert files("shards") == files("shards/") == files("./shards") == named
    assert left_out("shards") == ["README.md", "old/"]
    assert left_out("shards/b.jsonl") == left_out("builtin") == left_out("a/b") == []


def test_a_glob_is_the_files_that_it_matches(folder: Path) -> None:
    assert files("shards/*.jsonl") == ["shards/b.jsonl"]
    assert files("shards/**/*.jsonl") == ["shards/b.jsonl", "shards/old/c.jsonl"]
    assert files("**/**/c.jsonl") == ["shards/old/c.jsonl"]
    assert files("shards/[1b]*") == ["shards/10.csv", "shards/b.jsonl"]
    assert files(f"{folder}/?.jsonl") == [f"{folder}/b.jsonl"]


def test_a_path_that_exists_is_no_glob(folder: Path) -> None:
    (folder / "[b].jsonl").write_text("x")
    assert files("shards/[b].jsonl") == ["shards/[b].jsonl"]
    (folder / "x*").mkdir()
    (folder / "x*" / "y.txt").write_text("x")
    assert files("shards/x*") == ["shards/x*/y.txt"]


def test_builtin_and_hub_ids_are_no_files(folder: Path) -> None:
    assert files("builtin") is files("openai/gsm8k") is files("openai/gsm8k:main") is None


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("shards/*", r"^shards/README.md: unknown kind of file '.md'; data.source reads .json, .jsonl"),
        ("/etc/passwd", r"^/etc/passwd: a file without a suffix; data.source reads .json, .jsonl"),
        (".", r"^.: is a folder without a file that .*; its folders hold some: data.source=./\*/\*.csv"),
        ("shards/b.jsonl,x.csv", r"a list stands in brackets: data.source='\[shards/b.jsonl,x.csv\]'"),
        ("{source: a, weight: 2}", r"a list stands in brackets: data.source='\[{source: a, weight: 2}\]'"),
        ("shards/c.jsonl", r"no such file \(did you mean 'b.jsonl'\?\)"),
    ],
)  # fmt: skip
def test_a_source_without_files_is_one_line(folder: Path, source: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        data_files(source)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (["shards", "shards/b.jsonl"], "shards/b.jsonl is read twice, by shards and shards/b.jsonl; take it"),
        (["shards/*.jsonl", "**/b.*"], "shards/b.jsonl is read twice, by shards/*.jsonl and **/b.*"),
        (["hard.jsonl", "shards/b.jsonl"], "shards/b.jsonl is read twice, by hard.jsonl and"),
        (["shards/b.jsonl", "shards/b.jsonl"], "shards/b.jsonl is read twice; take"),
        (["a/b", SourceConfig(source="a/b", weight=2)], "a/b is read twice"),
    ],
)
def test_a_file_that_is_read_twice_is_one_line(
    folder: Path, sources: list[str | SourceConfig], message: str
) -> None:
    (folder.parent / "hard.jsonl").hardlink_to(folder / "b.jsonl")
    listed = [SourceConfig(source=item) if isinstance(item, str) else item for item in sources]
    with pytest.raises(UserError) as caught:
        check_sources("data.eval_source", listed)
    assert message in str(caught.value)
    assert "data.eval_source" in str(caught.value)


def test_one_file_may_be_read_in_two_ways(folder: Path) -> None:
    ways = [SourceConfig(source="shards/b.jsonl", response_column=name) for name in ("chosen", "answer")]
    check_sources("data.source", ways)
    check_sources("data.source", [SourceConfig(source="a/b", split=split) for split in ("x", "y")])
