"""Tool calls and tools from Arrow give the text of the same rows as JSON lines, whatever other rows have."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from lptune.base.errors import UserError
from lptune.config import DataConfig
from lptune.data import Prepared, load_tokenizer, prepare
from lptune.data.errors import BadRows
from lptune.data.sources import Row, StructReader, read_rows
from tests.helpers.chat_templates import config
from tests.helpers.documents import Make, Write

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

BY_ARGUMENT = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v if v is string else v | tojson }}</{{ k }}>"
    "{% endfor %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
AS_TEXT = re.sub(r"{% for k, v.*?endfor %}", "{{ c.function.name + c.function.arguments }}", BY_ARGUMENT)
NAMES = ["city", "days", "exact", "where", "filters", "ids"]
NESTED = ("where", "filters")


def rows() -> list[dict[str, Any]]:
    """20 rows with calls of eight tools, whose arguments are up to three structs deep. The first one has all
    keys, so that Arrow keeps the order of keys of the others.
    """
    draw = random.Random(33)
    made: list[dict[str, Any]] = []

    def some(count: int) -> list[str]:
        return sorted(draw.sample(NAMES, count), key=NAMES.index) if made else NAMES

    def value(name: str, depth: int) -> Any:
        if name in NESTED:
            return {key: value(key, depth + 1) for key in some(2) if depth < 3 or key not in NESTED}
        return {"city": 'Rome, "ö"', "days": 3, "exact": True, "ids": [1, None, 3]}[name]

    def schema(name: str, depth: int) -> dict[str, Any]:
        if name not in NESTED or depth == 3:
            return {"type": "string", **draw.choice([{}, {"enum": ["a", None]}, {"default": "a"}])}
        inner = {each: schema(each, depth + 1) for each in some(2)}
        more: dict[str, Any] = draw.choice([{}, {"required": [*inner][:1]}, {"description": "where to look"}])
        return {"type": "object", "properties": inner, **more}

    for i in range(20):
        used = some(3)
        call = {"name": f"tool{i % 8}", "arguments": {name: value(name, 1) for name in used}}
        parameters = {"properties": {name: schema(name, 1) for name in used}}
        messages = [
            {"role": "user", "content": f"question {i}"},
            {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "content": "42", "name": "tool"},
            {"role": "assistant", "content": "done"},
        ]
        tool = {"type": "function", "function": {"name": f"tool{i % 8}", "parameters": parameters}}
        made.append({"messages": messages, "tools": [tool]})
    return made


def prepared(folder: Path, source: str) -> Prepared:
    cfg = DataConfig(source=source, seq_len=4096, packing=False, cache="none")
    return prepare(cfg, load_tokenizer(folder), seed=0, vocab_size=600)


@pytest.mark.parametrize("template", ["qwen3", "chatml", "by argument", "as text"])
def test_parquet_gives_the_text_of_json_lines(
    template: str, tokenizer_folder: Make, jsonl: Write, tmp_path: Path
) -> None:
    source = {"by argument": BY_ARGUMENT, "as text": AS_TEXT}.get(template)
    folder = tokenizer_folder(
        **({"chat_template": source, "eos_token": "<|im_end|>"} if source else config(template))
    )
    parquet.write_table(pyarrow.Table.from_pylist(rows()), tmp_path / "rows.parquet")
    lines, table = prepared(folder, jsonl(*rows())), prepared(folder, str(tmp_path / "rows.parquet"))
    assert table.train.digest == lines.train.digest
    note = "null fields within messages and tools: Arrow stores"
    assert [note in "".join(each.report) for each in (lines, table)] == [False, True]


def test_the_hub_gives_the_text_of_json_lines(
    tokenizer_folder: Make,
    jsonl: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list(rows())
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: table)
    folder, lines = tokenizer_folder(**config("qwen3")), jsonl(*rows())
    monkeypatch.chdir(tmp_path)
    assert prepared(folder, "owner/tools").train.digest == prepared(folder, lines).train.digest


def read(tmp_path: Path, table: Any) -> list[Row]:
    parquet.write_table(table, tmp_path / "rows.parquet")
    return list(read_rows(str(tmp_path / "rows.parquet"), BadRows("error")))


def test_only_fields_that_a_row_lacks_are_left_out_and_counted(tmp_path: Path) -> None:
    call = {"a": {"x": 1}, "list": [None, {"y": 2}], "none": {}}
    two: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "call": call}], "other": None},
        {"messages": [{"role": "user", "content": "q", "call": {"none": {"z": 1}}}], "other": 1},
    ]
    found = read(tmp_path, pyarrow.Table.from_pylist(two))
    assert [row.values for row in found] == two
    # "z" of row 1 and "a", "list" of row 2; keys of messages are null in many a file and mean nothing.
    assert [row.num_left_out for row in found] == [1, 2]


def test_values_in_a_schema_keep_their_nulls(tmp_path: Path) -> None:
    def of(**schema: Any) -> dict[str, Any]:
        return {"tools": [{"function": {"parameters": {"properties": {"enum": schema}}}}]}

    # A parameter that is called enum is a name, and no keyword.
    given = [
        of(enum=["a", None], default={"unit": None}, const=None, examples=[{"a": None}], type="string"),
        of(type="string", description="d"),
    ]
    kept = [row.values for row in read(tmp_path, pyarrow.Table.from_pylist(given))]
    assert kept[0] == given[0]
    # Nobody has another const: a row must have written it. The others are missing keys.
    assert kept[1] == of(type="string", description="d", const=None)


def test_maps_and_json_text_have_the_keys_of_each_row(tmp_path: Path) -> None:
    arguments = {"city": "Rome", "unit": None}
    as_map = pyarrow.map_(pyarrow.string(), pyarrow.string())
    stored = [pyarrow.array([[*arguments.items()], None], type=as_map)]
    if hasattr(pyarrow, "json_"):
        texts = pyarrow.array([json.dumps(arguments), None])
        stored.append(pyarrow.ExtensionArray.from_storage(pyarrow.json_(), texts))
    for column in stored:
        calls = pyarrow.StructArray.from_arrays([column], ["arguments"])
        found = read(tmp_path, pyarrow.table({"calls": pyarrow.ListArray.from_arrays([0, 2], calls)}))
        assert found == [Row(found[0].place, {"calls": [{"arguments": arguments}, {}]}, 0)]


@pytest.mark.skipif(not hasattr(pyarrow, "json_"), reason="needs pyarrow's JSON type")
def test_a_default_that_is_json_text_is_read_and_deep_text_is_one_line(tmp_path: Path) -> None:
    def table(*texts: str) -> Any:
        column = pyarrow.ExtensionArray.from_storage(pyarrow.json_(), pyarrow.array(texts))
        schema = pyarrow.StructArray.from_arrays([column], ["default"])
        return pyarrow.table({"tools": pyarrow.ListArray.from_arrays([0, *range(1, len(texts) + 1)], schema)})

    found = read(tmp_path, table("5", '{"unit": null}'))
    assert [row.values for row in found] == [
        {"tools": [{"default": 5}]},
        {"tools": [{"default": {"unit": None}}]},
    ]
    with pytest.raises(UserError, match="nested too deep"):
        read(tmp_path, table("[" * 100_000))


def test_what_datasets_has_made_of_a_struct_is_left_alone() -> None:
    """An image is one: bytes and a path in Arrow, and an object in the row."""
    schema = pyarrow.schema({"image": pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})})
    image = object()
    assert StructReader(schema, is_decoded=True).read({"image": image}) == ({"image": image}, 0)


def test_floats_of_32_and_16_bits_are_the_numbers_that_were_rounded(tmp_path: Path) -> None:
    bits32, bits16 = [3.14, 1e-10, float("-inf"), None], [[0.1, None], [65504.0], [], None]
    columns = {
        "price": pyarrow.array(bits32, pyarrow.float32()),
        "call": pyarrow.array([{"sizes": each} for each in bits16], pyarrow.struct({
            "sizes": pyarrow.list_(pyarrow.float16())
        })),
    }  # fmt: skip
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table(columns), path)
    found = [row.values for row in read_rows(str(path), BadRows("error"))]
    assert [row["price"] for row in found] == bits32
    assert [(row["call"] or {}).get("sizes") for row in found] == bits16
