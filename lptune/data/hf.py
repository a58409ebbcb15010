"""Asks transformers, which works in a process of its own (hf_process.py says why).

One process serves all of this process's questions. It starts with the first of them, which takes about a
second, and again after it was ended: by a question beyond its limits, or by itself when it was idle. Answers
that files and versions alone decide are kept on disk, so that a run whose rows are cached, too, starts no
process.
"""

import atexit
import contextlib
import functools
import hashlib
import importlib.metadata
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from lptune.base import cache
from lptune.base.errors import UserError

_PROGRAM = Path(__file__).with_name("hf_process.py")
_END_S = 5.0
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class Answer(NamedTuple):
    """Facts about a question's subject, and texts that belong to it."""

    facts: dict[str, Any]
    """`error` and `message`, if the question failed."""
    bodies: list[bytes]


class EndedError(Exception):
    """The process ended over a question; the message says why."""


def ask(operation: str, *, cpu_s: float, memory: int, **question: Any) -> Answer:
    """The answer to a question.

    cpu_s, memory: how many seconds on a processor and how many bytes it may take. Raises EndedError beyond
    the first; the second is mostly an `error` of the answer.
    """
    return _process().ask({"operation": operation, "cpu_s": cpu_s, "memory": memory, **question})


def ask_once(operation: str, content: Sequence[bytes], **question: Any) -> Answer:
    """`ask`, but an answer without an error is read from the cache of earlier processes if it is there.

    content: all that decides the answer, beside the versions of the libraries. What cannot be kept is asked
    again.
    """
    path = None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        path = cache.folder() / "transformers" / _digest([operation.encode(), *_versions(), *content])
    with contextlib.suppress(OSError):
        digest, _, text = ((cache.read(path) if path else None) or b"").partition(b"\n")
        if text and digest == _digest([text]).encode():
            return read_answer(io.BytesIO(text))
    answer = ask(operation, **question)
    if path and "error" not in answer.facts:
        line = json.dumps({**answer.facts, "sizes": [len(body) for body in answer.bodies]})
        text = b"".join([line.encode(), b"\n", *answer.bodies])
        kept = b"\n".join([_digest([text]).encode(), text])
        with contextlib.suppress(OSError):  # no home, a full disk
            if len(kept) < cache.MAX_BYTES:
                cache.write(path, kept)
    return answer


def read_answer(file: IO[bytes]) -> Answer:
    """An answer as hf_process.py writes it. Raises ValueError or EOFError if it is cut off."""
    facts = json.loads(file.readline())
    bodies = []
    for size in facts.pop("sizes"):
        bodies.append(file.read(size))
        if len(bodies[-1]) < size:
            raise EOFError
    return Answer(facts, bodies)


def _digest(content: Sequence[bytes]) -> str:
    return hashlib.sha256(b"".join(b"%d:%s" % (len(each), each) for each in content)).hexdigest()


@functools.cache
def _versions() -> list[bytes]:
    names = ("transformers", "tokenizers", "jinja2")
    return [_PROGRAM.read_bytes(), *(importlib.metadata.version(name).encode() for name in names)]


@functools.cache
def _process() -> "_Process":
    process = _Process()
    atexit.register(process.close)
    os.register_at_fork(after_in_child=process.forget)  # two askers at one pipe would mix their answers
    return process


class _Process:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def ask(self, question: dict[str, Any]) -> Answer:
        with self._lock:
            return self._exchange(json.dumps(question).encode() + b"\n", question["cpu_s"])

    def _exchange(self, line: bytes, cpu_s: float) -> Answer:
        if self._child is None:
            self._child = subprocess.Popen(
                [sys.executable, "-P", str(_PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **_ENVIRONMENT},
            )
        child = self._child
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(line)
            child.stdin.flush()
            answer = read_answer(child.stdout)
        except BaseException as error:  # an interrupt, too: the rest of an answer must not answer the next
            has_ended = isinstance(error, (BrokenPipeError, EOFError, json.JSONDecodeError))
            if has_ended:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_END_S)  # for its own code
            self.close()
            if not has_ended:
                raise
            if child.returncode == -signal.SIGALRM:  # it was idle, and ended between two questions
                return self._exchange(line, cpu_s)
            if child.returncode == -signal.SIGPROF:
                raise EndedError(f"takes more than {cpu_s:g} s on a processor") from None
            raise EndedError(f"ends the process that reads it ({child.returncode})") from None
        if answer.facts.get("error") == "import":
            self.close()
            raise UserError(
                f"transformers cannot be imported: {answer.facts['message']}; "
                "pip install 'transformers>=5.3,<6'"
            )
        return answer

    def forget(self) -> None:
        """Leaves the process to its owner."""
        if self._child is not None:
            self._child.returncode = 0  # it is not this process's to wait for
        self._lock, self._child = threading.Lock(), None

    def close(self) -> None:
        """Ends the process."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()  # nothing, if it has ended already
            with contextlib.suppress(OSError):  # a question that it did not read
                child.communicate()
