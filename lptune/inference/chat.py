"""A conversation at the terminal, or with lines from a pipe.

With a chat template, the model sees the whole conversation each time. Without one, it continues each line for
itself. Answers go to stdout while they grow. The rest goes to stderr, so that
`echo question | lptune run generate … > answer.txt` writes the answer alone.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from lptune.base.errors import UserError
from lptune.base.text import printable
from lptune.data import Prompt, PromptWriter
from lptune.data.errors import RowError
from lptune.data.sources import Row
from lptune.inference.decode import Answer
from lptune.launch import preemption

_RESET = "/reset"


class Chat:
    """Iterating reads lines of stdin and yields prompts, until stdin ends. `show` prints their answers.

    From the first prompt on, Ctrl-C ends the process at once, without a traceback: nothing is to be saved.
    """

    def __init__(self, writer: PromptWriter) -> None:
        self._writer = writer
        self._is_chat = writer.tokenizer.template is not None
        self._messages: list[dict[str, Any]] = []

    def __iter__(self) -> Iterator[Prompt]:
        preemption.react(_leave, _leave)
        getattr(sys.stdout, "must_be_written", lambda: None)()  # lptune/cli/streams.py
        if sys.stdin is not None and sys.stdin.isatty():
            what = (
                f"Type a message; {_RESET} begins anew"
                if self._is_chat
                else "No chat template: each line is continued as text"
            )
            print(f"{what}. Ctrl-D or Ctrl-C ends.", file=sys.stderr, flush=True)
        for number, line in enumerate(_lines(), 1):
            if line.strip() == _RESET:
                self._messages.clear()
            elif line.strip():
                try:
                    yield self._prompt(line)
                except RowError as problem:
                    raise UserError(f"line {number}: {problem}") from None

    def show(self, answer: Answer) -> None:
        """Prints what the last token added to `answer`. Call it after each token."""
        # A model can write escape sequences that change the terminal.
        print(printable(answer.piece), end="\n" if answer.is_done else "", flush=True)
        if answer.is_done:
            self._messages.append({"role": "assistant", "content": answer.text})

    def _prompt(self, line: str) -> Prompt:
        if self._is_chat:
            self._messages.append({"role": "user", "content": line})
            ids, is_text = self._writer.of_messages(self._messages), False
        elif self._writer.cfg.prompt_template is not None:
            ids, is_text = self._writer.of_text(self._writer.filled({"prompt": line})), False
        else:
            ids, is_text = self._writer.of_text(line), True
        return Prompt(Row("stdin", {"prompt": line}), ids, is_text)


def _lines() -> Iterator[str]:
    while True:
        if sys.stdin is not None and sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.readline()
        except ValueError as error:
            raise UserError(f"stdin: is not text: {error}; send UTF-8") from None
        if not line:
            return
        yield line.removesuffix("\n")


def _leave(number: signal.Signals) -> None:
    with suppress(Exception):  # the main thread may be in the middle of a print
        print(flush=True)
    os._exit(128 + number)
