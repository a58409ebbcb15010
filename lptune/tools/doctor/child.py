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
from collections.abc import Iterator, Sequence
from typing import Any

from lptune.base.text import printable
from lptune.tools.doctor.line import PROBLEM, Line, examined

TIMEOUT_S = 120
"""After this time the child is ended: a driver that hangs does not end by itself."""


def lines(*, timeout_s: float = TIMEOUT_S, command: Sequence[str] | None = None) -> Iterator[Line]:
    """The findings of the child, when it has ended; the last one says how, if it ended early.

    timeout_s: for all probes together. command: another program, for tests.
    """
    own = [sys.executable, "-m", "lptune.tools.doctor.child"]
    # A file, not a pipe, for what a process of the compiler may hold longer than the child lives.
    with tempfile.TemporaryFile() as file:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": file}
        try:
            ended = subprocess.run(command or own, timeout=timeout_s, check=False, **streams)
            out, code = ended.stdout, ended.returncode
            how = f"the process ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}"
        except subprocess.TimeoutExpired as error:
            out, how = error.stdout or b"", f"nothing came back for {timeout_s:g} s"
        file.seek(0)
        errors = file.read().decode(errors="replace").splitlines()
    begun, is_whole = "starting Python", False
    for raw in out.splitlines():
        try:
            said: dict[str, Any] = json.loads(raw)
        except ValueError:  # cut by the end of the process
            continue
        begun, is_whole = said.get("begin", begun), "end" in said
        if "line" in said:
            yield Line(*said["line"])
    if not is_whole:
        last = printable(errors[-1])[:300] if errors else ""
        yield Line("software", "torch", PROBLEM, f"{how} in the probe: {begun}", last)


def main() -> None:
    """Runs the probes and writes what they find."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print, too

    def say(**what: object) -> None:
        out.write(f"{json.dumps(what)}\n")

    say(begin="importing torch")
    import torch  # noqa: F401

    from lptune.tools.doctor import with_torch

    for section, probe in with_torch.probes():
        say(begin=probe.__name__)
        for line in examined(section, [probe]):
            say(line=list(line))
    say(end=True)


if __name__ == "__main__":
    main()
