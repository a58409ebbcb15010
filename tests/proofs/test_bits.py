"""What tests/proofs/bits.py compares and how it names a difference; its runs are made by hand."""

import copy
import math
from typing import Any

import pytest

from lptune.config import PRECISION_KINDS
from tests.proofs import bits

NEXT = math.nextafter(0.2, 1.0)
RUN: dict[str, Any] = {
    "failure": "",
    "steps": [{"step": 1, "loss": 2.0, "grad_norm": 0.1}, {"step": 2, "loss": 1.5, "grad_norm": 0.2}],
    "weights": {"a": "0" * 64, "b": "1" * 64},
}


def test_every_kind_runs_eagerly_and_compiled_on_one_and_two_ranks() -> None:
    names = [case.name for case in bits.cases()]
    assert len(names) == len(set(names))
    for kind in PRECISION_KINDS:
        for mode in ("eager", "compiled"):
            for ranks in (1, 2):
                assert {f"{kind}/{mode}/{ranks}/{after}" for after in ("reshard", "keep")} <= set(names)
    quick = [case.name.partition("/")[0] for case in bits.cases() if bits.is_quick(case)]
    assert sorted(quick) == sorted(PRECISION_KINDS)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda run: run["steps"][1].update(grad_norm=NEXT), f"step 2: grad_norm {NEXT!r} (was 0.2)"),
        (lambda run: run["steps"][0].update(loss=2.5, grad_norm=1.0), "step 1: loss 2.5 (was 2.0)"),
        (lambda run: run["steps"].pop(), "step 2: step None (was 2)"),
        (lambda run: run["weights"].update(b="2" * 64), "weight b 222222222222 (was 111111111111)"),
        (lambda run: run["weights"].pop("a"), "weight a missing (was 000000000000)"),
        (lambda run: run.update(failure="exit code 1: x"), "exit code 1: x (was no failure)"),
        (lambda run: None, ""),
    ],
)  # fmt: skip
def test_the_first_difference_is_named_to_the_last_bit(change: Any, named: str) -> None:
    now = copy.deepcopy(RUN)
    change(now)
    assert bits.difference(RUN, now) == named
