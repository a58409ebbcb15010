"""stdout and stderr of a run: a print that fails must not end the run.

If a terminal is closed, `| head` ends, or the disk of `> log` is full, each print raises, perhaps in the
middle of a step or a save. In a run such a print is dropped, and the first dropped print of a stream is
reported on the other stream. A command that only prints fails with OutputLostError instead, and so does a
chat, whose answers exist nowhere else (`must_be_written`).
"""

import contextlib
import io
import select
import sys
from collections.abc import Callable
from typing import Any, TextIO


class OutputLostError(OSError):
    """stdout cannot be written. The message is one line."""

    @property
    def exit_code(self) -> int:
        """141 for a closed pipe, like a process that SIGPIPE ended (`lptune ls | head`); otherwise 2."""
        return 141 if isinstance(self.__cause__, BrokenPipeError) else 2


def guard(ends_command: bool, escape: Callable[[str], str] = str) -> None:
    """Replaces sys.stdout and sys.stderr by streams that survive failures and write any text.

    ends_command: the first failing write to stdout raises OutputLostError. escape: applied to each text for
    stdout.
    """
    sys.stdout = _stream(sys.stdout, _Output(1, "stdout", ends_command), escape)
    sys.stderr = _stream(sys.stderr, _Output(2, "stderr", ends_command), str)


def _stream(before: TextIO | None, output: "_Output", escape: Callable[[str], str]) -> TextIO:
    # As Python makes its streams: without a buffer under `-u`.
    unbuffered = getattr(before, "write_through", False)
    stream = _Text(
        output if unbuffered else io.BufferedWriter(output),
        encoding=getattr(before, "encoding", "utf-8"),
        errors="backslashreplace",
        line_buffering=getattr(before, "line_buffering", True),
        write_through=unbuffered,
    )
    stream.escape, stream.output = escape, output
    return stream


class _Text(io.TextIOWrapper):
    escape: Callable[[str], str]
    output: "_Output"

    def must_be_written(self) -> None:
        """From now on a write that fails raises OutputLostError, though the command is a run."""
        self.output.ends_command, self.output.is_lost = True, False

    def write(self, text: str, /) -> int:
        # TypeError for bytes is right: by it click finds out which kind of stream this is.
        super().write(self.escape(text) if isinstance(text, str) else text)
        return len(text)


class _Output(io.FileIO):
    """A descriptor whose writes do not fail in a run: it passes on what it can and drops the rest."""

    def __init__(self, descriptor: int, name: str, ends_command: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.name = f"<{name}>"
        self._label, self.ends_command, self.is_lost = name, ends_command, False

    def write(self, data: Any, /) -> int:
        """Writes all of `data`, even if the descriptor takes a part at a time, or nothing for a while."""
        view = memoryview(data).cast("B")
        written = 0
        try:
            while written < len(view):
                count = super().write(view[written:])
                if count is None:  # another program has made the terminal non-blocking
                    select.select([], [self], [], 1.0)
                written += count or 0
        except OSError as error:
            self._lose(error)
        return len(view)

    def _lose(self, error: OSError) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        if self.ends_command:
            if self._label == "stderr":  # no stream is left for the note
                return
            raise OutputLostError(f"{self._label}: cannot be written: {error.strerror}") from error
        other = sys.stderr if self._label == "stdout" else sys.stdout
        with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: during a write of its own
            print(
                f"note: {self._label} cannot be written ({error.strerror}); lptune goes on without it",
                file=other,
                flush=True,
            )
