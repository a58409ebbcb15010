"""Measures from which sizes on each kind is faster than bf16 and writes lptune/linear/crossover.json.

    python benchmarks/crossover.py [--threads N] [--kind KIND]... [--rounds N] [--dry-run]

Forward and backward of one compiled layer, quantization included, over a grid of tokens, in_features and
out_features; the fastest of several rounds in which the kinds take turns. Kinds that this device only
emulates are left out. What other devices measured stays in the file. `precision.skip_small` reads it.
"""

import argparse
import itertools
import json
from datetime import date
from pathlib import Path
from typing import Any

import torch
from linear import fastest_ms, steps  # benchmarks/linear.py

from lptune.config import PRECISION_KINDS
from lptune.linear import crossover

GRIDS = {
    "cpu": ([128, 512, 2048], [256, 1024, 4096], [256, 1024, 4096]),
    "cuda": ([512, 2048, 8192, 32768], [512, 1024, 2048, 4096, 8192], [512, 1024, 2048, 4096, 8192, 16384]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--kind", action="append", choices=list(PRECISION_KINDS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--sizes", type=int, nargs="+", help="tokens, in and out all from these; with --dry-run"
    )
    parser.add_argument("--dry-run", action="store_true", help="print, write nothing")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch._dynamo.config.recompile_limit = 1000
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {args.threads} threads"
    if args.sizes and not args.dry_run:
        parser.error("--sizes is for trials: add --dry-run")
    grid = (args.sizes,) * 3 if args.sizes else GRIDS[device]
    kinds = ["none", *(kind for kind in args.kind or PRECISION_KINDS if kind != "none")]
    speedup: dict[str, Any] = {}
    for (i, tokens), (j, k), (m, n) in itertools.product(*(enumerate(sizes) for sizes in grid)):
        timed = steps((tokens, k, n), kinds, compiled=True, device=device, peers=False)
        # An emulated kind is of no use here; its label says so.
        timed = {label: once for label, once in timed.items() if label in PRECISION_KINDS}
        times = fastest_ms(timed, device, args.rounds)
        for kind in [kind for kind in times if kind != "none"]:
            empty = [[[0.0] * len(grid[2]) for _ in grid[1]] for _ in grid[0]]
            speedup.setdefault(kind, empty)[i][j][m] = round(times["none"] / times[kind], 3)
        ratios = "  ".join(
            f"{kind} {times['none'] / ms:.2f}x" for kind, ms in times.items() if kind != "none"
        )
        print(f"{tokens} x {k} x {n}: bf16 {times['none']:.2f} ms  {ratios}", flush=True)
    if args.dry_run:
        return
    path = Path(crossover.__file__).with_name("crossover.json")
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    known[device] = {
        "device": name,
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
