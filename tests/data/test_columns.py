"""Columns and keys beside the document are honoured, refused, or named in the report."""

from collections.abc import Callable
from typing import Any

import pytest

from lptune.base.errors import UserError
from lptune.config import DataConfig
from lptune.data import Prepared, Tokenizer, prepare
from lptune.data.detect import detect_format
from lptune.data.errors import RowError
from lptune.data.formats import Conversation, Document, Pair
from lptune.data.report import _MAX_NAMED, Tally, count_unused
from lptune.data.sources import Row
from tests.helpers.documents import Write, texts

SAY = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
CHAT = {"messages": SAY}
PAIR = {"question": "q", "answer": "a"}
LATE = 40
"""Rows before the one of interest: more than the format is read off."""


def document(row: dict[str, Any], *first: dict[str, Any], **keys: Any) -> Document:
    rows = [Row("r", each) for each in first or [row]]
    return detect_format(DataConfig(source="r", **keys), rows, "r").document(Row("r", row))


def messages(row: dict[str, Any], *first: dict[str, Any], **keys: Any) -> list[dict[str, Any]]:
    found = document(row, *first, **keys)
    assert isinstance(found, Conversation)
    return found.messages


@pytest.fixture
def run(jsonl: Write, chat: Tokenizer) -> Callable[..., Prepared]:
    def run(*rows: dict[str, Any], **keys: Any) -> Prepared:
        cfg = DataConfig(source=jsonl(*rows), **{"seq_len": 256, **keys})
        given = cfg.chat_template
        with_template = chat if given is None else chat.with_chat_template(given)
        return prepare(cfg, with_template, seed=0, vocab_size=600)

    return run


def notes(prepared: Prepared) -> list[str]:
    return [line for line in prepared.report if "not used" in line or "are learned" in line]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"label": False}, "column 'label' is false, which marks a bad answer"),
        ({"label": "False"}, "column 'label' is false"),  # CSV
        ({"kto_tag": False}, "column 'kto_tag' is false"),
        ({"images": ["a.png"]}, "column 'images' holds images, and only text can be trained on"),
        ({"Image": {"bytes": "x"}}, "column 'Image' holds image"),
        ({"audio": "a.wav"}, "column 'audio' holds audio"),
        ({"loss_weight": 0}, "column 'loss_weight' says that the row is not learned .0."),
        ({"train": False}, "column 'train' says that the row is not learned .False."),
        ({"masked": True}, "column 'masked' says that the row is not learned .True."),
    ],
)
def test_a_row_that_is_not_to_be_learned_is_refused(said: dict[str, Any], message: str) -> None:
    for row in (CHAT, PAIR):
        with pytest.raises(RowError, match=message):
            document(row | said)
        with pytest.raises(RowError, match=message):
            document(row | said, row)  # the first rows lack the column
    prompt, response = {"prompt_column": "question"}, {"response_column": next(iter(said))}
    if all(isinstance(value, str) for value in said.values()):  # what the user names is content
        assert isinstance(document(PAIR | said, **prompt, **response), Pair)


@pytest.mark.parametrize(
    "said",
    [
        {"label": True}, {"label": 0}, {"label": None}, {"images": []}, {"image": None},
        {"loss_weight": 1}, {"train": True}, {"masked": False}, {"train": "IC 204"},
        {"loss_weight": float("nan")},
    ],
)  # fmt: skip
def test_a_row_that_may_be_learned_is(said: dict[str, Any]) -> None:
    assert messages(CHAT | said) == SAY
    assert document(PAIR | said) == Pair("q", "", "a", None)


def test_raw_text_may_have_a_label_and_an_image_beside_it() -> None:
    assert document({"text": "t", "label": False, "image": "http://x"}).__class__.__name__ == "Text"


@pytest.mark.parametrize("name", ["system", "System_Prompt", "system_message"])
def test_a_system_column_is_the_system_message(name: str) -> None:
    row = CHAT | {name: "Be brief."}
    system = {"role": "system", "content": "Be brief."}
    assert messages(row) == [system, *SAY]
    assert messages(row, CHAT) == [system, *SAY]
    assert messages(row, system_column="none") == SAY
    assert messages(CHAT | {name: " "}) == messages(CHAT | {name: None}) == SAY
    assert messages({name: "Be brief.", "messages": [system, *SAY]}) == [system, *SAY]
    with pytest.raises(RowError, match="two system messages; keep one"):
        document({name: "Be long.", "messages": [system, *SAY]})
    assert document(PAIR | {name: "Be brief."}) == Pair("q", "", "a", None, "Be brief.")
    own = CHAT | {"persona": "Be brief."}
    assert messages(own, system_column="persona") == [system, *SAY]


def test_two_system_columns_are_asked_for() -> None:
    row = CHAT | {"system": "a", "system_prompt": "b"}
    with pytest.raises(UserError, match=r"columns system, system_prompt .* set data.system_column"):
        document(row)
    assert messages(row, system_column="system")[0]["content"] == "a"


def test_history_is_earlier_turns_of_a_pair() -> None:
    row = PAIR | {"history": [["q0", "a0"]]}
    turns = ({"role": "user", "content": "q0"}, {"role": "assistant", "content": "a0"})
    assert document(row) == document(row, PAIR) == Pair("q", "", "a", None, "", turns)
    assert document(PAIR | {"history": []}) == Pair("q", "", "a", None)
    for bad in ("text", [["q0"]], ["q0", "a0"], [["q0", None]]):
        with pytest.raises(RowError, match="column 'history' must hold a list of"):
            document(PAIR | {"history": bad})
    with pytest.raises(RowError, match="column 'history' holds an empty response"):
        document(PAIR | {"history": [["q0", ""]]})
    with pytest.raises(RowError, match="column 'history' holds turns beside those in 'messages'"):
        document(CHAT | {"history": [["q0", "a0"]]})


def test_a_template_writes_system_and_history_and_the_plain_layout_refuses_them(
    run: Callable, chat: Tokenizer
) -> None:
    row = PAIR | {"system": "Be brief.", "history": [["q0", "a0"]]}
    ((text, learned),) = texts(run(row).train, chat)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nq0<|im_end|>\n<|im_start|>assistant\n"
        "a0<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
    )
    assert learned == "a0<|im_end|>a<|im_end|>"
    for key, what in (("system", "a system message"), ("history", "earlier turns")):
        with pytest.raises(UserError, match=f"line 1: has {what}, which only a chat template writes"):
            run(PAIR | {key: row[key]}, chat_template="none")
    filled = run(PAIR | {"system": "s"}, chat_template="none", prompt_template="{system} {question} ")
    assert not notes(filled)


@pytest.mark.parametrize(
    ("row", "late"),
    [
        (PAIR, {"input": "i"}),
        (PAIR, {"Context": "i"}),
        (CHAT, {"tools": [{"name": "f"}]}),
        (CHAT, {"system": "s"}),
    ],
)
def test_a_column_that_comes_up_late_is_read_all_the_same(
    run: Callable, row: dict[str, Any], late: dict[str, Any]
) -> None:
    assert document(row | late, row) == document(row | late)
    prepared = run(*[row] * LATE, row | late)
    assert not notes(prepared)
    early = run(row | late, *[row] * LATE)
    assert early.train.num_tokens == prepared.train.num_tokens
    assert document(PAIR | {"input": "i"}, PAIR, input_column="none") == Pair("q", "", "a", None)


@pytest.mark.parametrize(
    ("base", "one", "other"),
    [
        (CHAT, {"tools": [{"name": "f"}]}, {"functions": [{"name": "g"}]}),
        (CHAT, {"system": "s"}, {"system_prompt": "t"}),
        (PAIR, {"input": "i"}, {"context": "c"}),
    ],
)
def test_rows_that_name_a_part_differently_keep_it(
    run: Callable, base: dict[str, Any], one: dict[str, Any], other: dict[str, Any]
) -> None:
    rows = [base | one, base | other]
    first = base if base is PAIR else rows[0]  # the second part of a prompt is one column, or comes up late
    for row, empty in zip(rows, ([], ""), strict=True):
        assert document(row, first) == document(row)
        assert document(row | dict.fromkeys([*one, *other], empty) | row, first) == document(row)
    with pytest.raises(RowError, match=f"columns {next(iter(one))}, {next(iter(other))} could each be the"):
        document(rows[0] | other, first)
    assert not notes(run(first, *[base] * LATE, rows[1]))
    if "tools" in one:
        assert [document(row, *rows) for row in rows] == [document(row) for row in rows]


def test_unused_columns_and_message_keys_are_named_over_all_rows(run: Callable) -> None:
    marked = {"messages": [SAY[0] | {"train": True}, SAY[1] | {"mood": "calm", "train": True}], "id": 7}
    prepared = run(*[CHAT | {"notes": None}] * LATE, marked, marked)
    assert notes(prepared) == [
        "note: columns that are not used, with their rows: id (2)",
        "note: message keys that are not used, with their messages: mood (2)",
        "note: 2 messages of system, user or tool say that they are learned; only the assistant's are",
    ]
    rows = [PAIR | {"category": "x"}] * 3
    note = "note: columns that are not used, with their rows: category (3)"
    assert notes(run(*rows)) == [f"{note}; data.input_column=NAME puts one into the prompt"]
    assert notes(run(*rows, input_column="none")) == [note]
    assert notes(run(*[row | {"input": "i"} for row in rows])) == [note]
    assert not notes(run(PAIR))
    parts = {"content": [{"type": "text", "text": "q", "cache_control": {}}]}
    assert "content[].cache_control (1)" in notes(run({"messages": [SAY[0] | parts, SAY[1]]}))[0]


def test_a_message_key_that_the_template_names_is_used() -> None:
    row = Row("r", {"messages": [SAY[0] | {"name": "Ann"}, SAY[1] | {"reasoning": "hm"}]})
    for template, unused in (
        ("{{ m.role }} {{ m['name'] }} {{ m.reasoning_content }}", []),
        ("{{ m.role }} {{ names }} {{ m.thinking }}", ["name (1)"]),
        ("{{ m.content }}", ["name (1), reasoning (1)"]),
    ):
        tally = Tally()
        count_unused([row], lambda name: True, ["messages"], template, tally)
        assert [note.partition(": ")[2] for note in tally.notes_on_unused()] == unused


def test_names_that_are_data_neither_fill_the_memory_nor_the_report() -> None:
    tally = Tally()
    rows = (Row("r", {f"id-{i}": 1, "always": 1}) for i in range(3000))
    count_unused(rows, lambda name: False, [], "", tally)
    (note,) = tally.notes_on_unused()
    assert tally.counts["num_rows"] == 3000
    assert note.startswith("columns that are not used, with their rows: always (3,000), id-0 (1)")
    assert note.endswith(f"and {1000 - _MAX_NAMED:,} or more others")


def test_an_answer_of_weight_0_and_loss_on_every_token_exclude_each_other(run: Callable) -> None:
    row = {"messages": [*SAY, SAY[0], SAY[1] | {"masked": True}]}
    assert run(row).train.num_target_tokens == 2
    with pytest.raises(UserError, match=r"line 1: has an answer that is not learned .*train_on_prompt=true"):
        run(row, train_on_prompt=True)
