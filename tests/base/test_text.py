"""What is printed of a stranger's file is shown by a terminal, never obeyed."""

import pytest

from lptune.base.errors import DivergedError, UserError
from lptune.base.text import fitted, flop_text, printable, size_text, table, wrapped

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


def test_a_table_is_aligned_ruled_and_without_blanks_at_the_ends_of_lines() -> None:
    rows = [("name", "n", "why"), ("a", "10", ""), ("bc", "9", "x y")]
    assert table(rows, "<><", indent=2, rule=True) == [
        "  name   n  why", "---------------", "  a     10", "  bc     9  x y",
    ]  # fmt: skip
    assert table(rows[:1], "<>") == ["name  n  why"]
    assert table([]) == []


def test_lines_hang_and_only_paths_are_cut() -> None:
    assert wrapped("a bc def", 6, 1, 2) == [" a bc", "   def"]
    assert wrapped("abc-defghi", 5) == ["abc-defghi"]
    assert wrapped("abcdefghi", 5, break_words=True) == ["abcde", "fghi"]


def test_a_terminal_breaks_no_word_of_a_sentence_and_no_row_of_a_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sentence, row = "  word" + " word" * 20, "q_proj  " * 15
    monkeypatch.setenv("COLUMNS", "60")
    for is_terminal in (False, True):
        monkeypatch.setattr("sys.stdout.isatty", lambda is_terminal=is_terminal: is_terminal)
        lines = fitted(f"{sentence}\n{row}").split("\n")
        assert lines[-1] == row
        assert " ".join(" ".join(lines[:-1]).split()) == sentence.strip()
        assert len(lines) == (3 if is_terminal else 2)
    assert max(map(len, lines[:-1])) <= 60
    assert [len(line) - len(line.lstrip()) for line in lines[:-1]] == [2, 4]
