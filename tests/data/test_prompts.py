"""Prompts are written as training writes them, and as transformers does."""

from pathlib import Path
from typing import Any

import pytest

from lptune.base.errors import UserError
from lptune.config import DataConfig, PromptsConfig
from lptune.data import Tokenizer, end_ids, load_tokenizer, prepare, read_prompts
from tests.helpers.chat_templates import config
from tests.helpers.documents import Make, Write
from tests.helpers.tiny_recipe import make_checkpoint


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny"))


def ids(tokenizer: Tokenizer, source: str, **keys: Any) -> list[list[int]]:
    cfg = PromptsConfig(source=source, **keys)
    return [prompt.ids for prompt in read_prompts(cfg, tokenizer, tokenizer.vocab_size)]


ROWS = {
    "pairs": {"instruction": "Add the numbers.", "input": "2 and 3", "output": "5"},
    "question": {"question": "What is 2 + 3?", "answer": "5"},
    "chat": {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello!", "weight": 0},  # so the last answer is the learned one
            {"role": "user", "content": "And now?"},
            {"role": "assistant", "content": "Bye"},
        ]
    },
}


@pytest.mark.parametrize(("rows", "template"), [("pairs", True), ("question", True), ("chat", True),
                                                ("pairs", False), ("question", False)])  # fmt: skip
def test_a_prompt_is_what_training_puts_before_the_answer(
    tokenizer: Tokenizer, jsonl: Write, rows: str, template: bool
) -> None:
    chosen = tokenizer if template else tokenizer.with_chat_template("none")
    source = jsonl(ROWS[rows])
    cfg = DataConfig(source=source, chat_template=None if template else "none", seq_len=256, cache="none")
    packed = prepare(cfg, chosen, seed=0, vocab_size=tokenizer.vocab_size).train
    before, answer = packed.prompt_and_answer(0)
    assert len(answer)
    assert ids(chosen, source) == [list(before)]


def test_raw_text_and_templates_are_continued_as_they_stand(tokenizer: Tokenizer, jsonl: Write) -> None:
    plain = tokenizer.with_chat_template("none")
    source = jsonl({"text": "Once upon", "n": 3})
    prefix = list(tokenizer.prefix_ids)
    assert ids(plain, source) == [prefix + tokenizer.encode("Once upon", add_special=False)]
    filled = prefix + tokenizer.encode("3. Once upon:", add_special=False)
    assert ids(plain, source, prompt_template="{n}. {text}:") == [filled]


@pytest.mark.parametrize(
    ("row", "keys", "message"),
    [
        ({"a": "x"}, {}, "no column for the prompt among a; set prompts.prompt_column"),
        ({"question": "x", "problem": "y"}, {}, "could each be the prompt; set prompts.prompt_column"),
        ({"question": ""}, {}, "rows.jsonl line 1: column 'question' is empty"),
        ({"question": ["x"]}, {}, "must be text, found a list"),
        ({"question": "\ud83d"}, {}, "half of a surrogate pair"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, {}, "no message before the assistant's"),
        ({"question": "x"}, {"prompt_template": "{x}"}, "prompts.chat_template=none"),
        (
            {
                "messages": [{"role": "user", "content": "x"}],
                "tools": [{"name": "f"}],
                "functions": [{"name": "g"}],
            },
            {},
            "columns tools, functions could each be the tools; keep one of them",
        ),
    ],
)
def test_rows_that_cannot_be_used_get_one_line(
    tokenizer: Tokenizer, jsonl: Write, row: dict[str, Any], keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as raised:
        ids(tokenizer, jsonl(row), **keys)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.txt", ""),  # no rows
        ("rows.jsonl", '{"question": "x"}\n{"question"'),  # no JSON, in a row that is read later
        ("rows.jsonl", "not json"),
        ("rows.docx", "x"),  # an unknown kind
        ("none/rows.jsonl", None),
        ("rows.jsonl", '{"question": [{"role": "user", "content": "x"}]}'),
    ],
)
def test_errors_of_rows_name_keys_of_prompts(
    tokenizer: Tokenizer, tmp_path: Path, name: str, text: str | None
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as raised:
        ids(tokenizer, str(tmp_path / name))
    assert "data." not in str(raised.value)
    assert "train" not in str(raised.value)


def test_columns_are_checked_before_the_first_prompt_is_asked_for(tokenizer: Tokenizer, jsonl: Write) -> None:
    cfg = PromptsConfig(source=jsonl({"question": "x"}), prompt_column="questoin")
    with pytest.raises(UserError, match="did you mean 'question'"):
        read_prompts(cfg, tokenizer, tokenizer.vocab_size)


def test_an_answer_ends_with_every_token_that_the_files_name(tokenizer_folder: Make) -> None:
    folder = tokenizer_folder(**config("chatml") | {"eos_token": "<|endoftext|>"})
    tokenizer = load_tokenizer(folder)
    own = {tokenizer.eos_id, tokenizer.backend.token_to_id("<|im_end|>")}
    assert set(end_ids(tokenizer)) == own
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}', encoding="utf-8")
    assert set(end_ids(tokenizer)) == own | {7, 9}
    (folder / "generation_config.json").write_text('{"eos_token_id": "7"}', encoding="utf-8")
    with pytest.raises(UserError, match="expected a token id or a list of them, found '7'"):
        end_ids(tokenizer)
