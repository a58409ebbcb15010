"""What is printed of a stranger's file is shown by a terminal, never obeyed."""

import pytest

from lptune.base.errors import DivergedError, UserError
from lptune.base.text import flop_text, printable, size_text

ESCAPES = "\x1b]0;title\x07\x1b[2J \x9b31m a\rb \u202egnp.exe \u200b \x7f \udcff"


def test_errors_and_texts_hold_no_control_characters() -> None:
    for text in (str(UserError(ESCAPES)), str(DivergedError(ESCAPES)), printable(ESCAPES)):
        assert text.isprintable()
        assert r"\x1b]0;title\x07" in text
    assert r"\u202e" in printable(ESCAPES)


@pytest.mark.parametrize("text", ["", "a plain line", "tab\tand\nline", "é 漢字 🎉 Ġ ▁"])
def test_text_stays_as_it_is(text: str) -> None:
    assert printable(text) == text


@pytest.mark.parametrize(
    ("number", "size", "flop"),
    [(0, "0 B", "0 FLOP"), (999, "999 B", "999 FLOP"), (4120, "4.1 kB", "4.1 kFLOP"),
     (1.5e6, "1.5 MB", "1.5 MFLOP"), (2e12, "2,000.0 GB", "2,000.0 GFLOP")],
)  # fmt: skip
def test_a_small_number_is_not_shown_as_zero(number: float, size: str, flop: str) -> None:
    assert (size_text(number), flop_text(number)) == (size, flop)
