"""Samples: the question without the words of the chat template, and the rows of samples.jsonl."""

from pathlib import Path

import pytest

from lptune.data import load_tokenizer
from lptune.training.samples import Sample, _around_a_question, _lines, _question
from tests.helpers.tiny_recipe import make_checkpoint

# What is left of each template around a question when special tokens are not decoded.
TEMPLATES = {
    "ChatML": ("system\nYou are helpful.\nuser\n", "\nassistant\n"),
    "Llama 3": ("system\n\nCutting Knowledge Date: December 2023\n\nuser\n\n", "assistant\n\n"),
    "Gemma": ("user\n", "\nmodel\n"),
    "Mistral": ("[INST] ", " [/INST]"),
    "none": ("", ""),
}


def _around(name: str) -> tuple[str, str]:
    before, after = TEMPLATES[name]
    return (before.split() or [""])[-1], after.strip()


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("question", ["What is 9 plus 8?", "Sort these:\n- b\n- a", "user"])
def test_a_question_is_shown_without_the_words_of_its_template(name: str, question: str) -> None:
    before, after = TEMPLATES[name]
    assert _question((before + question + after).strip(), *_around(name)) == question


def test_of_a_conversation_the_last_question_is_shown() -> None:
    talk = "user\nHello\nassistant\nHi, user\nuser\nWhat is 2 + 2?\nassistant"
    assert _question(talk, *_around("ChatML")) == "What is 2 + 2?"


def test_a_prompt_of_another_layout_is_shown_as_it_is() -> None:
    assert _question("Translate: hello", *_around("ChatML")) == "Translate: hello"


def test_lines_fit_80_columns_and_a_right_answer_is_written_once() -> None:
    sample = Sample(step=9, when="after training", prompt="p" * 300, answer="a b " * 90, reference="r")
    assert all(len(line) <= 80 for line in _lines(sample))
    right = Sample(step=9, when="after training", prompt="2 + 2?", answer="4", reference="4")
    assert _lines(right) == ["  2 + 2?", "    answer     4 (exact)"]
    silent = Sample(step=9, when="after training", prompt="2 + 2?", answer="", reference="4")
    assert _lines(silent)[1:] == ["    answer     (nothing)", "    reference  4"]


def test_the_tokenizers_template_is_asked(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "tiny")
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = load_tokenizer(folder, template)
    before, after = _around_a_question(tokenizer)
    text = tokenizer.render_chat([{"role": "user", "content": "Why?"}], add_generation_prompt=True)
    prompt = tokenizer.decode(tokenizer.encode(text, add_special=False)).strip()
    assert _question(prompt, before, after) == "Why?"
    assert _around_a_question(load_tokenizer(folder, "none")) == ("", "")
    refusing = load_tokenizer(folder, "{{ raise_exception('a system message first') }}")
    assert _around_a_question(refusing) == ("", "")
