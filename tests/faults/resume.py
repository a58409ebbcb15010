"""Resumed runs against uninterrupted ones: bit for bit, and on other numbers of ranks.

    python -m tests.faults.resume                     # both
    python -m tests.faults.resume exact --ranks 1 --precisions none

exact: parts that end after the steps of STOPS by a signal on the last rank, each a run of the real command
line: in the middle of an epoch, at the end of one, twice within one. Every second signal is SIGKILL, which
saves nothing; the others are SIGTERM. Every step's loss, gradient norm, learning rate, number of targets and
rows, and at the end every tensor, are those of one run.

elastic: parts on 1, 2, 4 and 1 ranks. What was loaded is what was stored, to the bit; the micro-batches are
the same in the same order; losses agree as far as summation in another order allows.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.faults.runs import (
    NUM_STEPS,
    PRECISIONS,
    RECIPES,
    STEPS_PER_EPOCH,
    Inputs,
    outcome,
    prepare,
    run_part,
    uninterrupted,
)
from tests.faults.state import stored_tensors, table

STOPS = (2, 4, 5, 7)
"""The end of the first epoch is step 4; steps 5 and 7 lie in the second."""
assert STEPS_PER_EPOCH in STOPS
_ELASTIC_RANKS = (1, 2, 4, 1)
_ELASTIC_STOPS = (3, 6, 9)
# docs/log.md: what ranks and accumulation may differ by at this learning rate.
_LOSS_TOLERANCE = {"none": 1e-6}
_LOSS_TOLERANCE_8_BIT = 1e-3

Row = list[object]


def exact(inputs: Inputs, precision: str, ranks: int, stops: Sequence[int] = STOPS) -> tuple[Row, list[str]]:
    """A row of the table, and what differed."""
    overrides = PRECISIONS[precision]
    expected = outcome(uninterrupted(inputs, f"whole {precision} {ranks}", ranks, *overrides))
    parted = inputs.folder / f"parted {precision} {ranks}"
    wrong = []
    for number, stop_after in enumerate((*stops, None)):
        by = signal.SIGKILL if number % 2 else signal.SIGTERM
        failure = run_part(inputs, parted, ranks, *overrides, stop_after=stop_after, by=by)
        if failure:
            return [precision, ranks, len(stops), "failed"], [f"{precision}, {ranks} ranks: {failure}"]
    resumed_at = [int(path.stem.removeprefix("loaded-")) for path in parted.glob("loaded-*.safetensors")]
    for step in resumed_at:
        wrong += _loaded_differs(parted, step)
    found = outcome(parted)
    wrong += found.differences(expected)
    num_rows = sum(map(len, found.batches.values()))
    row = [precision, ranks, len(resumed_at), f"{NUM_STEPS} steps, {num_rows} rows", len(found.state)]
    return row, [f"{precision}, {ranks} ranks: {line}" for line in wrong]


def elastic(inputs: Inputs, precision: str) -> tuple[Row, list[str]]:
    """A row of the table, and what differed."""
    overrides = PRECISIONS[precision]
    expected = outcome(uninterrupted(inputs, f"whole {precision} 1", 1, *overrides))
    parted = inputs.folder / f"elastic {precision}"
    wrong = []
    for ranks, stop_after in zip(_ELASTIC_RANKS, (*_ELASTIC_STOPS, None), strict=True):
        failure = run_part(inputs, parted, ranks, *overrides, stop_after=stop_after)
        if failure:
            return [precision, "failed"], [f"{precision}, {ranks} ranks: {failure}"]
    for step in _ELASTIC_STOPS:
        wrong += _loaded_differs(parted, step)
    found = outcome(parted)
    if found.batches != expected.batches:
        wrong.append("other micro-batches, or in another order")
    off = max(abs(a - b) / abs(b) for a, b in zip(found.losses, expected.losses, strict=True))
    tolerance = _LOSS_TOLERANCE.get(precision, _LOSS_TOLERANCE_8_BIT)
    if not off <= tolerance:
        wrong.append(f"losses differ by {off:.1e}, more than {tolerance:.0e}")
    return [precision, "to the bit", f"{off:.1e}", f"{tolerance:.0e}"], [
        f"{precision}: {line}" for line in wrong
    ]


def _loaded_differs(folder: Path, step: int) -> list[str]:
    """What a part that went on from `step` had in memory, against the checkpoint's files."""
    loaded = load_file(folder / f"loaded-{step}.safetensors")
    stored = stored_tensors(folder / "checkpoints" / f"step-{step:08d}")
    return [
        f"loaded from step {step}: {name} is not what is stored"
        for name, tensor in loaded.items()
        if not torch.equal(tensor, stored[name])
    ]


def main() -> None:
    """Runs the long form."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("which", nargs="*", default=[], help="exact, elastic; both")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--recipe", choices=RECIPES, default=RECIPES[0])
    args = parser.parse_args()
    which = args.which or ["exact", "elastic"]
    started = time.monotonic()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="lptune-resume-") as within:
        inputs = prepare(Path(within), recipe=args.recipe)
        if "exact" in which:
            cells = [exact(inputs, precision, ranks) for precision in args.precisions for ranks in args.ranks]
            wrong += [line for _, lines in cells for line in lines]
            head = ("precision", "ranks", "resumes", "compared", "tensors")
            print(table(head, [row for row, _ in cells]), flush=True)
        if "elastic" in which:
            cells = [elastic(inputs, precision) for precision in args.precisions]
            wrong += [line for _, lines in cells for line in lines]
            head = ("precision, 1 -> 2 -> 4 -> 1 ranks", "loaded", "losses off by", "allowed")
            print(table(head, [row for row, _ in cells]), flush=True)
    print(f"{time.monotonic() - started:.0f} s: {len(wrong)} differences")
    print("\n".join(wrong))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
