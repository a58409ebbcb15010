"""The process in which torch's probes run, and its reader.

A driver that does not fit, a processor without an instruction, or a kernel that is wrong may end the process
without an exception. That is a finding as well: the reader knows which probe had begun.

The child writes a JSON object on each line: `{"begin": NAME}` or `{"line": [...]}`, and `{"end": true}`.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from lptune.base.text import printable
from lptune.tools.doctor.line import PROBLEM, Line, examined

TIMEOUT_S = 120
"""After this time the child is ended: a driver that hangs does not end by itself."""


class Child:
    """The running child. Iterate over `lines()` once; leave the block to end it."""

    def __init__(
        self, *, measure: bool, timeout_s: float = TIMEOUT_S, command: Sequence[str] | None = None
    ) -> None:
        """measure: time GEMMs. timeout_s: for all probes together. command: another program, for tests."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed in __exit__)
        own = [sys.executable, "-m", "lptune.tools.doctor.child", *(["--measure"] if measure else [])]
        # Kernels without tuning: the first call of a tuned one takes ten seconds.
        environment = os.environ | {"LPTUNE_AUTOTUNE": os.environ.get("LPTUNE_AUTOTUNE", "0")}
        self._process = subprocess.Popen(
            list(command or own),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
        )
        self._is_expired, self._timeout_s = False, timeout_s
        self._timer = threading.Timer(timeout_s, self._expire)
        self._timer.daemon = True
        self._timer.start()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()

    def lines(self) -> Iterator[Line]:
        """The findings, as they come; the last one says how the child ended, if it ended early."""
        assert self._process.stdout is not None
        begun, is_whole = "starting Python", False
        for raw in self._process.stdout:
            try:
                said: dict[str, Any] = json.loads(raw)
            except ValueError:  # cut by the end of the process
                continue
            begun, is_whole = said.get("begin", begun), "end" in said
            if "line" in said:
                yield Line(*said["line"])
        code = self._process.wait()
        if not is_whole:
            yield Line(
                "software",
                "torch",
                PROBLEM,
                f"{self._ending(code)} in the probe: {begun}",
                self._last_error(),
            )

    def _expire(self) -> None:
        self._is_expired = True
        self._process.kill()

    def _ending(self, code: int) -> str:
        if self._is_expired:
            return f"nothing came back for {self._timeout_s:g} s"
        return f"the process ended with {'signal ' + str(-code) if code < 0 else 'exit code ' + str(code)}"

    def _last_error(self) -> str:
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - 2000))
        lines = self._errors.read().decode(errors="replace").splitlines()
        return printable(lines[-1])[:300] if lines else ""


def main() -> None:
    """Runs the probes and writes what they find."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print, too

    def say(**what: object) -> None:
        out.write(f"{json.dumps(what)}\n")

    say(begin="importing torch")
    import torch  # noqa: F401

    from lptune.tools.doctor import with_torch

    for section, probe in with_torch.probes(measure="--measure" in sys.argv):
        say(begin=probe.__name__)
        for line in examined(section, [probe]):
            say(line=list(line))
    say(end=True)


if __name__ == "__main__":
    main()
