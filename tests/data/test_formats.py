"""Columns decide the format; what is ambiguous is asked, not guessed."""

import json
from pathlib import Path
from typing import Any

import pytest

from lptune.config import DataConfig
from lptune.data.detect import detect_format
from lptune.data.errors import BadRows, RowError
from lptune.data.formats import Format, Pair, Text
from lptune.data.messages import inline_calls, read_messages, read_tools
from lptune.data.sources import Row, read_rows


def detect(*rows: dict[str, Any], **keys: Any) -> Format:
    return detect_format(
        DataConfig(source="r.jsonl", **keys),
        [Row(f"r.jsonl line {i}", row) for i, row in enumerate(rows, 1)],
        "r.jsonl",
    )


SAY = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {"instruction": "i", "input": "", "output": "o"},
            "pairs (prompt: instruction, input: input, response: output)",
        ),
        (
            {"instruction": "i", "input": "", "output": "o", "text": "all"},
            "pairs (prompt: instruction, input: input, response: output)",
        ),
        (
            {"instruction": "i", "context": "c", "response": "r", "category": "x"},
            "pairs (prompt: instruction, input: context, response: response)",
        ),
        ({"Question": "q", "Answer": "a"}, "pairs (prompt: Question, response: Answer)"),
        ({"prompt": "p", "completion": "c"}, "pairs (prompt: prompt, response: completion)"),
        ({"prompt": "p", "response": "c"}, "pairs (prompt: prompt, response: response)"),
        ({"query": "p", "response": "c", "type": "x"}, "pairs (prompt: query, response: response)"),
        ({"input": "p", "output": "c"}, "pairs (prompt: input, response: output)"),
        ({"problem": "p", "solution": "c"}, "pairs (prompt: problem, response: solution)"),
        ({"messages": SAY}, "chat (messages: messages)"),
        ({"messages": SAY, "tools": None}, "chat (messages: messages, tools: tools)"),
        (
            {"conversations": [{"from": "human", "value": "x"}], "tools": ""},
            "chat (messages: conversations, tools: tools)",
        ),
        ({"prompt": "p", "prompt_id": "1", "messages": SAY}, "chat (messages: messages)"),
        ({"prompt": SAY[:1], "completion": SAY[1:]}, "chat (response: completion, messages: prompt)"),
        ({"text": "t"}, "text (text: text)"),
        ({"content": "t", "url": "u"}, "text (text: content)"),
    ],
)
def test_formats_are_detected_from_the_columns(row: dict[str, Any], expected: str) -> None:
    assert detect(row).describe() == expected


def test_overrides_choose_among_columns() -> None:
    row = {"prompt": "p", "question": "q", "chosen": "c", "rejected": "r", "notes": "n"}
    fmt = detect(row, prompt_column="question", response_column="chosen", input_column="notes")
    assert fmt.document(Row("x", row)) == Pair("q", "n", "c", None)
    assert detect(row, text_column="notes").document(Row("x", row)) == Text("n")
    row = {"question": "q", "context": "c", "answer": "a"}
    assert detect(row).input == "context"
    assert detect(row, input_column="none").document(Row("x", row)) == Pair("q", "", "a", None)


def test_a_null_first_row_does_not_hide_the_format() -> None:
    assert detect({"messages": None}, {"messages": SAY}).kind == "chat"


def test_a_prompt_template_is_filled_once() -> None:
    row = {"question": "What is {answer} and {{x}}?", "level": 3, "answer": "a"}
    fmt = detect(row, prompt_template="{{Q}} ({level}): {question}\nA: ")
    assert fmt.document(Row("x", row)) == Pair(
        "{Q} (3): What is {answer} and {{x}}?\nA: ", "", "a", "{Q} (3): What is {answer} and {{x}}?\nA: "
    )


@pytest.mark.parametrize(
    "text", ["true", "false", "3", "-0.0", "1.10", "1e400", "12345678901234567890.123456789", "2.50E+1"]
)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_number_in_a_pair_is_written_as_the_row_writes_it(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    row = f'{{"question": {text}, "answer": {text}, "system": {text}}}'
    path.write_text(row if name == "rows.jsonl" else f"[{row}]")
    (found,) = read_rows(str(path), BadRows("error"))
    assert detect(found.values).document(found) == Pair(text, "", text, None, text)
    fmt = detect(found.values, prompt_template="{question}?")
    assert fmt.document(found) == Pair(f"{text}?", "", text, f"{text}?", text)


def called(name: str, **more: Any) -> dict[str, Any]:
    """A call in the common form."""
    function = {"name": name, "arguments": {"x": 1}}
    calls = [{**more, "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def test_both_dialects_become_the_common_form() -> None:
    call = '{"name": "f", "arguments": {"x": 1}}'
    said = [
        ("system", "s"), ("human", "q"), ("function_call", call), ("observation", "{}"), ("gpt", "a"),
    ]  # fmt: skip
    sharegpt = [{"from": role, "value": value} for role, value in said]
    assert read_messages(sharegpt, "conversations") == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        called("f"),
        {"role": "tool", "content": "{}"},
        {"role": "assistant", "content": "a"},
    ]
    function = {"name": "f", "arguments": '{"x": 1}'}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    openai = [
        {"role": "user", "content": parts, "name": None},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
        {"role": "assistant", "content": "", "function_call": function},
    ]
    messages = read_messages(openai, "messages")
    assert messages == [
        {"role": "user", "content": "ab"},
        called("f", id="1"),
        {"role": "tool", "content": "r", "tool_call_id": "1"},
        called("f"),
    ]
    assert inline_calls(messages)[1] == {"role": "assistant", "content": call}


def call(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    return [SAY[0], {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}]


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        (None, {}), ("", {}), (" \n", {}), (float("nan"), {}), ("{}", {}), ({}, {}),
        ({"x": None}, {"x": None}), (' {"x": [null, 1.50]} ', {"x": [None, 1.5]}),
    ],
)  # fmt: skip
def test_missing_arguments_of_a_call_are_none(arguments: Any, read: dict[str, Any]) -> None:
    for key in ("arguments", "parameters"):
        answer = {"role": "assistant", "function_call": {"name": "f", key: arguments}}
        function = read_messages([SAY[0], answer], "messages")[1]["tool_calls"][0]["function"]
        assert function == {"name": "f", "arguments": read}
    nothing = [SAY[0], {"role": "assistant", "function_call": {"name": "f"}}]
    assert read_messages(nothing, "messages")[1]["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    "arguments",
    [
        "x", "[1]", "null", '"{}"', '{"x": 1', "{'x': 1}", "[" * 99999, [], ["x"], 3, True, '{"x": NaN}',
        {"x": float("inf")}, '{"x": 1e400}', {"x": b"bytes"},
    ],
    ids=lambda arguments: f"{arguments!r:.12}",
)  # fmt: skip
def test_arguments_that_are_no_object_are_a_bad_row(arguments: Any) -> None:
    with pytest.raises(
        RowError, match="message 2 of 'm' has a function call whose arguments are no JSON obj"
    ):
        read_messages(call(arguments), "m")


@pytest.mark.parametrize(
    "flag",
    [
        {"weight": 0}, {"loss_weight": 0.0}, {"train": False}, {"trainable": False}, {"loss": False},
        {"masked": True}, {"mask": 1}, {"weight": 0, "train": False, "masked": True},
        {"train_on_turn": False}, {"training": 0},
    ],
)  # fmt: skip
def test_every_way_to_say_that_an_answer_is_not_learned_is_weight_0(flag: dict[str, Any]) -> None:
    unlearned = read_messages([SAY[0], SAY[1] | flag], "messages")
    assert unlearned == [SAY[0], SAY[1] | {"weight": 0}]
    opposite = {key: not value for key, value in flag.items()}
    assert read_messages([SAY[0], SAY[1] | opposite], "messages") == SAY
    call = {"from": "function_call", "value": '{"name": "f"}', **flag}
    assert read_messages([call], "conversations")[0]["weight"] == 0
    assert read_messages([SAY[0] | flag, SAY[1]], "messages") == SAY  # a prompt is not learned anyway
    assert read_messages([SAY[0], SAY[1] | {"is_trained": True, "mask_id": None}], "messages")[1][
        "is_trained"
    ]


@pytest.mark.parametrize(
    "part",
    [{"type": "text", "text": "a"}, {"type": "text", "value": "a"}, {"type": "text", "content": "a"}, "a"],
)
def test_content_parts_are_text_under_any_of_their_keys(part: Any) -> None:
    assert read_messages([SAY[0], {"role": "assistant", "content": [part]}], "messages") == SAY


THOUGHT, SAID = "I think.", {"type": "text", "text": "a"}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "reasoning", "text": THOUGHT},
        {"type": "reasoning", "reasoning": THOUGHT, "signature": "x"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": THOUGHT}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": THOUGHT}]},
        {"type": "thinking", "thinking": THOUGHT},
        {"type": "thinking", "thinking": [{"type": "text", "text": THOUGHT}]},
    ],
)
def test_reasoning_parts_before_the_text_are_the_reasoning_of_the_message(part: dict[str, Any]) -> None:
    said = SAY[1] | {"reasoning_content": THOUGHT}
    assert read_messages([SAY[0], SAY[1] | {"content": [part, SAID]}], "messages") == [SAY[0], said]
    halves = [part, part, SAID]
    assert read_messages([SAY[1] | {"content": halves}], "messages")[0]["reasoning_content"] == 2 * THOUGHT
    for content, more in (([SAID, part], {}), ([part, SAID], {"thinking": "other"})):
        with pytest.raises(
            RowError, match=r"not text .(reasoning|thinking)|reasoning as a part .*and as a key"
        ):
            read_messages([SAY[1] | {"content": content} | more], "messages")
    with pytest.raises(RowError, match="content parts that are not text"):
        read_messages([SAY[0] | {"content": [part, SAID]}], "messages")


def test_tools_are_read_from_lists_and_json_text_and_wrapped() -> None:
    wrapped = [{"type": "function", "function": {"name": "f"}}]
    assert read_tools([{"name": "f"}], "tools") == wrapped
    assert read_tools(json.dumps([{"name": "f"}]), "tools") == wrapped
    assert read_tools(wrapped, "tools") == wrapped
    assert [read_tools(value, "tools") for value in (None, "", "[]", [])] == [None] * 4
    for bad in ("{", "[3]", 7):
        with pytest.raises(RowError, match="column 'tools'"):
            read_tools(bad, "tools")


ASSET_FORMATS = {
    "gsm8k_train.jsonl": "pairs (prompt: question, response: answer)",
    "alpaca_en_demo.json": "pairs (prompt: instruction, input: input, response: output)",
    "rasbt_instruction.json": "pairs (prompt: instruction, input: input, response: output)",
    "identity.json": "pairs (prompt: instruction, input: input, response: output)",
    "openai_messages.jsonl": "chat (messages: messages)",
    "glaive_toolcall_en_demo.json": "chat (messages: conversations, tools: tools)",
    "c4_demo.jsonl": "text (text: text)",
    "wiki_demo.txt": "text (text: text)",
    "tinyshakespeare.txt": "text (text: text)",
    "multilingual.txt": "text (text: text)",
}


@pytest.mark.parametrize("name", ASSET_FORMATS)
def test_real_files_are_recognised_and_every_row_is_usable(assets: Path, name: str) -> None:
    source = str(assets / "data" / name)
    rows = list(read_rows(source, BadRows("error")))
    fmt = detect_format(DataConfig(source=source), rows[:32], source)
    assert fmt.describe() == ASSET_FORMATS[name]
    for row in rows:
        fmt.document(row)
