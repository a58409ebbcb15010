"""From a file to rows: what is learned, cut, dropped, held out, and what is said about it."""

import json
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from lptune.base.errors import UserError
from lptune.config import DataConfig
from lptune.data import (
    Prepared,
    Tokenizer,
    layout,
    load_tokenizer,
    prepare,
    prepare_evaluation,
    tokenization,
)
from lptune.data.order import split_by_prompt
from lptune.data.sources import Row
from tests.helpers.chat_templates import (
    CHATML,
    CHATML_MARKED,
    GEMMA,
    LLAMA3,
    MISTRAL,
    QWEN3,
    WITHOUT_SPECIAL_TOKENS,
    config,
)
from tests.helpers.documents import Load, Make, Write


def run(source: Any, tokenizer: Tokenizer, *, seed: int = 0, vocab_size: int = 600, **keys: Any) -> Prepared:
    if "chat_template" in keys:
        tokenizer = tokenizer.with_chat_template(keys["chat_template"])
    return prepare(
        DataConfig(source=source, **{"seq_len": 256, "cache": "none", **keys}),
        tokenizer,
        seed=seed,
        vocab_size=vocab_size,
    )


def texts(prepared: Prepared, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Prompt and answer of each training document, special tokens shown."""
    rows = prepared.train
    pairs = [rows.prompt_and_answer(i) for i in range(rows.num_documents)]
    return [
        (tokenizer.decode(a, skip_special=False), tokenizer.decode(b, skip_special=False)) for a, b in pairs
    ]


PAIRS = [{"question": f"What is {i} + {i}?", "answer": f"It is {2 * i}."} for i in range(40)]


def test_a_pair_without_a_template_is_prompt_newline_response_eos(jsonl: Write, tokenizer: Tokenizer) -> None:
    source = jsonl(
        {"instruction": "Add", "input": "2 + 2", "output": "4"},
        {"instruction": "Say hi", "input": "", "output": "hi"},
    )
    prepared = run(source, tokenizer)
    assert texts(prepared, tokenizer) == [("Add\n2 + 2\n", "4<|endoftext|>"), ("Say hi\n", "hi<|endoftext|>")]
    assert prepared.train.documents.is_target_T.sum() == prepared.train.num_target_tokens


@pytest.mark.parametrize("name", ["llama2", "mistral_chatml", "titan_2k", "qwen2"])
def test_bos_stands_where_the_tokenizer_puts_it(
    asset_tokenizer: Load, jsonl: Write, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "titan_2k":  # it knows neither space nor line break
        monkeypatch.setattr(layout, "MAX_UNKNOWN", 1.0)
    tokenizer = asset_tokenizer(f"tokenizers/{name}").with_chat_template("none")
    prepared = run(jsonl(*PAIRS), tokenizer, vocab_size=tokenizer.vocab_size)
    for i, row in enumerate(PAIRS):
        prompt, answer = prepared.train.prompt_and_answer(i)
        assert prompt == tokenizer.encode(row["question"] + "\n")
        assert answer[-1] == tokenizer.eos_id
        if tokenizer.alphabet is not None:
            assert any("the tokenizer drops 280 characters" in line for line in prepared.report)
            continue
        # Sentencepiece keeps a text's leading space as a token of its own where the file says so.
        assert (
            tokenizer.decode([*prompt, *answer]).replace("\n ", "\n") == f"{row['question']}\n{row['answer']}"
        )


def test_a_tokenizer_that_does_not_know_the_text_is_an_error(
    asset_tokenizer: Load, jsonl: Write, tmp_path: Path
) -> None:
    stories = asset_tokenizer("models/story_llama")
    for template, row in (("none", {"text": "{}a" * 50}), ("chatml", {"prompt": "é{" * 9, "response": "no"})):
        source, tokenizer = jsonl(row), stories.with_chat_template(template)
        with pytest.raises(
            UserError, match=r"models/story_llama drops [1-9]\d\.\d% of the characters \(.*{.* …\)"
        ):
            run(source, tokenizer, vocab_size=tokenizer.vocab_size)
    words = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "</s>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    names = {"unk_token": "<unk>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    for num_unknown, is_error in ((1, False), (2, True)):  # of 150 tokens
        source = jsonl({"text": "a " * (149 - num_unknown) + "b " * num_unknown})
        with pytest.raises(UserError, match="does not know 1") if is_error else nullcontext():
            run(source, load_tokenizer(tmp_path), vocab_size=3, seq_len=200)


def test_with_a_template_a_pair_is_a_chat(jsonl: Write, tokenizer_folder: Make) -> None:
    tokenizer = load_tokenizer(tokenizer_folder(**config("chatml")))
    source = jsonl({"instruction": "Add", "input": "2 + 2", "output": "4"})
    prepared = run(source, tokenizer, system_prompt="Be brief.")
    prompt = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nAdd\n2 + 2<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert texts(prepared, tokenizer) == [(prompt, "4<|im_end|>")]


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, QWEN3])
def test_chat_tokens_equal_apply_chat_template_and_only_the_assistant_is_learned(
    assets: Path, tokenizer_folder: Make, template: str
) -> None:
    folder = tokenizer_folder(chat_template=template, eos_token="<|im_end|>")
    tokenizer, theirs = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    source = assets / "data" / "openai_messages.jsonl"
    prepared = run(str(source), tokenizer, seq_len=512)
    rows = prepared.train
    messages = [json.loads(line)["messages"] for line in source.read_text().splitlines()]
    assert rows.num_documents == len(messages)
    for i, chat in enumerate(messages):
        begin, end = rows.documents.offsets_N1[i : i + 2]
        expected = theirs.apply_chat_template(chat, return_dict=False)
        assert rows.documents.tokens_T[begin:end].tolist() == expected
        learned = rows.documents.tokens_T[begin:end][rows.documents.is_target_T[begin:end]]
        empty_thoughts = "<think>\n\n</think>\n\n" if template == QWEN3 else ""
        assert (
            tokenizer.decode(learned, skip_special=False)
            == f"{empty_thoughts}{chat[-1]['content']}<|im_end|>"
        )
        prompt, _ = rows.prompt_and_answer(i)
        assert prompt == theirs.apply_chat_template(chat[:-1], add_generation_prompt=True, return_dict=False)


def test_long_documents_are_cut_and_those_without_a_target_dropped(
    jsonl: Write, tokenizer: Tokenizer
) -> None:
    long_answer = {"question": "x", "answer": "word " * 100}
    long_prompt = {"question": "word " * 100, "answer": "y"}
    prepared = run(jsonl(long_answer, long_prompt, *PAIRS), tokenizer, seq_len=32)
    assert prepared.train.num_documents == len(PAIRS) + 1
    assert prepared.train.documents.lengths.max() == 32
    full = run(jsonl(long_answer, long_prompt, *PAIRS), tokenizer, seq_len=1024).train
    lengths = full.documents.lengths
    report = "\n".join(prepared.report)
    assert (
        f"cut {lengths[0] + lengths[1] - 64:,} tokens off 2 documents longer than data.seq_len=32" in report
    )
    assert "dropped 1 documents without a token for the loss" in report


def test_raw_text_loses_no_token_and_each_is_learned_once(jsonl: Write, tokenizer: Tokenizer) -> None:
    long = "To be, or not to be: that is the question. " * 40
    prepared = run(
        jsonl({"text": long}, {"text": "short"}, {"text": ""}), tokenizer, seq_len=64, on_bad_row="skip"
    )
    rows = prepared.train
    expected = [[*tokenizer.encode(text), tokenizer.eos_id] for text in (long, "short")]
    learned = [
        rows.documents.tokens_T[a + 1 : b].tolist()
        for a, b in zip(rows.documents.offsets_N1, rows.documents.offsets_N1[1:], strict=False)
    ]
    assert [token for chunk in learned[:-1] for token in chunk] == expected[0][1:]
    assert learned[-1] == expected[1][1:]
    assert rows.num_target_tokens == sum(map(len, expected)) - 2
    assert "skipped 1 bad row: " in "\n".join(prepared.report)
    assert "truncated" not in "\n".join(prepared.report)


@pytest.mark.parametrize("name", ["qwen2", "llama2"])
def test_encoding_a_long_text_in_pieces_changes_no_token(
    assets: Path, asset_tokenizer: Load, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(tokenization, "PIECE_CHARACTERS", 2000)
    tokenizer = asset_tokenizer(f"tokenizers/{name}")
    for file in ("tinyshakespeare.txt", "multilingual.txt", "wiki_demo.txt"):
        text = (assets / "data" / file).read_text()[:60_000]
        pieces = tokenization._pieces(tokenization.Written(text), tokenizer)
        assert "".join(pieces) == text
        assert (len(pieces) > 10) == (name in ("qwen2", "gpt2") and not file.startswith("wiki"))
        joined = [token for piece in pieces for token in tokenizer.encode(piece, add_special=False)]
        assert joined == tokenizer.encode(text, add_special=False)


def test_bad_rows_stop_with_their_place_or_are_skipped_and_counted(
    jsonl: Write, tokenizer: Tokenizer
) -> None:
    source = jsonl(
        *PAIRS[:34], {"question": "q"}, "{broken", {"question": "q", "answer": "half \ud83d"}, *PAIRS[34:]
    )
    with pytest.raises(
        UserError, match=r"rows.jsonl line 35: has no column 'answer'.* \(or set data.on_bad_row=skip\)"
    ):
        run(source, tokenizer)
    prepared = run(source, tokenizer, on_bad_row="skip")
    assert prepared.train.num_documents == len(PAIRS)
    report = "\n".join(prepared.report)
    assert "skipped 3 bad rows, the first: " in report
    assert "line 35: has no column 'answer'" in report
    source = jsonl({"question": "q", "answer": "half \ud83d"})
    with pytest.raises(UserError, match=r"line 1: holds '\\ud83d', half of a surrogate pair"):
        run(source, tokenizer)
    with pytest.raises(UserError, match=r"no usable row: 1 bad, the first: .*line 1: holds"):
        run(source, tokenizer, on_bad_row="skip")


def test_what_a_template_refuses_names_the_row(jsonl: Write, tokenizer_folder: Make) -> None:
    system = {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "a"},
        ]
    }
    source = jsonl({"messages": system["messages"][1:]}, system)
    tokenizer = load_tokenizer(tokenizer_folder(**config("gemma")))
    with pytest.raises(
        UserError, match=r"rows.jsonl line 2: the chat template refuses it: System role not supported; change"
    ):
        run(source, tokenizer)
    assert run(source, tokenizer, on_bad_row="skip").train.num_documents == 1
    with pytest.raises(UserError, match=r"line 1: .*System role not supported"):
        run(source, tokenizer, system_prompt="x")


def test_what_does_not_go_together_is_one_line(jsonl: Write, tokenizer_folder: Make) -> None:
    bare = load_tokenizer(tokenizer_folder("bare"))
    chat = load_tokenizer(tokenizer_folder("chat", **config("chatml")))
    mute = load_tokenizer(tokenizer_folder("mute", eos_token=None))
    pair = PAIRS[0]
    asked, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    say, masked = {"messages": [asked, answer]}, {"messages": [asked, answer | {"weight": 0}]}
    cases: list[tuple[Any, Tokenizer, dict[str, Any], str]] = [
        (say, bare, {}, "has no chat template, and the data are chats; set data.chat_template"),
        (pair, bare, {"system_prompt": "x"}, "data.system_prompt: is written by a chat template"),
        ({"text": "t"}, chat, {"system_prompt": "x"}, "data.system_prompt: .* is raw text, which has none"),
        (pair, chat, {"prompt_template": "{question}"}, "set data.chat_template=none to use a prompt"),
        (pair, mute, {}, "names no eos token, so the model would never learn to stop"),
        (pair, bare, {"vocab_size": 50}, r"token '.*' has id \d+, the model's vocabulary ends at 49"),
        (pair, bare, {"seq_len": 4}, "all 1 rows are masked: no document has a target within data.seq_len=4"),
        (
            pair,
            bare,
            {"eval_fraction": 0.5},
            "data.eval_fraction: .* gives one document, and each side needs",
        ),
        (masked, chat, {}, r"all 1 rows are masked: none of their answers is learned .weight 0"),
    ]
    for row, tokenizer, keys, message in cases:
        with pytest.raises(UserError, match=message):
            run(jsonl(row), tokenizer, **keys)
    some = run(jsonl(masked, say), chat)
    assert "note: dropped 1 documents of which no answer is learned: weight 0" in "\n".join(some.report)
    with pytest.raises(UserError, match="gives 2 documents with one and the same prompt"):
        run(jsonl(pair, pair | {"answer": "b"}), bare, eval_fraction=0.5)
    filled = run(jsonl(pair), chat, chat_template="none", prompt_template="{question}")
    assert filled.train.num_documents == 1
    assert run(jsonl({"text": "some text"}), mute).train.num_documents == 1


def test_notes_tell_what_nobody_asked_for(jsonl: Write, tokenizer_folder: Make) -> None:
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}],
    }
    row = {"messages": [{"role": "user", "content": "{{name}}"}, call], "tools": [{"name": "f"}]}
    tokenizer = load_tokenizer(tokenizer_folder(**config("chatml")))
    prepared = run(jsonl(row), tokenizer)
    report = "\n".join(prepared.report)
    assert "does not write the tool calls of 1 conversations: they are written as JSON text" in report
    assert "does not write 1 tool definitions: they are left out" in report
    assert "1 rows hold placeholders such as {{name}}" in report
    assert texts(prepared, tokenizer)[0][1] == '{"name": "f", "arguments": {"x": 1}}<|im_end|>'


OPEN = "the last answer of 1 of 2 conversations: there the model will not learn where to stop"
MARKS_ALONE = CHATML_MARKED.replace(
    " + '<|im_end|>' }}{% endgeneration %}", " }}{% endgeneration %}<|im_end|>"
)
EOS_LAST = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if messages[-1].role == 'assistant' %}{{ '<|endoftext|>' }}{% endif %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (WITHOUT_SPECIAL_TOKENS, OPEN.replace("1 of", "2 of")),
        (MARKS_ALONE, OPEN.replace("1 of", "2 of")),
        (EOS_LAST, OPEN),
        (CHATML_MARKED, None),
        (CHATML, None),
        (QWEN3, None),
        (LLAMA3, None),
        (GEMMA, None),
        (MISTRAL, None),
    ],
)
def test_conversations_that_do_not_teach_to_stop_are_counted(
    jsonl: Write, tokenizer_folder: Make, template: str, expected: str | None
) -> None:
    """By the spans that are learned, however they were found. The user ends the second conversation."""
    pair = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "</s>"}
    tokenizer = load_tokenizer(tokenizer_folder(**names), template)
    report = run(jsonl({"messages": pair}, {"messages": [*pair, pair[0]]}), tokenizer).report
    notes = [line for line in report if "learn where to stop" in line]
    assert len(notes) == (expected is not None)
    assert expected is None or expected in notes[0]
    if template == MARKS_ALONE:  # the token is learned, like every other one
        learned = run(jsonl({"messages": pair}), tokenizer, train_on_prompt=True).report
        assert not any("learn where to stop" in line for line in learned)


def test_a_line_break_that_the_shell_did_not_make_is_noted(jsonl: Write, tokenizer: Tokenizer) -> None:
    row = {"question": "q", "answer": "a"}
    for template, expected in (("Q: {question}\\nA: ", 1), ("Q: {question}\nA: ", 0)):
        report = run(jsonl(row), tokenizer, chat_template="none", prompt_template=template).report
        assert sum("data.prompt_template holds a backslash" in line for line in report) == expected


def test_the_report_counts_documents_tokens_targets_and_fill(jsonl: Write, tokenizer: Tokenizer) -> None:
    prepared = run(jsonl(*PAIRS), tokenizer, eval_fraction=0.25)
    train, evaluation = prepared.train, prepared.evaluation
    assert evaluation is not None
    assert prepared.report[0].endswith(
        "rows.jsonl: 40 rows as pairs (prompt: question, response: answer), plain layout"
    )
    for name, rows in (("training", train), ("evaluation", evaluation)):
        line = (
            f"{name}: {rows.num_documents:,} documents, {rows.num_tokens:,} tokens, "
            f"{rows.num_target_tokens:,} of them in the loss\n"
            f"  {rows.num_rows:,} rows of 256 tokens, {rows.fill:.1%} full"
        )
        assert line in prepared.report


@given(st.lists(st.integers(0, 30), min_size=1, max_size=100), st.floats(0.001, 0.999), st.integers(0, 5))
def test_splits_keep_prompts_whole_and_both_sides_alive(keys: list[int], fraction: float, seed: int) -> None:
    held_out = split_by_prompt(np.array(keys, dtype=np.uint64), fraction, seed)
    if len(set(keys)) == 1:
        assert held_out is None
        return
    assert held_out is not None
    assert 0 < held_out.sum() < len(keys)
    assert not {k for k, h in zip(keys, held_out, strict=True) if h} & {
        k for k, h in zip(keys, held_out, strict=True) if not h
    }
    largest = max(Counter(keys).values())
    assert abs(held_out.sum() - fraction * len(keys)) <= largest + 1


def test_the_evaluation_source_has_a_split_of_its_own(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def read(source: str, *args: Any, split: str, **keys: Any) -> Any:
        asked.append((source, split))
        return iter([Row(source, {"question": split, "answer": "a"})])

    monkeypatch.setattr(sys.modules[prepare.__module__], "read_rows", read)
    run("a/b", tokenizer, eval_source="a/b", eval_split="test")
    run("a/b", tokenizer, eval_source="c/d", split="dev")
    assert asked == [("a/b", "train"), ("a/b", "test"), ("a/b", "dev"), ("c/d", "dev")]
    # All files of a folder would be read, those that are trained on among them.
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "train.jsonl").write_text("{}")
    here: dict[str, Any] = {"eval_source": str(tmp_path / "a"), "eval_split": "test"}
    refused = r"^data.eval_source: .* is on this machine, .* of 'test' as a source"
    with pytest.raises(UserError, match=refused):
        run("a/b", tokenizer, **here)
    with pytest.raises(UserError, match=refused):
        prepare_evaluation(DataConfig(source="a/b", **here), tokenizer, seed=0, vocab_size=1000)
    with pytest.raises(UserError, match=r"data.eval_split: belongs to data.eval_source"):
        DataConfig(source="a/b", eval_split="test")


def test_a_tokenizer_without_the_configs_chat_template_is_refused(
    tokenizer_folder: Make, jsonl: Write
) -> None:
    cfg = DataConfig(source=jsonl(PAIRS[0]), seq_len=256, cache="none", chat_template=CHATML)
    folder = tokenizer_folder()
    for given_template in (None, "none"):
        with pytest.raises(ValueError, match=r"load_tokenizer\(folder, cfg.data.chat_template\)"):
            prepare(cfg, load_tokenizer(folder, given_template), seed=0, vocab_size=600)
