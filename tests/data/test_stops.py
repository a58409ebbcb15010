"""The tokens that the training rows end answers with are found, and no others."""

from collections.abc import Callable
from typing import Any

import pytest

from lptune.config import DataConfig, SourceConfig
from lptune.data import end_ids, learned_stops, load_tokenizer, prepare, prepare_preferences
from lptune.data import turns as module
from tests.helpers.chat_templates import TEMPLATES, config
from tests.helpers.documents import Make, Write

PAIR = {"prompt": "What is two plus two?", "response": "Two plus two is four."}
TEXT = {"text": "The capital of France is Paris."}
CHAT = config("chatml") | {"eos_token": "<|endoftext|>"}  # of a base model: its end is not that of a turn
# Ends a call with <eos>, an answer with <|im_end|>, as Llama 3 does with <|eom_id|> and <|eot_id|>.
CALLS = (
    "{% for m in messages %}{% if m['role'] != 'assistant' %}{{ '<s>' + m['content'] + '</s>' }}"
    "{% else %}{{ '[INST]' }}{% if m['tool_calls'] %}{{ m['tool_calls'][0]['function']['name'] + '<eos>' }}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[INST]' }}{% endif %}"
)
MARKS_WITHOUT_END = (
    "{% for m in messages %}{{ '<|im_start|>' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}"
    "{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
)


@pytest.fixture
def learned(tokenizer_folder: Make, jsonl: Write) -> Callable[..., set[str]]:
    """The texts of the tokens that training on `rows` teaches to stop with."""

    def find(*rows: Any, template: dict[str, Any] | None = None, **keys: Any) -> set[str]:
        tokenizer = load_tokenizer(tokenizer_folder(**template or {}))
        source = keys.pop("source", None) or jsonl(*rows)
        cfg = DataConfig(source=source, **{"seq_len": 256, "cache": "none", **keys})
        make = prepare_preferences if "chosen" in rows[0] else prepare
        train = make(cfg, tokenizer, seed=0, vocab_size=600).train
        found = learned_stops(train, tokenizer)
        assert all(tokenizer.backend.token_to_id(text) == each for text, each in found.items())
        return set(found)

    return find


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_teaches_the_token_that_closes_its_turns(learned: Callable[..., set[str]], name: str) -> None:
    closing = {"llama3": "<|eot_id|>", "llama3_always_prompts": "<|eot_id|>", "mistral": "</s>",
               "gemma": "<end_of_turn>", "r1": "</s>"}.get(name, "<|im_end|>")  # fmt: skip
    turns = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "Bye!"},
    ]
    assert learned({"messages": turns}, template=config(name)) == {closing}
    preference = {"prompt": "Hello", "chosen": "Hi.", "rejected": "No."}
    assert learned(preference, template={"name": "other", **config(name)}) == {closing}


def test_rows_without_a_template_and_raw_text_teach_the_end_token_alone(
    learned: Callable[..., set[str]],
) -> None:
    assert learned(PAIR) == {"<|endoftext|>"}
    # The tokenizer has a chat template, which raw text does not use.
    assert learned(TEXT, template={"name": "chat", **CHAT}) == {"<|endoftext|>"}


def test_a_tool_call_that_ends_differently_teaches_both(learned: Callable[..., set[str]]) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
    turns = [
        {"role": "user", "content": "Compute"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "four"},
    ]
    assert learned({"messages": turns}, template={"chat_template": CALLS}) == {"<eos>", "<|im_end|>"}


def test_marks_that_leave_out_the_end_teach_no_stop(learned: Callable[..., set[str]]) -> None:
    assert learned(PAIR, template={"chat_template": MARKS_WITHOUT_END}) == set()


def test_where_prompts_are_learned_too_the_end_is_found_before_the_templates_line_break(
    learned: Callable[..., set[str]],
) -> None:
    assert learned(PAIR, template=CHAT, train_on_prompt=True) == {"<|im_end|>"}


def test_the_place_where_a_document_was_cut_is_no_end(
    learned: Callable[..., set[str]], tokenizer_folder: Make
) -> None:
    folder = tokenizer_folder("measured", **CHAT)
    chat = load_tokenizer(folder)
    answer = "Two <bos> three four"  # a special token within the answer
    messages = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": answer}]
    ids = chat.encode(chat.render_chat(messages), add_special=False)
    cut = ids.index(chat.backend.token_to_id("<bos>")) + 1
    row = {"prompt": "Count", "response": answer}
    assert learned(row, {"prompt": "A", "response": "B"}, template=CHAT, seq_len=cut) == {"<|im_end|>"}


@pytest.mark.parametrize("size", [1, 7, 50])
def test_what_is_found_depends_on_no_piece_or_source(
    learned: Callable[..., set[str]], jsonl: Write, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(module, "PIECE_TOKENS", size)
    both = (SourceConfig(source=jsonl(PAIR, PAIR, name="a.jsonl")),
            SourceConfig(source=jsonl(TEXT, TEXT, name="b.jsonl")))  # fmt: skip
    found = learned(PAIR, template=CHAT, source=both)
    assert found == {"<|im_end|>", "<|endoftext|>"}


def test_generation_with_a_checkpoint_ends_at_what_its_rows_taught(
    tokenizer_folder: Make,
) -> None:
    import dataclasses

    tokenizer = load_tokenizer(tokenizer_folder())
    assert end_ids(dataclasses.replace(tokenizer, learned_stops=(3,))) == sorted({tokenizer.eos_id, 3})
