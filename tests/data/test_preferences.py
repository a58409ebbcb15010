"""Preferences: which shapes are read, that both answers of a row stay together, and what is dropped."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from lptune.base.errors import UserError
from lptune.config import DataConfig, PromptsConfig, SourceConfig
from lptune.data import Loader, Prepared, PromptWriter, Rows, Tokenizer, cache_key, prepare
from lptune.data.sources import Row
from tests.helpers.docs_pages import ROOT, blocks

USER = {"role": "user", "content": "What is the capital of France?"}
HELLO = [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Hello."}]
GOOD = {"role": "assistant", "content": "The capital of France is Paris."}
BAD = {"role": "assistant", "content": "Two plus two is four."}
TEXT = {"prompt": "What is two?", "chosen": "Two plus two.", "rejected": "Paris, thank you."}
SHAREGPT = {
    "conversations": [{"from": "human", "value": USER["content"]}],
    "chosen": {"from": "gpt", "value": GOOD["content"]},
    "rejected": {"from": "gpt", "value": BAD["content"]},
}


def run(source: Any, tokenizer: Tokenizer, *, preferences: bool = True, **keys: Any) -> Prepared:
    cfg = DataConfig(source=source, **{"seq_len": 256, "cache": "none", **keys})
    return prepare(cfg, tokenizer, seed=0, vocab_size=600, preferences=preferences)


def numbered(count: int) -> list[dict[str, str]]:
    """Rows with documents of many lengths, each with a prompt of its own."""
    return [
        {
            "prompt": f"Compute {i}",
            "chosen": "four " * (1 + i % 7),
            "rejected": "Paris " * (1 + i % 5) + str(i),
        }
        for i in range(count)
    ]


HUMAN = "\n\nHuman: What is two?\n\nAssistant: Two.\n\nHuman: And four?\n\nAssistant:"
TRANSCRIPT = {"chosen": f"{HUMAN} Four: two\n\nplus two.", "rejected": f"{HUMAN} Paris"}


def test_a_transcript_is_the_conversation_that_it_writes_down(jsonl: Callable, chat: Tokenizer) -> None:
    def say(*contents: str) -> list[dict[str, str]]:
        return [{"role": ("user", "assistant")[i % 2], "content": each} for i, each in enumerate(contents)]

    common = ("What is two?", "Two.", "And four?")
    same = {"chosen": say(*common, "Four: two\n\nplus two."), "rejected": say(*common, "Paris")}
    found = run(jsonl(TRANSCRIPT), chat)
    assert texts(found.train, chat) == texts(run(jsonl(same), chat).train, chat)
    assert [learned for _, learned in texts(found.train, chat)] == [
        "Four: two\n\nplus two.<|im_end|>",
        "Paris<|im_end|>",
    ]
    assert "as chat in transcripts (rejected: rejected, messages: chosen)" in found.report[0]


def test_transcripts_are_read_by_every_recipe(jsonl: Callable, chat: Tokenizer) -> None:
    source = jsonl(TRANSCRIPT)
    cfg = DataConfig(source=source, seq_len=256, cache="none")
    labelled = prepare(cfg, chat, seed=0, vocab_size=600, labelled=True).train
    assert labelled.documents.is_desirable_N.tolist() == [True, False]
    assert [learned for _, learned in texts(labelled, chat)][1] == "Paris<|im_end|>"
    with pytest.raises(UserError, match=r"use full_dpo or full_kto, or set data\.messages_column=chosen"):
        run(source, chat, preferences=False)
    told = run(source, chat, preferences=False, messages_column="chosen")
    named = run(jsonl({"conversation": TRANSCRIPT["chosen"]}), chat, preferences=False)
    assert texts(told.train, chat) == texts(named.train, chat)
    assert texts(told.train, chat)[0][1] == "Two.<|im_end|>Four: two\n\nplus two.<|im_end|>"
    writer = PromptWriter(PromptsConfig(messages_column="chosen"), chat, 600, [Row("x", TRANSCRIPT)])
    assert writer.of_row(Row("x", TRANSCRIPT)).ids == labelled.prompt_and_answer(0)[0]
    with pytest.raises(UserError, match=r"line 1: message 2 of 'rejected' is an empty assistant message"):
        run(jsonl({"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant:"}), chat)


def test_the_template_of_the_page_writes_transcripts(jsonl: Callable, tokenizer: Tokenizer) -> None:
    (block,) = blocks(ROOT / "docs" / "preferences.md", "jinja")
    rows = run(jsonl(TRANSCRIPT), tokenizer.with_chat_template(block.text), chat_template=block.text).train
    eos = tokenizer.special_tokens["eos_token"]
    earlier, last = HUMAN.split("Two.")
    assert texts(rows, tokenizer) == [
        (f"{earlier}Two.{eos}{last}{answer}{eos}", f"{answer}{eos}")
        for answer in (" Four: two\n\nplus two.", " Paris")
    ]


def test_columns_of_whole_conversations_are_found_by_their_names(jsonl: Callable, chat: Tokenizer) -> None:
    row = {"chosen_messages": [USER, GOOD], "rejected_messages": [USER, BAD]}
    report = run(jsonl(row), chat).report
    assert "(rejected: rejected_messages, messages: chosen_messages)" in report[0]
    with pytest.raises(UserError, match=r"holds preferences .*or set data\.messages_column=chosen_messages"):
        run(jsonl(row), chat, preferences=False)


def texts(rows: Rows, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Of each document: the whole text, and what is learned of it; special tokens shown."""
    found = []
    for i in range(rows.num_documents):
        start, stop = rows.documents.place(i)
        tokens, is_target = rows.documents.tokens_T[start:stop], rows.documents.is_target_T[start:stop]
        learned = tokens[is_target]
        found.append(
            tuple(
                tokenizer.backend.decode(part.tolist(), skip_special_tokens=False)
                for part in (tokens, learned)
            )
        )
    return found  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("row", "described"),
    [
        (TEXT, "pairs (prompt: prompt, response: chosen, rejected: rejected)"),
        (
            {"instruction": "What is", "input": "two?", **{k: TEXT[k] for k in ("chosen", "rejected")}},
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
            {"messages": [*HELLO, USER], "chosen": GOOD["content"], "rejected": BAD["content"]},
            "chat (response: chosen, rejected: rejected, messages: messages)",
        ),
    ],
)
def test_shapes_are_detected_from_the_columns(
    row: dict[str, Any], described: str, jsonl: Callable[..., str], chat: Tokenizer
) -> None:
    prepared = run(jsonl(row), chat)
    assert f"1 rows as {described}, chat template" in "\n".join(prepared.report)
    assert prepared.train.num_preferences == 1


def test_names_of_columns_can_be_given(jsonl: Callable[..., str], tokenizer: Tokenizer) -> None:
    row = {"prompt": "What is two?", "good": "four", "bad": "Paris"}
    source = SourceConfig(source=jsonl(row), chosen_column="good", rejected_column="bad")
    rows = run((source,), tokenizer).train
    assert [learned for _, learned in texts(rows, tokenizer)] == ["four<|endoftext|>", "Paris<|endoftext|>"]


def test_text_is_written_in_the_plain_layout_the_chosen_answer_first(
    jsonl: Callable[..., str], tokenizer: Tokenizer
) -> None:
    found = texts(run(jsonl(TEXT), tokenizer).train, tokenizer)
    assert found == [
        (f"What is two?\n{answer}<|endoftext|>", f"{answer}<|endoftext|>")
        for answer in (TEXT["chosen"], TEXT["rejected"])
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": [*HELLO, USER, GOOD], "rejected": [*HELLO, USER, BAD]},
        {"prompt": [*HELLO, USER], "chosen": [GOOD], "rejected": [BAD]},
        {"messages": [*HELLO, USER], "chosen": GOOD["content"], "rejected": BAD["content"]},
    ],
    ids=["whole conversations", "prompt of messages", "answers as text"],
)
def test_conversations_are_those_of_transformers_and_only_the_answers_that_differ_are_learned(
    row: dict[str, Any], jsonl: Callable[..., str], chat: Tokenizer
) -> None:
    rows = run(jsonl(row), chat).train
    theirs = transformers.AutoTokenizer.from_pretrained(chat.folder)
    for number, answer in enumerate((GOOD, BAD)):
        start, stop = rows.documents.place(number)
        wanted = theirs.apply_chat_template([*HELLO, USER, answer], tokenize=True, return_dict=False)
        assert rows.documents.tokens_T[start:stop].tolist() == wanted
    # The answer in the common prompt is in both documents and in no loss.
    assert [learned for _, learned in texts(rows, chat)] == [f"{a['content']}<|im_end|>" for a in (GOOD, BAD)]


@pytest.mark.parametrize("answers", ["chosen", "rejected"])
@pytest.mark.parametrize("as_text", [True, False])
def test_a_prompt_that_ends_with_an_answer_of_the_row_is_read_without_it(
    answers: str, as_text: bool, jsonl: Callable[..., str], chat: Tokenizer
) -> None:
    row = {"messages": [*HELLO, USER], "chosen": [GOOD], "rejected": [BAD]}
    longer = {**row, "messages": [*row["messages"], *row[answers]]}
    if as_text:
        longer |= {"chosen": GOOD["content"], "rejected": BAD["content"]}
    wanted = texts(run(jsonl(row), chat).train, chat)
    assert texts(run(jsonl(longer), chat).train, chat) == wanted


def test_a_row_of_another_form_than_the_first_keeps_its_prompt_or_is_bad(
    jsonl: Callable[..., str], chat: Tokenizer
) -> None:
    whole = {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]}
    parts = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
    found = texts(run(jsonl(parts, whole), chat).train, chat)
    assert found[:2] == found[2:]
    for answers in (parts, {"chosen": [GOOD], "rejected": [USER, BAD]}):
        with pytest.raises(UserError, match="line 2: column 'chosen' holds an answer without its prompt"):
            run(jsonl(whole, answers), chat)


def test_both_documents_have_the_prompts_key_and_stand_next_to_each_other_in_one_row(
    jsonl: Callable[..., str], tokenizer: Tokenizer
) -> None:
    for packing in (True, False):
        rows = run(jsonl(*numbered(60)), tokenizer, seq_len=64, packing=packing).train
        keys_N = rows.documents.prompt_keys_N
        assert np.array_equal(keys_N[0::2], keys_N[1::2])
        assert len(np.unique(keys_N)) == rows.num_preferences == 60
        assert rows.num_preferences_per_row.sum() == 60
        assert rows.num_preferences_per_row.max() == (1 if not packing else pytest.approx(3, abs=2))
        seen = []
        for row in range(rows.num_rows):
            batch = rows.batch([row])
            numbers = [number for number in batch.numbers_D.tolist() if number >= 0]
            seen += numbers
            assert numbers[1::2] == [number + 1 for number in numbers[0::2]]
            for place, number in enumerate(numbers):
                start, stop = rows.documents.place(number)
                tokens = batch.tokens_BS[0][batch.document_BS[0] == place]
                assert tokens.tolist() == rows.documents.tokens_T[start:stop].tolist()
                assert int(batch.offsets[place + 1] - batch.offsets[place]) == stop - start
        assert sorted(seen) == list(range(120))


def test_numbers_of_a_batch_of_several_rows_follow_its_offsets(
    jsonl: Callable[..., str], tokenizer: Tokenizer
) -> None:
    rows = run(jsonl(*numbered(20)), tokenizer, seq_len=64).train
    batch = rows.batch([0, -1, 1])
    tokens = batch.tokens_BS.flatten()
    assert len(batch.numbers_D) == len(batch.offsets) - 1
    for number, start, stop in zip(batch.numbers_D, batch.offsets[:-1], batch.offsets[1:], strict=True):
        if number >= 0:
            first, last = rows.documents.place(int(number))
            assert tokens[start:stop].tolist() == rows.documents.tokens_T[first:last].tolist()


def test_a_preference_that_does_not_fit_or_has_equal_answers_is_dropped_and_counted(
    jsonl: Callable[..., str], tokenizer: Tokenizer
) -> None:
    long = {"prompt": "What?", "chosen": "Paris " * 60, "rejected": "four"}
    equal = {"prompt": "What?", "chosen": "four", "rejected": "four"}
    source = jsonl(TEXT, long, equal)
    prepared = run(source, tokenizer, seq_len=48)
    assert prepared.train.num_preferences == 1
    report = "\n".join(prepared.report)
    assert (
        "dropped 1 preferences whose two documents have more than data.seq_len=48 tokens together" in report
    )
    assert "dropped 1 preferences whose two answers are equal" in report
    assert "training: 1 preferences, 2 documents" in report
    whole = run(source, tokenizer).train
    assert whole.num_preferences == 2
    # Exactly full is enough, one token less is not.
    size = int(whole.documents.lengths[2:].sum())
    assert run(source, tokenizer, seq_len=size).train.num_preferences == 2
    assert run(source, tokenizer, seq_len=size - 1).train.num_preferences == 1


def test_held_out_are_prompts_with_both_answers(jsonl: Callable[..., str], tokenizer: Tokenizer) -> None:
    rows = numbered(40)
    prepared = run(jsonl(*rows, *rows[:10]), tokenizer, eval_fraction=0.2)
    train, held_out = prepared.train, prepared.evaluation
    assert held_out is not None
    assert train.num_preferences + held_out.num_preferences == 50
    assert 6 <= held_out.num_preferences <= 10
    for side in (train, held_out):
        keys_N = side.documents.prompt_keys_N
        assert np.array_equal(keys_N[0::2], keys_N[1::2])
        found = texts(side, tokenizer)
        assert all(
            "four" in a and "Paris" in b for (_, a), (_, b) in zip(found[0::2], found[1::2], strict=True)
        )
    assert not set(train.documents.prompt_keys_N) & set(held_out.documents.prompt_keys_N)


@pytest.mark.parametrize("weight", [0.5, 2.5])
def test_weights_choose_and_repeat_whole_preferences(
    weight: float, jsonl: Callable[..., str], tokenizer: Tokenizer
) -> None:
    sources = (
        SourceConfig(source=jsonl(*numbered(20), name="a.jsonl"), weight=weight),
        SourceConfig(source=jsonl(TEXT, name="b.jsonl")),
    )
    rows = run(sources, tokenizer, seq_len=64).train
    assert rows.num_preferences == 20 * weight + 1
    found = texts(rows, tokenizer)
    assert all(
        a[0].split("\n")[0] == b[0].split("\n")[0] for a, b in zip(found[0::2], found[1::2], strict=True)
    )
    loader = Loader(rows, seed=0, global_batch_size=2, micro_batch_size=1)
    batches = loader.micro_batches(0)
    assert loader.num_preferences(0) == sum(int((b.numbers_D >= 0).sum()) for b in batches) // 2


def test_the_cache_keeps_preferences_apart_from_pairs(
    jsonl: Callable[..., str], tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_key, "MIN_BYTES", 0)
    source, cache = jsonl(*numbered(8)), str(tmp_path / "cache")
    single = run(source, tokenizer, preferences=False, response_column="chosen", cache=cache).train
    made = run(source, tokenizer, cache=cache).train
    again = run(source, tokenizer, cache=cache).train
    assert (single.num_documents, made.num_documents) == (8, 16)
    assert made.digest == again.digest == run(source, tokenizer).train.digest


def test_a_recipe_for_single_answers_names_full_dpo(jsonl: Callable[..., str], tokenizer: Tokenizer) -> None:
    with pytest.raises(
        UserError, match="this recipe learns from one response per prompt; use full_dpo or full_kto"
    ):
        run(jsonl(TEXT), tokenizer, preferences=False)
    with pytest.raises(UserError, match=r"data\.chosen_column: is a column of preferences, .* full_dpo"):
        run(jsonl(TEXT), tokenizer, preferences=False, chosen_column="chosen")


@pytest.mark.parametrize(("name", "count"), [("rasbt_preference.json", 1094), ("dpo_en_demo.json", 300)])
def test_real_preferences_are_read(assets: Path, chat: Tokenizer, name: str, count: int) -> None:
    prepared = run(str(assets / "data" / name), chat, seq_len=32768)
    rows = prepared.train
    assert rows.num_preferences == count
    first = json.loads((assets / "data" / name).read_text())[-1]
    answers = [
        first[side] if isinstance(first[side], str) else first[side]["value"]
        for side in ("chosen", "rejected")
    ]
    assert [learned for _, learned in texts(rows, chat)[-2:]] == [f"{answer}<|im_end|>" for answer in answers]
