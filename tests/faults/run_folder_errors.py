"""A disk that fails below OUTPUT_DIR, outside the checkpoints: each call in turn, in real runs.

    python -m tests.faults.run_folder_errors

The command line runs in this process, in which a preloaded library (shim.c) makes a call fail: config.yaml,
the plan, the metrics, the logs, the export. Whatever a run cannot write, it must end with one line that says
what and why, exit code 2, and no traceback; the next launch must come to its end.
"""

import argparse
import contextlib
import errno
import io
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.faults.io_errors import Shim, compile_shim
from tests.helpers import cold
from tests.helpers.cold import Finished
from tests.helpers.tiny_recipe import make_checkpoint, write_config

_ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO}


def _lptune(arguments: list[str]) -> tuple[int, str]:
    """Exit code and stderr of `lptune ARGUMENTS`, run here."""
    from lptune.cli.main import main

    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            main(arguments)
        except SystemExit as end:
            return int(end.code or 0), said.getvalue()


def _worker(within: Path, every: int) -> list[str]:
    """What went wrong; runs under the shim."""
    config = write_config(
        within / "tiny.yaml",
        make_checkpoint(within / "tiny"),
        within / "run",
        data={"source": "builtin", "seq_len": 64, "max_rows": 8},
        num_steps=1,
        eval_every_steps=0,
    )
    shim, folder = Shim(within / "calls.log"), within / "run"
    arguments = ["run", "full_finetune", "--config", str(config)]

    def run(fail_at: int, error: int) -> tuple[int, str, list[str]]:
        shim.start(folder, fail_at, error)
        code, said = _lptune(arguments)
        return code, said, [" ".join(map(str, call)) for call in shim.stop()]

    code, said, calls = run(0, 0)
    assert code == 0, said
    wrong, counts = [], Counter[str]()
    outside = [number for number, call in enumerate(calls, 1) if "/checkpoints/" not in call]
    for number in outside[::every]:
        for name, error in _ERRORS.items():
            shutil.rmtree(folder)
            code, said, failed = run(number, error)
            what = failed[number - 1] if number <= len(failed) else "never came to the call"
            if what.startswith("fsync") and what.rstrip().endswith(str(folder)):
                what += f" after {failed[number - 2]}"  # the folder, for what was renamed
            counts[what.split(" ")[0]] += 1
            lines = [line for line in said.splitlines() if line.strip()]
            says = len(lines) == 1 and lines[0].startswith("error: ") and os.strerror(error) in lines[0]
            if "report.html" in what:  # the training is saved and exported: a note on stdout, no failure
                says, expected = not said, 0
            else:
                expected = 2
            if code != expected or not says:
                wrong.append(f"{name} in {what}: exit code {code}, {said[-600:]!r}")
            code, said, _ = run(0, 0)
            if code or not (folder / "export.json").exists():
                wrong.append(f"{name} in {what}: the next launch ended with {code}: {said[-600:]!r}")
    print(f"{sum(counts.values())} runs with an error in one call: {dict(sorted(counts.items()))}")
    return wrong


def run_folder_errors(every: int, within: Path) -> Finished:
    """The worker, under the shim; it ends with 1 if anything went wrong.

    every: only each so-manieth call fails.
    """
    library = compile_shim(within)
    assert library is not None
    worker = ("-m", "tests.faults.run_folder_errors", "--worker", str(within), "--every", str(every))
    return cold.run(*worker, timeout_s=1800, LD_PRELOAD=str(library))


def main() -> None:
    """Runs the long form."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=int, default=1, help="let each so-manieth call fail")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        wrong = _worker(Path(args.worker), args.every)
        print(f"{len(wrong)} went wrong", *wrong, sep="\n")
        sys.exit(bool(wrong))
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lptune-run-folder-") as within:
        done = run_folder_errors(args.every, Path(within))
    print(done.stdout, done.stderr, f"{time.monotonic() - started:.0f} s")
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
