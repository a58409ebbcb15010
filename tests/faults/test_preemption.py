"""The most telling signals of tests/faults/preemption.py."""

import random
import signal
from pathlib import Path

from tests.faults.preemption import Case, Run

CASES = [
    Case("step", 1, "launcher", signal.SIGINT, is_repeated=True),
    Case("evaluation", 1, "all", signal.SIGUSR1, is_repeated=False),
    Case("save", 2, "all", signal.SIGTERM, is_repeated=True),
]


def test_no_completed_step_is_lost_to_a_signal(tmp_path: Path) -> None:
    run = Run(tmp_path, random.Random(0))
    for case in CASES:
        assert run.stop(case).complaints == (), case
    assert run.last_saved() >= 2
    assert run.finish().complaints == ()
