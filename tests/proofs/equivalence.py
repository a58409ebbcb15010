"""The same global batches on 1 rank x 4 accumulation steps, 2 x 2 and 4 x 1: what may differ, and how much.

    python -m tests.proofs.equivalence [--seeds 5] [--only TEXT]

Micro-batches are cut from the global batch in order, so each has the same bits wherever it runs, and so has
its gradient (`tiny_run.Summed` says why). What differs is the order in which four gradients are added in
float32. That is bounded for the first step. Its last bits then go through AdamW, which makes a step of the
learning rate out of a gradient however small, and, in 8 bits, flip the rounding of a few values. Ten steps
later nothing is bounded, and what was measured is asserted: docs/log.md.

float32 compute, one thread, learning rate 1e-3.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch

from lptune import distributed
from lptune.config import PRECISION_KINDS, FinetuneConfig
from tests.helpers import tiny_run
from tests.helpers.ranks import Ranks

NUM_STEPS = 10
RANKS = (1, 2, 4)
CASES = {
    **{kind: tiny_run.config(kind) for kind in PRECISION_KINDS},
    **{
        f"{kind}, rounded stochastically": tiny_run.config(kind, precision={"stochastic_rounding": True})
        for kind, how in PRECISION_KINDS.items()
        if how.can_round_stochastically
    },
}


class Trained(NamedTuple):
    """Some steps on some number of ranks."""

    losses: list[float]
    excess: dict[str, float]
    """Loss and gradients of the first step: their distance from the sum of the micro-batches' own, over what
    summation may make of it.
    """


def train(rank: int, num_ranks: int, cfg: FinetuneConfig, seed: int, num_steps: int = NUM_STEPS) -> Trained:
    """A job for `Ranks`; the excess is known on the first rank only."""
    excess, losses = dict[str, float](), list[float]()
    with distributed.session("cpu", cfg.parallel) as world:
        one_rank = tiny_run.alone_beside(world)
        content = tiny_run.decoder_config()
        run = tiny_run.TinyRun(cfg, world, content, seed=seed)
        for step in range(num_steps):
            with run.low.step(step, num_passes=1):
                losses.append(run.verified_step(step).loss)
            if step == 0:
                found = run.gradients() | {"loss": torch.tensor(losses[0], dtype=torch.float64)}
                if rank == 0:
                    alone = tiny_run.TinyRun(cfg, one_rank, content, seed=seed)
                    with alone.low.step(step, num_passes=1):
                        expected = alone.summed_gradients(step)
                    excess = {name: expected[name].excess(value) for name, value in found.items()}
            run.update()
    return Trained(losses, excess)


class Difference(NamedTuple):
    """Of several ranks from one."""

    first_excess: float
    first_loss: float
    """Relative, as the following."""
    last_loss: float
    largest: float
    """Of all steps."""


def compare(ranks: Ranks, case: str, seed: int, num_steps: int = NUM_STEPS) -> list[Difference]:
    """Of 2 and 4 ranks from one."""
    found: list[Trained] = [ranks.run(train, n, CASES[case], seed, num_steps)[0] for n in RANKS]
    one = found[0].losses
    differences = []
    for each in found[1:]:
        relative = [abs(b - a) / a for a, b in zip(one, each.losses, strict=True)]
        excess = max(*each.excess.values(), *found[0].excess.values())
        differences.append(Difference(excess, relative[0], relative[-1], max(relative)))
    return differences


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Losses on 1, 2 and 4 ranks.")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="")
    options = parser.parse_args(arguments)
    print(
        "| case | first step, share of the bound | first loss | 10th loss | any loss |\n|---|---|---|---|---|"
    )
    with Ranks(max(RANKS)) as ranks:
        for case in CASES:
            if options.only in case:
                found = [each for seed in range(options.seeds) for each in compare(ranks, case, seed)]
                first, *rest = (max(values) for values in zip(*found, strict=True))
                print(f"| {case} | {first:.2f} | " + " | ".join(f"{x:.1e}" for x in rest) + " |", flush=True)
    return 0


if __name__ == "__main__":
    # Under the module's own name: what is run here goes to other processes by name.
    from tests.proofs import equivalence

    sys.exit(equivalence.main())
