"""Preferences and answers with a label: which shapes are read, that both answers of a row stay together, that
labels stay with their documents, and what is dropped.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from lptune.base.errors import UserError
from lptune.config import DataConfig, PromptsConfig, SourceConfig
from lptune.data import Loader, Prepared, PromptWriter, Tokenizer, cache, prepare
from lptune.data.sources import Row
from tests.helpers.docs_pages import ROOT, blocks
from tests.helpers.documents import Write, learned, texts

USER = {"role": "user", "content": "What is the capital of France?"}
HELLO = [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Hello."}]
GOOD = {"role": "assistant", "content": "The capital of France is Paris."}
BAD = {"role": "assistant", "content": "Two plus two is four."}
CLOSED = [f"{answer['content']}<|im_end|>" for answer in (GOOD, BAD)]
TEXT = {"prompt": "What is two?", "chosen": "Two plus two.", "rejected": "Paris, thank you."}
RATED = {"prompt": "What is two?", "completion": "Two plus two.", "label": True}
SHAREGPT = {
    "conversations": [{"from": "human", "value": USER["content"]}],
    "chosen": {"from": "gpt", "value": GOOD["content"]},
    "rejected": {"from": "gpt", "value": BAD["content"]},
}
HUMAN = "\n\nHuman: What is two?\n\nAssistant: Two.\n\nHuman: And four?\n\nAssistant:"
TRANSCRIPT = {"chosen": f"{HUMAN} Four: two\n\nplus two.", "rejected": f"{HUMAN} Paris"}


def run(source: Any, tokenizer: Tokenizer, **keys: Any) -> Prepared:
    """Preferences, unless `preferences=False` or `labelled=True`."""
    reading = {name: keys.pop(name) for name in ("preferences", "labelled") if name in keys}
    cfg = DataConfig(source=source, **{"seq_len": 256, "cache": "none", **keys})
    reading.setdefault("preferences", "labelled" not in reading)
    return prepare(cfg, tokenizer, seed=0, vocab_size=600, **reading)


def desirable(prepared: Prepared) -> list[bool]:
    labels: list[bool] = prepared.train.documents.is_desirable_N.tolist()
    return labels


def numbered(count: int) -> list[dict[str, str]]:
    """Rows with documents of many lengths, each with a prompt of its own."""
    answers = [("four " * (1 + i % 7), "Paris " * (1 + i % 5) + str(i)) for i in range(count)]
    return [{"prompt": f"Compute {i}", "chosen": a, "rejected": b} for i, (a, b) in enumerate(answers)]


# ---- which rows are read


def test_a_transcript_is_the_conversation_that_it_writes_down(jsonl: Write, chat: Tokenizer) -> None:
    def say(*contents: str) -> list[dict[str, str]]:
        return [{"role": ("user", "assistant")[i % 2], "content": each} for i, each in enumerate(contents)]

    common = ("What is two?", "Two.", "And four?")
    same = {"chosen": say(*common, "Four: two\n\nplus two."), "rejected": say(*common, "Paris")}
    found = run(jsonl(TRANSCRIPT), chat)
    assert texts(found.train, chat) == texts(run(jsonl(same), chat).train, chat)
    assert learned(found.train, chat) == ["Four: two\n\nplus two.<|im_end|>", "Paris<|im_end|>"]
    assert "as chat in transcripts (rejected: rejected, messages: chosen)" in found.report[0]


def test_transcripts_are_read_by_every_recipe(jsonl: Write, chat: Tokenizer) -> None:
    source = jsonl(TRANSCRIPT)
    labelled = run(source, chat, labelled=True)
    assert desirable(labelled) == [True, False]
    assert learned(labelled.train, chat)[1] == "Paris<|im_end|>"
    with pytest.raises(UserError, match=r"use full_dpo or full_kto, or set data\.messages_column=chosen"):
        run(source, chat, preferences=False)
    told = run(source, chat, preferences=False, messages_column="chosen").train
    named = run(jsonl({"conversation": TRANSCRIPT["chosen"]}), chat, preferences=False).train
    assert texts(told, chat) == texts(named, chat)
    assert learned(told, chat) == ["Two.<|im_end|>Four: two\n\nplus two.<|im_end|>"]
    writer = PromptWriter(PromptsConfig(messages_column="chosen"), chat, 600, [Row("x", TRANSCRIPT)])
    assert writer.of_row(Row("x", TRANSCRIPT)).ids == labelled.train.prompt_and_answer(0)[0]
    with pytest.raises(UserError, match=r"line 1: message 2 of 'rejected' is an empty assistant message"):
        run(jsonl({"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant:"}), chat)


def test_the_template_of_the_page_writes_transcripts(jsonl: Write, tokenizer: Tokenizer) -> None:
    (block,) = blocks(ROOT / "docs" / "preferences.md", "jinja")
    rows = run(jsonl(TRANSCRIPT), tokenizer.with_chat_template(block.text), chat_template=block.text).train
    eos = tokenizer.special_tokens["eos_token"]
    earlier, last = HUMAN.split("Two.")
    assert texts(rows, tokenizer) == [
        (f"{earlier}Two.{eos}{last}{answer}{eos}", f"{answer}{eos}")
        for answer in (" Four: two\n\nplus two.", " Paris")
    ]


@pytest.mark.parametrize(
    ("row", "described"),
    [
        (TEXT, "pairs (prompt: prompt, response: chosen, rejected: rejected)"),
        (
            {"instruction": "What is", "input": "two?", "chosen": "a", "rejected": "b"},
            "pairs (prompt: instruction, input: input, response: chosen, rejected: rejected)",
        ),
        (SHAREGPT, "chat (response: chosen, rejected: rejected, messages: conversations)"),
        (
            {"prompt": USER["content"], "chosen": [USER, GOOD], "rejected": [USER, BAD], "score_chosen": 8.5},
            "chat (rejected: rejected, messages: chosen)",
        ),
        (
            {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
            "chat (response: chosen, rejected: rejected, messages: prompt)",
        ),
        (
            {"chosen_messages": [USER, GOOD], "rejected_messages": [USER, BAD]},
            "chat (rejected: rejected_messages, messages: chosen_messages)",
        ),
        (RATED, "pairs (prompt: prompt, response: completion, label: label)"),
        (
            {"instruction": "What is", "input": "two?", "output": "Two.", "kto_tag": True},
            "pairs (prompt: instruction, input: input, response: output, label: kto_tag)",
        ),
        (
            {"prompt": [USER], "completion": [GOOD], "label": True},
            "chat (response: completion, label: label, messages: prompt)",
        ),
        ({"messages": [USER, GOOD], "label": True}, "chat (label: label, messages: messages)"),
    ],
)
def test_shapes_are_detected_from_the_columns(
    row: dict[str, Any], described: str, jsonl: Write, chat: Tokenizer
) -> None:
    label = next((name for name in ("label", "kto_tag") if name in row), None)
    if label is None:
        prepared = run(jsonl(row), chat)
        assert prepared.train.num_preferences == 1
    else:
        prepared = run(jsonl(row, row | {label: False}), chat, labelled=True)
        assert "training: 1 desirable and 1 undesirable answers, 2 documents" in "\n".join(prepared.report)
    assert f" rows as {described}, chat template" in prepared.report[0]


def test_names_of_columns_can_be_given(jsonl: Write, tokenizer: Tokenizer) -> None:
    row = {"prompt": "What is two?", "good": "four", "bad": "Paris", "liked": False}
    source = SourceConfig(source=jsonl(row), chosen_column="good", rejected_column="bad")
    found = learned(run((source,), tokenizer).train, tokenizer)
    assert found == ["four<|endoftext|>", "Paris<|endoftext|>"]
    source = SourceConfig(source=jsonl(row), response_column="good", label_column="liked")
    rated = run((source,), tokenizer, labelled=True)
    assert (learned(rated.train, tokenizer), desirable(rated)) == (["four<|endoftext|>"], [False])
    both, keys = jsonl(RATED | TEXT), {"label_column": "label", "response_column": "completion"}
    assert run(both, tokenizer, labelled=True, **keys).train.num_documents == 1
    assert run(both, tokenizer, labelled=True, chosen_column="chosen").train.num_documents == 2


def test_labels_are_true_or_false_also_as_numbers_and_as_text(jsonl: Write, tokenizer: Tokenizer) -> None:
    values = [True, 1, 1.0, "true", False, 0, "False ", "0"]
    rated = run(jsonl(*(RATED | {"label": value} for value in values)), tokenizer, labelled=True)
    assert desirable(rated) == [True] * 4 + [False] * 4
    others = [None, "", "yes", 2, -1, 0.5, [True], "desirable"]
    source = jsonl(RATED, *(RATED | {"label": value} for value in others))
    with pytest.raises(UserError, match=r"line 2: column 'label' must be true .* or false, found "):
        run(source, tokenizer, labelled=True)
    rated = run(source, tokenizer, labelled=True, on_bad_row="skip")
    assert rated.train.num_documents == 1
    assert "skipped 8 bad rows" in "\n".join(rated.report)


# ---- what is learned


def test_text_is_written_in_the_plain_layout_the_chosen_answer_first(
    jsonl: Write, tokenizer: Tokenizer
) -> None:
    assert texts(run(jsonl(TEXT), tokenizer).train, tokenizer) == [
        (f"What is two?\n{answer}<|endoftext|>", f"{answer}<|endoftext|>")
        for answer in (TEXT["chosen"], TEXT["rejected"])
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": [*HELLO, USER, GOOD], "rejected": [*HELLO, USER, BAD]},
        {"prompt": [*HELLO, USER], "chosen": [GOOD], "rejected": [BAD]},
        {"messages": [*HELLO, USER], "chosen": GOOD["content"], "rejected": BAD["content"]},
        {"prompt": [*HELLO, USER], "completion": [GOOD], "label": True},
        {"prompt": [*HELLO, USER], "completion": GOOD["content"], "label": True},
        {"messages": [*HELLO, USER, GOOD], "label": True},
    ],
    ids=["both whole", "both apart", "both as text", "apart", "as text", "whole"],
)
def test_conversations_are_those_of_transformers_and_only_the_last_answers_are_learned(
    row: dict[str, Any], jsonl: Write, chat: Tokenizer
) -> None:
    reading = {"labelled": True} if "label" in row else {}
    rows = run(jsonl(row), chat, **reading).train
    theirs = transformers.AutoTokenizer.from_pretrained(chat.folder)
    answers = [GOOD] if "label" in row else [GOOD, BAD]
    for number, answer in enumerate(answers):
        start, stop = rows.documents.place(number)
        wanted = theirs.apply_chat_template([*HELLO, USER, answer], tokenize=True, return_dict=False)
        assert rows.documents.tokens_T[start:stop].tolist() == wanted
    # The answer in the common prompt is in each document and in no loss.
    assert learned(rows, chat) == CLOSED[: len(answers)]


@pytest.mark.parametrize("answers", ["chosen", "rejected"])
@pytest.mark.parametrize("as_text", [True, False])
def test_a_prompt_that_ends_with_an_answer_of_the_row_is_read_without_it(
    answers: str, as_text: bool, jsonl: Write, chat: Tokenizer
) -> None:
    row = {"messages": [*HELLO, USER], "chosen": [GOOD], "rejected": [BAD]}
    longer = {**row, "messages": [*row["messages"], *row[answers]]}
    if as_text:
        longer |= {"chosen": GOOD["content"], "rejected": BAD["content"]}
    wanted = texts(run(jsonl(row), chat).train, chat)
    assert texts(run(jsonl(longer), chat).train, chat) == wanted


def test_a_row_of_another_form_than_the_first_keeps_its_prompt_or_is_bad(
    jsonl: Write, chat: Tokenizer
) -> None:
    whole = {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]}
    parts = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
    found = texts(run(jsonl(parts, whole), chat).train, chat)
    assert found[:2] == found[2:]
    for answers in (parts, {"chosen": [GOOD], "rejected": [USER, BAD]}):
        with pytest.raises(UserError, match="line 2: column 'chosen' holds an answer without its prompt"):
            run(jsonl(whole, answers), chat)


def test_a_preference_gives_the_documents_of_full_dpo_with_labels(jsonl: Write, chat: Tokenizer) -> None:
    conversation = {"chosen": [*HELLO, USER, GOOD], "rejected": [*HELLO, USER, BAD]}
    for rows in (
        [conversation],
        [TEXT, TEXT | {"chosen": "Paris " * 30}, TEXT | {"rejected": "Paris " * 60}],
    ):
        source = jsonl(*rows)
        paired, single = run(source, chat), run(source, chat, labelled=True)
        assert np.array_equal(paired.train.documents.tokens_T, single.train.documents.tokens_T)
        assert desirable(single) == [True, False] * len(rows)
        keys_N = single.train.documents.prompt_keys_N
        assert np.array_equal(keys_N[0::2], keys_N[1::2])


# ---- both answers stay together


def test_both_documents_have_the_prompts_key_and_stand_next_to_each_other_in_one_row(
    jsonl: Write, tokenizer: Tokenizer
) -> None:
    for packing in (True, False):
        rows = run(jsonl(*numbered(60)), tokenizer, seq_len=64, packing=packing).train
        keys_N = rows.documents.prompt_keys_N
        assert np.array_equal(keys_N[0::2], keys_N[1::2])
        assert len(np.unique(keys_N)) == rows.num_preferences == 60
        assert rows.num_documents_per_row.max() > 2 if packing else set(rows.num_documents_per_row) == {2}
        seen = []
        for numbers_in in [[row] for row in range(rows.num_rows)] + [[0, -1, 1]]:
            batch = rows.batch(numbers_in)
            tokens = batch.tokens_BS.flatten()
            assert len(batch.numbers_D) == len(batch.offsets) - 1
            numbers = [number for number in batch.numbers_D.tolist() if number >= 0]
            assert numbers[1::2] == [number + 1 for number in numbers[0::2]]
            seen += numbers if len(numbers_in) == 1 else []
            for number, start, stop in zip(
                batch.numbers_D, batch.offsets[:-1], batch.offsets[1:], strict=True
            ):
                if number >= 0:
                    first, last = rows.documents.place(int(number))
                    assert tokens[start:stop].tolist() == rows.documents.tokens_T[first:last].tolist()
        assert sorted(seen) == list(range(120))


def test_what_does_not_fit_or_has_equal_answers_is_dropped_and_counted(
    jsonl: Write, tokenizer: Tokenizer
) -> None:
    long = {"prompt": "What?", "chosen": "Paris " * 60, "rejected": "four"}
    equal = {"prompt": "What?", "chosen": "four", "rejected": "four"}
    source = jsonl(TEXT, long, equal)
    prepared = run(source, tokenizer, seq_len=48)
    report = "\n".join(prepared.report)
    assert "dropped 1 preferences whose two documents have more than data.seq_len=48 tokens" in report
    assert "dropped 1 preferences whose two answers are equal" in report
    assert "training: 1 preferences, 2 documents" in report
    size = int(run(source, tokenizer).train.documents.lengths[2:].sum())
    for seq_len, count in ((size, 2), (size - 1, 1)):  # exactly full is enough
        assert run(source, tokenizer, seq_len=seq_len).train.num_preferences == count
    assert "answers are equal" in "\n".join(run(source, tokenizer, labelled=True).report)
    source = jsonl(RATED, RATED | {"completion": "Paris " * 60, "label": False})
    prepared = run(source, tokenizer, labelled=True, seq_len=48)
    dropped = "dropped 1 answers whose documents have more than data.seq_len=48 tokens"
    assert dropped in "\n".join(prepared.report)
    size = int(run(source, tokenizer, labelled=True).train.documents.lengths.max())
    for seq_len, count in ((size, 2), (size - 1, 1)):
        assert run(source, tokenizer, labelled=True, seq_len=seq_len).train.num_documents == count


def test_held_out_are_prompts_with_both_answers(jsonl: Write, tokenizer: Tokenizer) -> None:
    rows = numbered(40)
    prepared = run(jsonl(*rows, *rows[:10]), tokenizer, eval_fraction=0.2)
    train, held_out = prepared.train, prepared.held_out
    assert train.num_preferences + held_out.num_preferences == 50
    assert 6 <= held_out.num_preferences <= 10
    for side in (train, held_out):
        keys_N, found = side.documents.prompt_keys_N, learned(side, tokenizer)
        assert np.array_equal(keys_N[0::2], keys_N[1::2])
        assert all("four" in a and "Paris" in b for a, b in zip(found[0::2], found[1::2], strict=True))
    assert not set(train.documents.prompt_keys_N) & set(held_out.documents.prompt_keys_N)


@pytest.mark.parametrize("weight", [0.5, 2.5])
def test_weights_choose_and_repeat_whole_preferences(
    weight: float, jsonl: Write, tokenizer: Tokenizer
) -> None:
    sources = (
        SourceConfig(source=jsonl(*numbered(20), name="a.jsonl"), weight=weight),
        SourceConfig(source=jsonl(TEXT, name="b.jsonl")),
    )
    rows = run(sources, tokenizer, seq_len=64).train
    assert rows.num_preferences == 20 * weight + 1
    prompts = [text.split("\n")[0] for text, _ in texts(rows, tokenizer)]
    assert prompts[0::2] == prompts[1::2]
    loader = Loader(rows, seed=0, global_batch_size=2, micro_batch_size=1)
    batches = loader.micro_batches(0)
    assert loader.num_preferences(0) == sum(int((b.numbers_D >= 0).sum()) for b in batches) // 2


def test_labels_stay_with_their_documents_when_held_out_weighted_cached_and_joined(
    jsonl: Write, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "MIN_BYTES", 0)
    answers = [(("four " if i % 3 else "Paris ") * (1 + i % 5), i % 3 > 0) for i in range(30)]
    single = [
        {"prompt": f"Compute {i}", "completion": answer, "label": label}
        for i, (answer, label) in enumerate(answers)
    ]
    pairs = [{"prompt": f"Say {i}", "chosen": "four " * (1 + i % 4), "rejected": "Paris"} for i in range(10)]
    sources = (
        SourceConfig(source=jsonl(*single, name="a.jsonl"), weight=1.5),
        SourceConfig(source=jsonl(*pairs, name="b.jsonl")),
    )
    keys = {"labelled": True, "eval_fraction": 0.2, "seq_len": 64}
    plain = run(sources, tokenizer, **keys)
    for _ in range(2):  # made, then read
        cached = run(sources, tokenizer, cache=str(tmp_path / "cache"), **keys)
        assert cached.train.digest == plain.train.digest
    for rows in (cached.train, cached.held_out):
        labels = rows.documents.is_desirable_N.tolist()
        assert [("four" in text) for text in learned(rows, tokenizer)] == labels
        assert {*labels} == {True, False}
    assert cached.train.num_documents + cached.held_out.num_documents > 50
    # The same rows as preferences, and as pairs, have entries of their own.
    alone = SourceConfig(source=sources[1].source)
    compared = run((alone,), tokenizer, cache=str(tmp_path / "cache")).train
    assert compared.digest == run((alone,), tokenizer).train.digest
    paired = run(
        (alone,), tokenizer, preferences=False, response_column="chosen", cache=str(tmp_path / "cache")
    )
    assert (compared.num_documents, paired.train.num_documents) == (20, 10)


def test_the_digest_knows_the_labels_and_that_of_other_rows_is_as_before(
    jsonl: Write, tokenizer: Tokenizer
) -> None:
    rows = [jsonl(RATED, RATED | {"label": label}, name=f"{label}.jsonl") for label in (True, False)]
    labelled = [run(source, tokenizer, labelled=True).train.digest for source in rows]
    assert labelled[0] != labelled[1]
    answers = jsonl(*({"prompt": RATED["prompt"], "completion": RATED["completion"]},) * 2)
    assert run(answers, tokenizer, preferences=False).train.digest == labelled[0]


@pytest.mark.parametrize(("name", "count"), [("rasbt_preference.json", 1094), ("dpo_en_demo.json", 300)])
def test_real_preferences_are_read(assets: Path, chat: Tokenizer, name: str, count: int) -> None:
    source = assets / "data" / name
    rows = run(str(source), chat, seq_len=32768).train
    assert rows.num_preferences == count
    last = json.loads(source.read_text())[-1]
    answers = [last[side] for side in ("chosen", "rejected")]
    answers = [each if isinstance(each, str) else each["value"] for each in answers]
    assert learned(rows, chat)[-2:] == [f"{answer}<|im_end|>" for answer in answers]
