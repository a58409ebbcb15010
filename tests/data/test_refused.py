"""Rows and keys that cannot be used: one line that names the key, column or message, and says what to do.

The wording is free; a case lists what must be in the line. What is wrong with files: test_sources.py. What a
run does with all this: tests/cli/test_wrong_inputs.py.
"""

from typing import Any

import pytest

from lptune.base.errors import UserError
from lptune.config import DataConfig
from lptune.data import Tokenizer, prepare
from lptune.data.detect import detect_format
from lptune.data.errors import RowError
from lptune.data.formats import Format
from lptune.data.sources import Row
from tests.helpers.documents import Write

USER = {"role": "user", "content": "What is the capital of France?"}
GOOD = {"role": "assistant", "content": "The capital of France is Paris."}
BAD = {"role": "assistant", "content": "Two plus two is four."}
SAY = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
QA = {"question": "x", "answer": "y"}
TWO = {"prompt": "What is two?", "chosen": "Two plus two.", "rejected": "Paris, thank you."}
RATED = {"prompt": "What is two?", "completion": "Two plus two.", "label": True}


def check(error: Exception, said: str) -> None:
    """said: words that the line must have, with | between them."""
    line = str(error)
    assert "\n" not in line
    assert [words for words in said.split("|") if words not in line] == [], line


@pytest.mark.parametrize(
    ("row", "keys", "said"),
    [
        ({"a": "x", "b": "y"}, {}, "set data.prompt_column|columns: a, b"),
        ({"prompt": "x", "b": "y"}, {}, "response|set data.response_column|columns: prompt, b"),
        ({"a": "x", "answer": "y"}, {}, "prompt|set data.prompt_column|columns: a, answer"),
        ({"prompt": "x", "question": "z", "answer": "y"}, {}, "prompt, question|set data.prompt_column"),
        ({"prompt": "x", "response": "z", "answer": "y"}, {}, "response, answer|set data.response_column"),
        (QA | {"input": "i", "context": "c"}, {}, "input, context|set data.input_column"),
        (QA, {"prompt_column": "qestion"}, "data.prompt_column|r.jsonl|'qestion'|did you mean 'question'"),
        (QA, {"response_column": "anwser"}, "data.response_column|'anwser'|did you mean 'answer'"),
        (QA, {"text_column": "zzz"}, "data.text_column|r.jsonl|'zzz'|columns: question, answer"),
        (QA, {"format": "chat"}, "question, answer|set data.messages_column"),
        (QA, {"format": "text"}, "question, answer|set data.text_column"),
        ({"text": "x"}, {"format": "pairs"}, "response|text|set data.response_column"),
        (TWO, {}, "preferences|set data.response_column=chosen"),
        ({"instruction": "i", "instances": [{"input": "a", "output": "b"}]}, {}, "'instances'|input, output"),
        ({"text": "p"}, {"prompt_template": "{text}"}, "response"),
        (QA, {"prompt_template": "Q: {qestion}"}, "data.prompt_template|'qestion'|did you mean 'question'"),
        (QA, {"prompt_template": "Q: {question"}, "data.prompt_template|'}'"),
        (QA, {"prompt_template": "Q: {}"}, "data.prompt_template|placeholders"),
        (QA, {"prompt_template": "{question!r}"}, "data.prompt_template|placeholders"),
        (QA, {"prompt_template": "{question} {answer}"}, "data.prompt_template|{answer}"),
        ({"messages": SAY}, {"prompt_template": "{messages}"}, "data.prompt_template|pairs|r.jsonl|chat"),
    ],
)
def test_columns_that_leave_the_format_open(row: dict[str, Any], keys: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as raised:
        detect_format(DataConfig(source="r.jsonl", **keys), [Row("r.jsonl line 1", row)], "r.jsonl")
    check(raised.value, said)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question": "q"}, "'answer'|columns: question"),
        ({"question": "q", "anwser": "a"}, "'answer'|did you mean 'anwser'"),
        ({"question": "q", "answer": None}, "'answer'|null"),
        ({"question": "q", "answer": float("nan")}, "'answer'|null"),
        ({"question": " ", "answer": "a"}, "'question'|empty"),
        ({"question": "q", "answer": ["a"]}, "'answer'|list"),
        ({"question": {"text": "q"}, "answer": "a"}, "'question'|dict"),
        ({"question": SAY, "answer": "a"}, "'question'|set data.messages_column=question"),
    ],
)
def test_a_pair(row: dict[str, Any], said: str) -> None:
    with pytest.raises(RowError) as raised:
        Format(kind="pairs", prompt="question", response="answer").document(Row("x", row))
    check(raised.value, said)


NOT_LEARNED_IN_PART = (
    {"is_trained": False},
    {"train_message": 0},
    {"is_masked": True},
    {"loss_factor": 0.0},
    {"train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]},
)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("hi", "'messages'|list|'hi'"),
        (None, "list|None"),
        ([], "no messages"),
        (["hi"], "message 1 of 'messages'|role|content|'hi'"),
        ([{"content": "x"}], "message 1 of 'messages'|'role'|keys: content"),
        ([SAY[0], {"role": "assistant"}], "message 2 of 'messages'|'content'|keys: role"),
        ([{"role": "assistant", "content": None}], "message 1 of 'messages'|'content'|null"),
        ([{"role": "assitant", "content": "x"}], "role 'assitant'|did you mean 'assistant'"),
        ([{"role": 3, "content": "x"}], "role 3"),
        ([{"role": "user", "content": 3}], "'content'|found 3"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "image_url|text"),
        ([{"from": "function_call", "value": "f(x)"}], "message 1 of 'messages'|JSON|'f"),
        ([{"from": "function_call", "value": "[]"}], "function call"),
        ([{"from": "function_call", "value": '{"arguments": {}}'}], "function call|name"),
        (SAY[:1], "'messages'|no assistant message"),
        ([SAY[0], SAY[1] | {"weight": 0.5}], "message 2 of 'messages'|weight 0.5|only 0"),
        ([SAY[0], SAY[1] | {"loss_weight": "no"}], "message 2 of 'messages'|loss_weight 'no'|only 0"),
        *(([SAY[0], SAY[1] | flag], f"{next(iter(flag))}|remove the key") for flag in NOT_LEARNED_IN_PART),
        ([SAY[0], SAY[1] | {"masked": 3}], "masked: 3|true|false"),
        ([SAY[0], SAY[1] | {"weight": 1, "masked": True}], "weight and masked"),
        ([SAY[0], SAY[1] | {"content": " "}], "message 2 of 'messages'|empty"),
        ([SAY[0], SAY[1] | {"content": []}], "message 2 of 'messages'|empty"),
        ([SAY[0] | {"content": [{"type": "image", "text": "x"}]}, SAY[1]], "image|text"),
        ([SAY[0] | {"content": [{"text": "x", "value": "y"}]}, SAY[1]], "content parts|text"),
        ([SAY[0] | {"content": float("nan")}, SAY[1]], "'content'|nan"),
    ],
)
def test_a_conversation(value: Any, said: str) -> None:
    with pytest.raises(RowError) as raised:
        Format(kind="chat", messages="messages").document(Row("x", {"messages": value}))
    check(raised.value, said)


ALONE: dict[str, bool] = {}
COMPARED = {"preferences": True}
LABELLED = {"labelled": True}


@pytest.mark.parametrize(
    ("recipe", "row", "keys", "said"),
    [
        (COMPARED, {"prompt": "a", "response": "b"}, {}, "preferences|full_finetune|columns: prompt, resp"),
        (COMPARED, {"prompt": "a", "chosen": "b"}, {}, "rejected|set data.rejected_column"),
        (COMPARED, TWO, {"response_column": "chosen"}, "data.response_column|full_dpo"),
        (COMPARED, TWO, {"format": "text"}, "data.format|full_dpo|pairs or chat"),
        (COMPARED, TWO, {"chosen_column": "chosn"}, "data.chosen_column|'chosn'|did you mean 'chosen'"),
        (COMPARED, TWO | {"rejected": ""}, {}, "'rejected'|empty|remove the row"),
        (COMPARED, {"chosen": [USER, GOOD], "rejected": [SAY[0], BAD]}, {}, "message 1|differ"),
        *(
            (COMPARED, dict(zip(("chosen", "rejected"), answers, strict=True)), {}, "message 3|same prompt")
            for more in ([BAD], SAY, [SAY[0]])
            for short, long in [([USER, GOOD], [USER, GOOD, *more])]
            for answers in ((short, long), (long, short))
        ),
        (COMPARED, TWO | {"messages": SAY, "prompt": None}, {}, "'messages'|answer|'chosen'"),
        (COMPARED, TWO | {"rejected": TWO["chosen"]}, {}, "1 preferences|equal"),
        (ALONE, TWO, {}, "one response|full_dpo|full_kto"),
        (ALONE, TWO, {"chosen_column": "chosen"}, "data.chosen_column|preferences|full_dpo"),
        (ALONE, RATED, {"label_column": "label"}, "data.label_column|label|full_kto"),
        (LABELLED, {"prompt": "a", "completion": "b"}, {}, "labels|set data.label_column|full_finetune"),
        (LABELLED, RATED | TWO, {}, "label|preferences|Set data.label_column"),
        (LABELLED, RATED | {"kto_tag": True}, {}, "label, kto_tag|set data.label_column"),
        (LABELLED, RATED, {"label_column": "lable"}, "data.label_column|'lable'|did you mean 'label'"),
        (LABELLED, {"text": "a", "label": True}, {}, "text|full_kto|prompt"),
        (LABELLED, {"messages": [*SAY, USER], "label": True}, {}, "user|add the answer"),
        (LABELLED, RATED | {"completion": "Paris " * 300}, {}, "1 answers|data.seq_len=256"),
    ],
)
def test_a_row_of_another_recipe(
    recipe: dict[str, bool],
    row: dict[str, Any],
    keys: dict[str, Any],
    said: str,
    jsonl: Write,
    chat: Tokenizer,
) -> None:
    cfg = DataConfig(source=jsonl(row), **{"seq_len": 256, "cache": "none", **keys})
    with pytest.raises(UserError) as raised:
        prepare(cfg, chat, seed=0, vocab_size=600, **recipe)
    check(raised.value, said)
