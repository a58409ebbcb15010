"""stdout and stderr of a process that has something to save: a print that fails ends no run.

A terminal is closed, `| head` ends, the disk under `> log` is full: each print then raises, in the middle of
a step or of a save. In a run such a print is dropped, and the first one of a stream noted on the other. A
command that does nothing but print fails with OutputLostError instead.

A descriptor below 3 that is closed (`>&-`) is opened on /dev/null: the next file would get its number, a
checkpoint's for example, and whatever a C++ library prints would go there.
"""

import contextlib
import io
import os
import select
import sys
from collections.abc import Callable
from typing import Any, TextIO


class OutputLostError(OSError):
    """stdout cannot be written. The message is one line."""

    @property
    def exit_code(self) -> int:
        """As of a process that SIGPIPE ended (`lptune ls | head`), or of any other mistake."""
        return 141 if isinstance(self.__cause__, BrokenPipeError) else 2


def guard(ends_command: bool, escape: Callable[[str], str] = str) -> None:
    """Puts sys.stdout and sys.stderr on streams that can fail, and that write any text in any encoding.

    ends_command: the first write to stdout that fails raises OutputLostError. escape: what to make of each
    text for stdout.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number that is free
    sys.stdout = _stream(sys.stdout, _Output(1, "stdout", ends_command), escape)
    sys.stderr = _stream(sys.stderr, _Output(2, "stderr", ends_command), str)


def _stream(before: TextIO | None, output: "_Output", escape: Callable[[str], str]) -> TextIO:
    # Python makes a stream like this one: without a buffer of bytes where nothing is to be held back (-u).
    unbuffered = getattr(before, "write_through", False)
    stream = _Text(
        output if unbuffered else io.BufferedWriter(output),
        encoding=getattr(before, "encoding", "utf-8"),
        errors="backslashreplace",
        line_buffering=getattr(before, "line_buffering", True),
        write_through=unbuffered,
    )
    stream.escape = escape
    return stream


class _Text(io.TextIOWrapper):
    escape: Callable[[str], str]

    def write(self, text: str, /) -> int:
        # Of bytes the TypeError is the right one: click finds out with them which kind of stream this is.
        super().write(self.escape(text) if isinstance(text, str) else text)
        return len(text)


class _Output(io.FileIO):
    """A descriptor that takes whatever is written, and passes on what it can."""

    def __init__(self, descriptor: int, name: str, ends_command: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.name = f"<{name}>"
        self._label, self._ends_command, self._is_lost = name, ends_command, False

    def write(self, data: Any, /) -> int:
        """All of `data`, also where a part of it alone fits, or none at the moment."""
        view = memoryview(data).cast("B")
        written = 0
        try:
            while written < len(view):
                count = super().write(view[written:])
                if count is None:  # the terminal is in another program's non-blocking mode
                    select.select([], [self], [], 1.0)
                written += count or 0
        except OSError as error:
            self._lose(error)
        return len(view)

    def _lose(self, error: OSError) -> None:
        if self._is_lost:
            return
        self._is_lost = True
        if self._ends_command:
            if self._label == "stderr":  # nothing is left to say it on
                return
            raise OutputLostError(f"{self._label}: cannot be written: {error.strerror}") from error
        other = sys.stderr if self._label == "stdout" else sys.stdout
        with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: in the middle of a write of its own
            print(
                f"note: {self._label} cannot be written ({error.strerror}); this goes on without it",
                file=other,
                flush=True,
            )
