"""Ctrl-C and SIGTERM in the commands that save nothing: 128 + n, no traceback, nothing left half written."""

import os
import signal
from pathlib import Path

import pytest

from lptune.cli import interrupts, new_checkpoint
from tests.cli.conftest import Command, Lptune
from tests.helpers.cold import ROOT

DISTURBED = """\
import os, signal, time
try:
    os.kill(os.getpid(), signal.{name})
    time.sleep(10)
except BaseException:  # as some module of numpy does
    pass
raise AttributeError("half imported")
"""


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_while_modules_are_imported_ends_a_command_without_a_word(
    lptune: Lptune, tmp_path: Path, name: str, code: int
) -> None:
    (tmp_path / "click.py").write_text(DISTURBED.format(name=name))
    done = lptune("ls", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


@pytest.mark.parametrize(
    ("number", "swallowed"), [(signal.SIGINT, False), (signal.SIGTERM, True), (signal.SIGHUP, False)]
)
def test_a_signal_while_a_folder_is_written_leaves_nothing_of_it(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, swallowed: bool
) -> None:
    def write(*_: object) -> int:
        assert any(tmp_path.iterdir())
        try:
            interrupts._react(number, None)
        except SystemExit:
            if not swallowed:
                raise
        raise AttributeError("half imported")

    monkeypatch.setattr(interrupts, "_received", 0)
    monkeypatch.setattr(new_checkpoint, "_write_weights", write)
    code, stdout, stderr = command("new-checkpoint", "llama3_2/tiny", "new")
    assert (code, stdout, stderr) == (128 + number, "", "")
    assert not any(tmp_path.iterdir())


def test_a_second_signal_does_not_end_the_undoing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "_received", 0)
    undone = []

    def disturbed() -> None:
        with interrupts.Undoing():
            try:
                interrupts._react(signal.SIGINT, None)
            finally:
                interrupts._react(signal.SIGTERM, None)
                undone.append("all")

    with pytest.raises(SystemExit) as exit_:
        disturbed()
    assert (exit_.value.code, undone) == (130, ["all"])


def test_a_signal_while_a_file_is_copied_leaves_nothing_of_it(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts, "_received", 0)
    monkeypatch.setattr(Path, "replace", lambda *_: interrupts._react(signal.SIGTERM, None))
    monkeypatch.setattr(os, "_exit", lambda code: None)  # as it would end without anything undone
    assert command("cp", "full_finetune", "mine.py") == (143, "", "")
    assert not any(tmp_path.iterdir())
