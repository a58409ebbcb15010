"""The next step reuses the pages of the last one."""

import json
import os
import sys

import pytest

from lptune.hardware.host_memory import keep_freed_memory
from tests.helpers import cold

PROGRAM = """
import json, resource, torch
from lptune.hardware.host_memory import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    blocks = [torch.ones(48 * 2**20, dtype=torch.uint8) for _ in range(2)]  # glibc maps each by itself

kept = keep_freed_memory()
found = []
for _ in range(16):
    before = faults()
    step()
    found.append(faults() - before)
print(json.dumps([kept, found]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_later_steps_touch_no_new_page(monkeypatch: pytest.MonkeyPatch) -> None:
    if any(name.startswith("MALLOC_") for name in os.environ):
        pytest.skip("the environment has settings for malloc")
    done = cold.run("-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    kept, faults = json.loads(done.stdout)
    assert kept
    # Where the heap begins, which the kernel draws, decides which gaps fit. Of 24 starts six needed no new
    # page after the second step, eight after the fifth, ten after the eighth.
    assert max(faults[8:]) < faults[0] / 10, "the first steps make room"
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert not keep_freed_memory(), "settings of one's own are left alone"
