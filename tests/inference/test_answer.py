"""Text is shown as soon as it is final: never half a character, never the begin of a stop text."""

from pathlib import Path

import pytest

from lptune.data import Tokenizer, load_tokenizer
from lptune.inference import Answer

TEXTS = [
    "A family: \U0001f468\u200d\U0001f469\u200d\U0001f467 eats \u5bff\u53f8.",
    "na\u00efve  spaces\n\nand\ttabs ",
    "\u0928\u092e\u0938\u094d\u0924\u0947",
    "plain words",
]


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    """Byte-level, so a character of other scripts is several tokens."""
    return load_tokenizer(checkpoint)


def pieces(answer: Answer, ids: list[int]) -> list[str]:
    found = []
    for token in ids:
        answer.add(token)
        found.append(answer.piece)
        if answer.is_done:
            break
    return found


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_whole_characters_and_add_up_to_the_decoded_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special=False)
    answer = Answer(tokenizer, [tokenizer.eos_id or 0], (), 1000)
    shown = pieces(answer, [*ids, tokenizer.eos_id or 0])
    assert "".join(shown) == answer.text == tokenizer.decode(ids) == text
    assert not any("\ufffd" in piece for piece in shown)
    assert (answer.ended_by, answer.ids) == ("token", ids)


@pytest.mark.parametrize("name", ["gpt2", "llama2", "mistral_chatml", "qwen2"])
def test_pieces_of_real_tokenizers_add_up_to_the_decoded_text(assets: Path, name: str) -> None:
    tokenizer = load_tokenizer(assets / "tokenizers" / name)
    text = "".join((assets / "data" / "multilingual.txt").read_text(encoding="utf-8")[:1500])
    ids = tokenizer.encode(text, add_special=False)
    answer = Answer(tokenizer, (), (), len(ids))
    shown = pieces(answer, ids)
    assert "".join(shown) == answer.text == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in shown)
    assert answer.ended_by == "length"


def test_a_text_that_is_continued_keeps_the_space_before_its_first_word(assets: Path) -> None:
    tokenizer = load_tokenizer(assets / "tokenizers" / "llama2")
    prompt, whole = tokenizer.encode("Once upon"), tokenizer.encode("Once upon a time")
    for after, text in ((prompt, " a time"), ((), "a time")):
        answer = Answer(tokenizer, (), (), 2, after=after)
        pieces(answer, whole[len(prompt) :])
        assert answer.text == text


def test_an_answer_cut_within_a_character_ends_before_it(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ok \U0001f468", add_special=False)
    num_whole = len(tokenizer.encode("ok ", add_special=False))
    assert len(ids) > num_whole + 1
    answer = Answer(tokenizer, (), (), len(ids) - 1)
    assert "".join(pieces(answer, ids[:-1])) == answer.text == "ok "


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (("END",), "one two "),
        (("two EN", "END"), "one "),
        (("DX", "e t"), "on"),
        (("ENDLESS",), "one two END three"),
        (("three more",), "one two END three"),
    ],
)
def test_a_stop_text_ends_the_answer_wherever_tokens_begin(
    tokenizer: Tokenizer, stop: tuple[str, ...], text: str
) -> None:
    letters = [tokenizer.encode(letter, add_special=False)[0] for letter in "one two END three"]
    answer = Answer(tokenizer, (), stop, len(letters))
    shown = ""
    for token in letters:
        answer.add(token)
        shown += answer.piece
        assert text.startswith(shown), "what was shown cannot be taken back"
        if answer.is_done:
            break
    assert shown == answer.text == text
    assert answer.ended_by == ("length" if text.endswith("three") else "text")
