"""Templates by name write what the published templates write, and answers end where a model can stop.

The texts are those of the published templates (of the instruct checkpoints, and for ChatML and Zephyr of
their model cards), rendered by transformers.
"""

from pathlib import Path
from typing import Any

import pytest

from lptune.base.errors import UserError
from lptune.config import DataConfig
from lptune.data import load_tokenizer, prepare
from lptune.data.named_templates import NAMED_TEMPLATES, note_on_missing, suggested
from lptune.data.turns import TurnFinder
from tests.helpers.documents import Load, Make, Write

CONVERSATION = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": "a\nb "},
    {"role": "assistant", "content": " c "},
    {"role": "user", "content": "d"},
    {"role": "assistant", "content": "e"},
]
PUBLISHED = {
    "chatml": "<|im_start|>system\nBe brief. <|im_end|>\n<|im_start|>user\na\nb <|im_end|>\n"
    "<|im_start|>assistant\n c <|im_end|>\n<|im_start|>user\nd<|im_end|>\n"
    "<|im_start|>assistant\ne<|im_end|>\n",
    "gemma": "<s><start_of_turn>user\nBe brief. \n\na\nb<end_of_turn>\n<start_of_turn>model\nc<end_of_turn>\n"
    "<start_of_turn>user\nd<end_of_turn>\n<start_of_turn>model\ne<end_of_turn>\n",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\na\nb<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nc<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nd<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\ne<|eot_id|>",
    "mistral": "<s>[SYSTEM_PROMPT]Be brief. [/SYSTEM_PROMPT][INST]a\nb [/INST] c </s>[INST]d[/INST]e</s>",
    "phi": "<|system|>\nBe brief. <|end|>\n<|user|>\na\nb <|end|>\n<|assistant|>\n c <|end|>\n"
    "<|user|>\nd<|end|>\n<|assistant|>\ne<|end|>\n</s>",
    "zephyr": "<|system|>\nBe brief. </s>\n<|user|>\na\nb </s>\n<|assistant|>\n c </s>\n"
    "<|user|>\nd</s>\n<|assistant|>\ne</s>\n",
}
ENDS = {"chatml": "<|im_end|>", "gemma": "<end_of_turn>", "llama3": "<|eot_id|>", "phi": "<|end|>"}
PROMPTS = {
    "chatml": "<|im_start|>assistant\n",
    "gemma": "<start_of_turn>model\n",
    "llama3": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "",
    "phi": "<|assistant|>\n",
    "zephyr": "<|assistant|>\n",
}
TOKENS: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("name", NAMED_TEMPLATES)
def test_it_writes_the_published_text_and_answers_end_with_the_familys_token(
    tokenizer_folder: Make, name: str
) -> None:
    ends = [*ENDS.values()]
    tokenizer = load_tokenizer(tokenizer_folder(**TOKENS, additional_special_tokens=ends), name)
    assert tokenizer.template is not None
    turns = TurnFinder(tokenizer.template).find(CONVERSATION)
    assert turns.text == PUBLISHED[name]
    strip = str.strip if name in ("gemma", "llama3") else str
    learned = [turns.text[start:stop] for start, stop in turns.spans]
    assert learned == [strip(text) + ENDS.get(name, "</s>") for text in (" c ", "e")]
    assert turns.is_closed
    asked = tokenizer.render_chat(CONVERSATION[:2], add_generation_prompt=True)
    begun = PUBLISHED[name][: turns.spans[0][0]]
    assert asked == begun
    assert asked.endswith(PROMPTS[name])


@pytest.mark.parametrize(
    ("special", "name"),
    [
        (["<start_of_turn>", "<end_of_turn>"], "gemma"),
        (["<|im_start|>", "<|im_end|>"], "chatml"),
        (["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], "llama3"),
        (["<|user|>", "<|assistant|>", "<|end|>"], "phi"),
        (["[INST]", "[/INST]"], "mistral"),
        ([], "zephyr"),
    ],
)
def test_a_tokenizer_without_a_template_is_told_the_one_of_its_tokens(special: list[str], name: str) -> None:
    assert suggested(["<s>", "</s>", *special]).startswith(f"set data.chat_template={name} ")


@pytest.mark.parametrize(
    ("name", "missing", "fits"),
    [
        ("mistral", ["[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"], "chatml"),
        ("phi", ["<|user|>", "<|assistant|>", "<|end|>", "<|system|>"], "chatml"),
        ("llama3", ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], "chatml"),
        ("chatml", [], ""),
        ("zephyr", [], ""),
        ("none", [], ""),
    ],
)
def test_a_template_whose_tokens_the_tokenizer_splits_is_one_note(
    asset_tokenizer: Load, jsonl: Write, name: str, missing: list[str], fits: str
) -> None:
    tokenizer = asset_tokenizer("tokenizers/qwen2").with_chat_template(name)
    sources = [
        jsonl(*({"question": f"{i}", "answer": "a"} for i in range(4)), name=f"{n}.jsonl") for n in "ab"
    ]
    cfg = DataConfig(source=sources, chat_template=name, seq_len=64, cache="none")
    report = prepare(cfg, tokenizer, seed=0, vocab_size=tokenizer.vocab_size).report
    notes = [line for line in report if line.startswith(f"note: data.chat_template={name}: ")]
    assert len(notes) == bool(missing)
    for note in notes:
        assert note.split(": ")[2].split(" are ")[0].split(", ") == missing
        assert note.endswith(f"; {fits} fits it")
        assert all(len(tokenizer.encode(text)) > 1 for text in missing)


def test_a_familys_tokenizer_without_its_tokens_for_a_system_message_is_told_those_alone() -> None:
    note = note_on_missing("mistral", ["[INST]", "[/INST]"])
    assert "=mistral: [SYSTEM_PROMPT], [/SYSTEM_PROMPT] are" in note
    assert "fits" not in note


@pytest.mark.parametrize(("name", "is_told"), [("zephyr", True), ("llama3", False)])
def test_a_template_without_the_start_token_that_the_tokenizer_puts_before_text_is_told(
    assets: Path, jsonl: Write, name: str, is_told: bool
) -> None:
    cfg = DataConfig(
        source=jsonl({"question": "a", "answer": "b"}), chat_template=name, cache="none", seq_len=64
    )
    tokenizer = load_tokenizer(assets / "tokenizers" / "llama2", name)
    report = prepare(cfg, tokenizer, seed=0, vocab_size=tokenizer.vocab_size).report
    assert any("rows do not begin with <s>, which" in line for line in report) == is_told


def test_a_misspelt_name_is_told_the_names(tokenizer_folder: Make) -> None:
    with pytest.raises(UserError, match=r"'chatlm' is neither .*zephyr \(did you mean 'chatml'\?\)"):
        load_tokenizer(tokenizer_folder(), "chatlm")
