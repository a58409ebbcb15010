"""Answers with a label: which rows are read, which answers count, what a label may be, what is dropped."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from lptune.base.errors import UserError
from lptune.config import DataConfig, SourceConfig
from lptune.data import Prepared, Rows, Tokenizer, cache_key, prepare

USER = {"role": "user", "content": "What is the capital of France?"}
HELLO = [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Hello."}]
GOOD = {"role": "assistant", "content": "The capital of France is Paris."}
BAD = {"role": "assistant", "content": "Two plus two is four."}
ROW = {"prompt": "What is two?", "completion": "Two plus two.", "label": True}
PREFERENCE = {"prompt": "What is two?", "chosen": "Two plus two.", "rejected": "Paris, thank you."}


def run(source: Any, tokenizer: Tokenizer, *, labelled: bool = True, **keys: Any) -> Prepared:
    cfg = DataConfig(source=source, **{"seq_len": 256, "cache": "none", **keys})
    return prepare(cfg, tokenizer, seed=0, vocab_size=600, labelled=labelled)


def learned(rows: Rows, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """Of each document: what is learned of it, special tokens shown, and its label."""
    found = []
    for i in range(rows.num_documents):
        start, stop = rows.documents.place(i)
        tokens = rows.documents.tokens_T[start:stop][rows.documents.is_target_T[start:stop]]
        text = tokenizer.backend.decode(tokens.tolist(), skip_special_tokens=False)
        found.append((text, bool(rows.documents.is_desirable_N[i])))
    return found


@pytest.mark.parametrize(
    ("row", "described"),
    [
        (ROW, "pairs (prompt: prompt, response: completion, label: label)"),
        (
            {"instruction": "What is", "input": "two?", "output": "Two.", "kto_tag": True},
            "pairs (prompt: instruction, input: input, response: output, label: kto_tag)",
        ),
        (
            {"prompt": [USER], "completion": [GOOD], "label": True},
            "chat (response: completion, label: label, messages: prompt)",
        ),
        ({"messages": [USER, GOOD], "label": True}, "chat (label: label, messages: messages)"),
        (
            {
                "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
                "label": True,
            },
            "chat (label: label, messages: conversations)",
        ),
    ],
)
def test_shapes_are_detected_from_the_columns(
    row: dict[str, Any], described: str, jsonl: Callable[..., str], chat: Tokenizer
) -> None:
    prepared = run(jsonl(row, row | {"label" if "label" in row else "kto_tag": False}), chat)
    report = "\n".join(prepared.report)
    assert f"2 rows as {described}, chat template" in report
    assert "not used" not in report
    assert "training: 1 desirable and 1 undesirable answers, 2 documents" in report


@pytest.mark.parametrize(
    ("value", "label"),
    [
        (True, True),
        (False, False),
        (1, True),
        (0, False),
        (1.0, True),
        ("true", True),
        ("False ", False),
        ("0", False),
    ],
)
def test_labels_are_true_or_false_also_as_numbers_and_as_text(
    value: Any, label: bool, jsonl: Callable[..., str], tokenizer: Tokenizer
) -> None:
    rows = run(jsonl(ROW | {"label": value}), tokenizer).train
    assert learned(rows, tokenizer) == [("Two plus two.<|endoftext|>", label)]


@pytest.mark.parametrize("value", [None, "", "yes", 2, -1, 0.5, [True], "desirable"])
def test_any_other_label_is_one_line_or_skipped_and_counted(
    value: Any, jsonl: Callable[..., str], tokenizer: Tokenizer
) -> None:
    source = jsonl(ROW, ROW | {"label": value})
    with pytest.raises(UserError, match=r"line 2: column 'label' must be true .* or false, found ") as error:
        run(source, tokenizer)
    assert "\n" not in str(error.value)
    prepared = run(source, tokenizer, on_bad_row="skip")
    assert prepared.train.num_documents == 1
    assert "skipped 1 bad rows" in "\n".join(prepared.report)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [*HELLO, USER], "completion": [GOOD], "label": True},
        {"prompt": [*HELLO, USER], "completion": GOOD["content"], "label": True},
        {"messages": [*HELLO, USER, GOOD], "label": True},
    ],
    ids=["prompt of messages", "answer as text", "whole conversation"],
)
def test_conversations_are_those_of_transformers_and_only_the_last_answer_is_learned(
    row: dict[str, Any], jsonl: Callable[..., str], chat: Tokenizer
) -> None:
    rows = run(jsonl(row), chat).train
    theirs = transformers.AutoTokenizer.from_pretrained(chat.folder)
    wanted = theirs.apply_chat_template([*HELLO, USER, GOOD], tokenize=True, return_dict=False)
    start, stop = rows.documents.place(0)
    assert rows.documents.tokens_T[start:stop].tolist() == wanted
    assert learned(rows, chat) == [(f"{GOOD['content']}<|im_end|>", True)]


def test_a_preference_gives_two_answers_with_the_prompts_key(
    jsonl: Callable[..., str], chat: Tokenizer
) -> None:
    conversation = {"chosen": [*HELLO, USER, GOOD], "rejected": [*HELLO, USER, BAD]}
    rows = run(jsonl(conversation), chat).train
    assert learned(rows, chat) == [
        (f"{GOOD['content']}<|im_end|>", True),
        (f"{BAD['content']}<|im_end|>", False),
    ]
    keys_N = rows.documents.prompt_keys_N
    assert keys_N[0] == keys_N[1]


def test_a_preference_gives_the_documents_of_full_dpo(
    jsonl: Callable[..., str], tokenizer: Tokenizer
) -> None:
    source = jsonl(
        PREFERENCE, PREFERENCE | {"chosen": "Paris " * 30}, PREFERENCE | {"rejected": "Paris " * 60}
    )
    cfg = DataConfig(source=source, seq_len=256, cache="none")
    paired = prepare(cfg, tokenizer, seed=0, vocab_size=600, preferences=True).train.documents
    single = run(source, tokenizer).train.documents
    assert np.array_equal(paired.tokens_T, single.tokens_T)
    assert single.is_desirable_N.tolist() == [True, False] * 3


def test_what_cannot_be_used_is_dropped_and_counted(jsonl: Callable[..., str], tokenizer: Tokenizer) -> None:
    source = jsonl(ROW, ROW | {"completion": "Paris " * 60, "label": False})
    prepared = run(source, tokenizer, seq_len=48)
    assert prepared.train.num_documents == 1
    assert "dropped 1 answers whose documents have more than data.seq_len=48 tokens" in "\n".join(
        prepared.report
    )
    size = int(run(source, tokenizer).train.documents.lengths.max())
    assert run(source, tokenizer, seq_len=size).train.num_documents == 2  # exactly full is enough
    assert run(source, tokenizer, seq_len=size - 1).train.num_documents == 1

    source = jsonl(PREFERENCE, PREFERENCE | {"rejected": PREFERENCE["chosen"]})
    prepared = run(source, tokenizer)
    assert prepared.train.num_documents == 2
    assert "dropped 1 preferences whose two answers are equal" in "\n".join(prepared.report)


def test_labels_stay_with_their_documents_when_held_out_weighted_cached_and_joined(
    jsonl: Callable[..., str], tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_key, "MIN_BYTES", 0)
    single = [
        {
            "prompt": f"Compute {i}",
            "completion": ("four " if i % 3 else "Paris ") * (1 + i % 5),
            "label": i % 3 > 0,
        }
        for i in range(30)
    ]
    pairs = [{"prompt": f"Say {i}", "chosen": "four " * (1 + i % 4), "rejected": "Paris"} for i in range(10)]
    sources = (
        SourceConfig(source=jsonl(*single, name="a.jsonl"), weight=1.5),
        SourceConfig(source=jsonl(*pairs, name="b.jsonl")),
    )
    keys = {"eval_fraction": 0.2, "seq_len": 64}
    plain = run(sources, tokenizer, **keys)
    for _ in range(2):  # made, then read
        cached = run(sources, tokenizer, cache=str(tmp_path / "cache"), **keys)
        assert cached.train.digest == plain.train.digest
    held_out = cached.evaluation
    assert held_out is not None
    for rows in (cached.train, held_out):
        found = learned(rows, tokenizer)
        assert all(("four" in text) == label for text, label in found)
        assert {label for _, label in found} == {True, False}
    assert cached.train.num_documents + held_out.num_documents > 50
    assert not set(cached.train.documents.prompt_keys_N) & set(held_out.documents.prompt_keys_N)


def test_the_digest_knows_the_labels_and_that_of_other_rows_is_as_before(
    jsonl: Callable[..., str], tokenizer: Tokenizer
) -> None:
    rows = [run(jsonl(ROW, ROW | {"label": label}), tokenizer).train for label in (True, False)]
    assert rows[0].digest != rows[1].digest
    answers = jsonl(*({"prompt": ROW["prompt"], "completion": ROW["completion"]},) * 2)
    assert run(answers, tokenizer, labelled=False).train.digest == rows[0].digest


def test_names_of_columns_can_be_given_and_other_recipes_name_full_kto(
    jsonl: Callable[..., str], tokenizer: Tokenizer
) -> None:
    row = {"prompt": "What is two?", "said": "four", "liked": False}
    source = SourceConfig(source=jsonl(row), response_column="said", label_column="liked")
    assert learned(run((source,), tokenizer).train, tokenizer) == [("four<|endoftext|>", False)]
    both = jsonl(ROW | PREFERENCE)
    assert run(both, tokenizer, label_column="label", response_column="completion").train.num_documents == 1
    assert run(both, tokenizer, chosen_column="chosen").train.num_documents == 2
    with pytest.raises(
        UserError, match=r"data\.label_column: is a column of answers with a label, .* full_kto"
    ):
        run(jsonl(ROW), tokenizer, labelled=False, label_column="label")


def test_real_preferences_are_read_as_answers(assets: Path, chat: Tokenizer) -> None:
    prepared = run(str(assets / "data" / "rasbt_preference.json"), chat, seq_len=2048)
    assert "training: 1,094 desirable and 1,094 undesirable answers" in "\n".join(prepared.report)
