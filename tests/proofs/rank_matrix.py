"""Every kind on every number of ranks, with all that makes sharding difficult: all cells, and a page of them.

    python -m tests.proofs.rank_matrix [--only TEXT] [--write docs/rank_matrix.md]

What a cell is and asserts stands in rank_cell.py. tests/proofs/test_rank_matrix.py runs some of them.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from lptune.config import PRECISION_KINDS
from tests.helpers.ranks import Ranks, RanksFailed
from tests.proofs.matrix import grouped
from tests.proofs.rank_cell import ALL, FEATURES, FEATURES_3D, RANKS_3D, Cell, Outcome, run_rank

FACTORS: dict[str, tuple[Any, ...]] = {
    "kind": tuple(PRECISION_KINDS),
    "feature": (*FEATURES, ALL),
    "ranks": (1, 2, 4),
}


def cells() -> list[Cell]:
    """All of them."""
    flat = [Cell(*values) for values in itertools.product(*FACTORS.values())]
    return flat + [Cell(kind, feature, RANKS_3D) for kind in FACTORS["kind"] for feature in FEATURES_3D]


def run(cell: Cell, ranks: Ranks) -> Outcome:
    """Runs the cell on its ranks; whatever raises, dies or hangs is a failure too."""
    started = time.perf_counter()
    try:
        found: list[Outcome] = ranks.run(run_rank, cell.ranks, cell)
        outcome = found[0]
        outcome.failures = [
            f"rank {rank}: {failure}" for rank, each in enumerate(found) for failure in each.failures
        ]
        for rank, each in enumerate(found):
            for part, bits in each.parts.items():
                same = outcome.parts.setdefault(part, bits) == bits
                outcome.check(same, f"rank {rank}: other bits than those of another rank in {part}")
    except RanksFailed as error:
        outcome = Outcome([str(error).strip()])
    outcome.seconds = time.perf_counter() - started
    return outcome


def page(outcomes: dict[Cell, Outcome], command: str) -> str:
    """docs/rank_matrix.md: a column per feature, equal kinds in one row; below, the meshes of three axes."""
    failed = {cell: outcome for cell, outcome in outcomes.items() if outcome.failures}
    ranks = " / ".join(map(str, FACTORS["ranks"]))
    flat, cubes = (
        max((outcome.excess for cell, outcome in outcomes.items() if cell.is_3d == is_3d), default=0.0)
        for is_3d in (False, True)
    )
    lines = [
        "# Every kind on every number of ranks",
        "",
        f"Written by `{command}` (torch {torch.__version__}, CPU and gloo; float8 and MX emulated). Each",
        "cell trains a tiny Llama of two blocks, over float32 master weights, for two steps of four",
        "micro-batches; a number is how many GEMMs with 8-bit operands one rank ran in its first step.",
        "`FAILED` is a cell that did not hold; its reasons are below. What a cell asserts stands at the top",
        "of `tests/proofs/rank_cell.py`: one rank's loss and gradients, counts, collectives, resharding,",
        "weights, graphs.",
        "",
        f"{len(outcomes) - len(failed)} of {len(outcomes)} cells hold. Largest difference of a gradient",
        f"from one rank's, as a share of what is allowed: {flat:.2f} (summation in another order), with",
        f"tensor parallelism {cubes:.2f} (twice the format's noise).",
        "",
        f"On {ranks} ranks, in this order, in bfloat16. HSDP is 2 x 1 on two ranks and 2 x 2 on four;",
        "one rank can replicate nothing: its cell is one like any other. A rank gathers in 8 bits as many",
        "weights as the second column says, besides those that are stored in 8 bits.",
        "",
        *_table(outcomes, FACTORS["feature"], FACTORS["ranks"]),
        "",
        f"On {RANKS_3D} ranks, a mesh of replicate 2 x fsdp 2 x tensor 2, in float32:",
        "",
        *_table(outcomes, FEATURES_3D, (RANKS_3D,)),
    ]
    for cell, outcome in failed.items():
        lines += ["", f"**{cell}**", *(f"- {failure.splitlines()[-1]}" for failure in outcome.failures[:5])]
    return "\n".join(lines) + "\n"


def _table(outcomes: dict[Cell, Outcome], features: Sequence[str], ranks: Sequence[int]) -> Iterator[str]:
    yield "| kind | 8-bit gathers | " + " | ".join(features) + " |"
    yield "|---|---|" + "---|" * len(features)
    of_kind: dict[str, str] = {}
    for kind in FACTORS["kind"]:
        rows = [[outcomes.get(Cell(kind, feature, number)) for number in ranks] for feature in features]
        found = {each.num_low_gathers for row in rows for each in row if each and not each.failures}
        if any(each for row in rows for each in row):
            columns = (" / ".join(_text(each) for each in row) for row in rows)
            gathers = " or ".join(str(number) for number in sorted(found))
            of_kind[kind] = f"{gathers} | " + " | ".join(columns)
    for kinds, cells_ in grouped(of_kind):
        yield f"| {', '.join(f'`{kind}`' for kind in kinds)} | {cells_} |"


def _text(outcome: Outcome | None) -> str:
    if outcome is None:
        return "not run"
    return "**FAILED**" if outcome.failures else f"{outcome.num_gemms}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run the matrix of kinds, features and ranks.")
    parser.add_argument("--only", default="", help="cells whose name contains this: `compile, 4`")
    parser.add_argument("--write", type=Path, help="the page to write")
    options = parser.parse_args(arguments)
    outcomes: dict[Cell, Outcome] = {}
    with Ranks(8) as ranks:
        for cell in cells():
            if options.only in str(cell):
                outcome = outcomes[cell] = run(cell, ranks)
                said = "; ".join(failure.splitlines()[-1] for failure in outcome.failures[:3])
                print(f"{outcome.seconds:5.1f} s  {cell}: {said or 'holds'}", flush=True)
    text = page(
        outcomes, "make matrix" if not options.only else f"tests.proofs.rank_matrix --only '{options.only}'"
    )
    if options.write:
        options.write.write_text(text, encoding="utf-8")
    else:
        print(text)
    return int(any(outcome.failures for outcome in outcomes.values()))


if __name__ == "__main__":
    # Under the module's own name: what is run here goes to other processes by name.
    from tests.proofs import rank_matrix

    sys.exit(rank_matrix.main())
