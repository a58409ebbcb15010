"""The long form: every case, a table by subject, and each failure with the command that repeats it."""

import argparse
import contextlib
import shlex
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.faults.adversary.judge import run
from tests.faults.adversary.place import Inputs
from tests.faults.adversary.subjects import all_cases, drawn
from tests.faults.adversary.things import NotHere

_MODULE = "python -m tests.faults.adversary"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog=_MODULE, description="Attack the command line, and say what did not hold."
    )
    parser.add_argument("--only", metavar="SUBJECT", action="append", help="the cases of a subject")
    parser.add_argument("--case", metavar="SUBJECT: NAME", help="one case; says what the command printed")
    parser.add_argument("--seed", type=int, default=0, help="which cases are drawn, where damage strikes")
    parser.add_argument("--each", type=int, default=40, help="cases of each subject, at most; 0: all of them")
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="a new folder, where the last case stays")
    parser.add_argument("--list", action="store_true", help="names of the cases")
    options = parser.parse_args()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup the runs would ignore it, as they should
    cases = all_cases(options.seed)
    if options.only:
        cases = [case for case in cases if case.subject in options.only]
    if options.case:
        cases = [case for case in cases if case.title == options.case]
    elif options.each:
        cases = drawn(cases, options.each, options.seed)
    if not cases:
        parser.error("there is no such case; --list shows what there is")
    if options.list:
        print(*(case.title for case in cases), sep="\n")
        return 0
    num_cases, held, failed, skipped = (Counter[str]() for _ in range(4))
    seconds: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        root = options.keep or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="lptune-adversary-"))
        )
        root.mkdir(parents=True, exist_ok=True)
        inputs = Inputs(root.resolve())
        for case in cases:
            started_s = time.monotonic()
            num_cases[case.subject] += 1
            try:
                done, wrong = run(case, inputs.place())
            except NotHere:
                skipped[case.subject] += 1
                continue
            seconds[case.subject] += round(1000 * (time.monotonic() - started_s))
            if not wrong:
                held[case.subject] += 1
            else:
                failed[case.subject] += 1
                print(f"FAILED: {case.title}", *wrong, sep="\n  ")
                print(f"  lptune {shlex.join(done.arguments)}"[:500])
                print(f"  {(done.stderr or b'')[-600:]!r}")
                print(f"  {_MODULE} --seed {options.seed} --case {shlex.quote(case.title)}", flush=True)
            if options.case:
                print(
                    f"exit code {done.code}", *(said.decode(errors="replace") for said in done[2:4] if said)
                )
    print("\n| subject | cases | held | failed | not here | seconds |\n|---|---|---|---|---|---|")
    for subject in num_cases:
        numbers = (found[subject] for found in (num_cases, held, failed, skipped))
        print(f"| {subject} | {' | '.join(map(str, numbers))} | {seconds[subject] / 1000:.0f} |")
    totals = (sum(found.values()) for found in (num_cases, held, failed, skipped))
    print(f"| all | {' | '.join(map(str, totals))} | {sum(seconds.values()) / 1000:.0f} |")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
