"""A phase is told where it begins and where it ends: in place on a terminal, in lines elsewhere."""

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import pytest

from lptune.base import progress
from lptune.base.text import duration_text


class Terminal(io.StringIO):
    """A screen that both streams write to; `lines` is what a user sees."""

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """What is left after carriage returns and cursor-ups, without empty lines at the end."""
        screen, row, column = [""], 0, 0
        text = self.getvalue().replace("\x1b[A", "\x0b")
        for char in text:
            if char == "\n":
                row, column = row + 1, 0
                screen += [""] * (row + 1 - len(screen))
            elif char == "\r":
                column = 0
            elif char == "\x0b":
                row -= 1
            else:
                line = screen[row].ljust(column)
                screen[row], column = line[:column] + char + line[column + 1 :], column + 1
        shown = [line.rstrip() for line in screen]
        while shown and not shown[-1]:
            shown.pop()
        return shown


@contextmanager
def terminal() -> Iterator[Terminal]:
    """Both streams are a terminal of 80 columns. No fixture: pytest sets the streams after those."""
    screen = Terminal()
    with redirect_stdout(screen), redirect_stderr(screen), pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        yield screen


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, as the only element."""
    now = [100.0]
    monkeypatch.setattr("lptune.base.progress.time.perf_counter", lambda: now[0])
    return now


def test_without_a_terminal_a_phase_is_a_line_at_its_begin_and_one_at_its_end(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with progress.phase("loading weights"):
        assert capsys.readouterr().out == "loading weights ...\n"
        clock[0] += 3.14
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("loading weights: 3.1 s\n", "")
    with progress.phase("saving"):
        clock[0] += 0.09
    assert capsys.readouterr().out == "saving ...\n", "too short for a second line"


def test_on_a_terminal_a_phase_leaves_one_line(clock: list[float]) -> None:
    with terminal() as screen:
        with progress.phase("loading weights"):
            assert screen.lines() == ["loading weights ..."]
            progress.print_line("note: 2 files")
            assert screen.lines() == ["note: 2 files", "loading weights ..."]
            with progress.in_place("compiling {x} ..."):
                assert screen.lines() == ["note: 2 files", "loading weights ...", "compiling {x} ..."]
            clock[0] += 75.0
        with progress.phase("saving"):
            clock[0] += 0.09
    assert screen.lines() == ["note: 2 files", "loading weights: 1 min 15 s"]
    assert "\x1b" not in screen.getvalue().replace("\x1b[A", ""), "no colours"


def test_what_is_shown_in_place_fits_the_terminal() -> None:
    with terminal() as screen, progress.in_place("verifying " + 200 * "x"):
        (line,) = screen.lines()
    assert line.startswith("verifying xxx")
    assert len(line) <= 80


def test_a_phase_that_fails_says_nothing_at_its_end(clock: list[float]) -> None:
    def fail() -> None:
        with progress.phase("loading weights"):
            clock[0] += 9.0
            raise ZeroDivisionError

    with terminal() as screen, pytest.raises(ZeroDivisionError):
        fail()
    assert screen.lines() == []


def test_of_work_in_the_background_only_the_end_is_told(clock: list[float]) -> None:
    with terminal() as screen, progress.phase("saved step-00000010", in_background=True):
        assert screen.getvalue() == ""
        clock[0] += 2.0
    assert screen.lines() == ["saved step-00000010: 2.0 s"]


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [(0.04, "0.0 s"), (57.24, "57.2 s"), (59.96, "1 min 0 s"), (200.0, "3 min 20 s"), (3899.6, "1 h 5 min")],
)
def test_durations_are_text(duration_s: float, text: str) -> None:
    assert duration_text(duration_s) == text


def test_a_phase_that_knows_its_total_gets_a_bar(clock: list[float]) -> None:
    with terminal() as screen, progress.phase("loading {w}", total=400) as advance:
        advance(100)
        advance(100)
        clock[0] += 5.0
        assert screen.lines()[-1].startswith("loading {w}  ")
        assert "|" in screen.lines()[-1]
        assert all(len(line) <= 80 for line in screen.lines())
    assert screen.lines() == ["loading {w}: 5.0 s"]


def test_without_a_terminal_a_long_phase_tells_its_share_each_minute(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with progress.phase("loading weights", total=400) as advance:
        for _ in range(4):
            clock[0] += 35.0
            advance(100)
    assert capsys.readouterr().out.splitlines() == [
        "loading weights ...",
        "loading weights: 50% ...",
        "loading weights: 100% ...",
        "loading weights: 2 min 20 s",
    ]


def test_another_clock_may_stand_still(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """So a phase does not count what is told apart, as torch.compile is."""
    own = [0.0]
    with progress.phase("answering", clock=lambda: own[0]):
        clock[0] += 60.0
        own[0] += 2.0
    assert capsys.readouterr().out.splitlines() == ["answering ...", "answering: 2.0 s"]


def test_what_has_no_known_end_is_counted(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with terminal() as screen, progress.counting("tokenizing {x}.jsonl", "documents") as advance:
        advance(12_000)
        clock[0] += 1.0
        advance(345)
        assert screen.lines() == ["tokenizing {x}.jsonl: 12,345 documents"]
    assert screen.lines() == []
    with progress.counting("tokenizing x.jsonl", "documents") as advance:
        for _ in range(3):
            clock[0] += 45.0
            advance(1_000)
    assert capsys.readouterr().out == "tokenizing x.jsonl: 2,000 documents ...\n"
