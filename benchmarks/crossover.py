"""Measures from which layer sizes each kind is faster than bf16, and writes lptune/linear/crossover.json.

    python benchmarks/crossover.py [--threads N] [--kind KIND]... [--rounds N] [--minutes M] [--json FILE]
                                   [--dry-run]

It times forward and backward of one compiled layer, including quantization, over a grid of tokens,
in_features and out_features. The time is the fastest of several rounds, in which the kinds take turns. Kinds
that this device only emulates are left out. Measurements of other devices stay in the file.
`precision.skip_small` reads the file.

Every point is written to --json as soon as it is measured, and a later run measures only the missing points.
crossover.json is written when the grid is complete.
"""

import itertools
import json
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from harness import Results, device_name, device_type, fastest_ms, parser, strict_compilation
from linear import bf16_step, one_layer, our_step  # benchmarks/linear.py

from lptune.config import PRECISION_KINDS
from lptune.linear import crossover

GRIDS = {
    "cpu": ([128, 512, 2048], [256, 1024, 4096], [256, 1024, 4096]),
    "cuda": ([1024, 4096, 16384], [1024, 4096, 8192], [1024, 4096, 14336]),
}


def point(shape: tuple[int, int, int], kinds: list[str], rounds: int) -> dict[str, float]:
    """Milliseconds of `none` and of each kind that this device runs in 8 bits, by kind."""
    # Code that was compiled for other points would only make the lookup slower.
    torch._dynamo.reset()
    build = one_layer(shape, compiled=True)
    timed = {"none": bf16_step(build)}
    timed |= dict(our_step(build, kind) for kind in kinds)
    return fastest_ms({label: once for label, once in timed.items() if label in PRECISION_KINDS}, rounds)


def earlier_points(path: Path | None) -> list[dict[str, Any]]:
    """The points that an interrupted run left in `path`, if device and torch version are the same."""
    if path is None or not path.exists():
        return []
    before = json.loads(path.read_text(encoding="utf-8"))
    same = (before["device"], before["torch"]) == (device_name(), torch.__version__)
    return list(before["rows"]) if same else []


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments.add_argument("--kind", action="append", choices=list(PRECISION_KINDS))
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--minutes", type=float, default=float("inf"), help="begin no point after them")
    arguments.add_argument("--sizes", type=int, nargs="+", help="tokens, in and out all from these; a trial")
    arguments.add_argument("--dry-run", action="store_true", help="do not write crossover.json")
    args = arguments.parse_args()
    torch.set_num_threads(args.threads)
    deadline = time.monotonic() + 60 * args.minutes
    if args.sizes and not args.dry_run:
        arguments.error("--sizes is for trials: add --dry-run")
    grid = (args.sizes,) * 3 if args.sizes else GRIDS[device_type()]
    # int8_weight_only saves memory, not time: its GEMMs run in bf16.
    others = ("none", "int8_weight_only")
    kinds = [kind for kind in args.kind or PRECISION_KINDS if kind not in others]
    strict_compilation(2 + len(kinds))
    known = earlier_points(args.json)
    with Results(args.json, grid=grid, kinds=kinds) as results:
        for row in known:
            results.add(**row)
        done = {tuple(row["shape"]): row["ms"] for row in known if set(kinds) <= set(row["kinds"])}
        left_out = 0
        for shape in itertools.product(*grid):
            if shape in done:
                continue
            if time.monotonic() > deadline:
                left_out += 1
                continue
            ms = point(shape, kinds, args.rounds)  # type: ignore[arg-type]
            done[shape] = ms
            results.add(shape=shape, kinds=kinds, ms=ms)
            ratios = "  ".join(
                f"{kind} {ms['none'] / value:.2f}x" for kind, value in ms.items() if kind != "none"
            )
            print(f"{' x '.join(map(str, shape))}: bf16 {ms['none']:.2f} ms  {ratios}", flush=True)
        if left_out:
            print(f"{left_out} points not measured in the given time; the same command measures them")
            results.content["left_out"] = left_out
            return
    if not args.dry_run:
        write(grid, done)


def write(grid: Any, done: dict[tuple[int, ...], dict[str, float]]) -> None:
    """Writes the points of this device to crossover.json."""
    kinds = [kind for kind in next(iter(done.values())) if kind != "none"]
    speedup = {
        kind: [
            [[round(done[t, k, n]["none"] / done[t, k, n][kind], 3) for n in grid[2]] for k in grid[1]]
            for t in grid[0]
        ]
        for kind in kinds
    }
    path = Path(crossover.__file__).with_name("crossover.json")
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    known[device_type()] = {
        "device": device_name(),
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "tokens": grid[0],
        "in_features": grid[1],
        "out_features": grid[2],
        "speedup": speedup,
    }
    path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
