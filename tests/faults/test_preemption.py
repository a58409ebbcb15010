"""The most telling signal of tests/faults/preemption.py; recipes/test_full_finetune.py has other phases."""

import random
import signal
from pathlib import Path

from tests.faults.preemption import Case, Run


def test_no_completed_step_is_lost_to_a_signal(tmp_path: Path) -> None:
    run = Run(tmp_path, random.Random(0))
    case = Case("save", 2, "all", signal.SIGTERM, is_repeated=True)
    assert run.stop(case).complaints == ()
    assert run.last_saved() >= 2
    assert run.finish().complaints == ()
