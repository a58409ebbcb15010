"""Forward and backward of one linear layer, quantization included: each kind against bf16 in one run.

    python benchmarks/linear.py [--threads N] [--shape T K N]...

Prints milliseconds (the fastest of several interleaved rounds: other work only ever adds time) and the
ratio to bf16, eager and compiled. Runs on whatever device it finds.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn

from lptune import linear
from lptune.config import PrecisionConfig
from lptune.config.schema import PRECISION_KINDS

SHAPES = [(2048, 2048, 2048), (2048, 2048, 5632)]
ROUNDS = 7


def step(kind: str, shape: tuple[int, int, int], compiled: bool, device: str) -> Callable[[], None]:
    """One forward and backward through a layer of `kind`; x (T, K), weight (N, K), bfloat16."""
    tokens, k, n = shape
    layer = nn.Sequential(nn.Linear(k, n, bias=False, dtype=torch.bfloat16, device=device))
    plan = linear.convert(layer, PrecisionConfig(kind=kind))
    run = torch.compile(layer, dynamic=False) if compiled else layer
    x = torch.randn(tokens, k, dtype=torch.bfloat16, device=device, requires_grad=True)
    g = torch.randn(tokens, n, dtype=torch.bfloat16, device=device)

    def once() -> None:
        x.grad = None
        layer.zero_grad(set_to_none=True)
        run(x).backward(g)

    with linear.verify_step(layer, plan, 1):  # what is timed is what it says it is
        once()
    return once


def fastest_ms(steps: dict[str, Callable[[], None]], device: str) -> dict[str, float]:
    """The fastest of ROUNDS rounds; the kinds take turns, so that a disturbance meets all of them."""
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(ROUNDS):
        for name, once in steps.items():
            started = time.perf_counter()
            once()
            if device == "cuda":
                torch.cuda.synchronize()
            best[name] = min(best[name], 1e3 * (time.perf_counter() - started))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--shape", type=int, nargs=3, action="append", metavar=("T", "K", "N"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {args.threads} threads"
    print(f"torch {torch.__version__}, {name}; ms per forward + backward, ratio to bf16 in the same mode")
    print(f"{'T x K x N':>20}  {'mode':<9}" + "".join(f"{kind:>26}" for kind in PRECISION_KINDS))
    for shape in [tuple(s) for s in args.shape] if args.shape else SHAPES:
        for compiled in (False, True):
            times = fastest_ms({k: step(k, shape, compiled, device) for k in PRECISION_KINDS}, device)
            cells = "".join(
                f"{times[k]:15.1f} ({times['none'] / times[k]:5.2f}x)   " for k in PRECISION_KINDS
            )
            print(f"{' x '.join(map(str, shape)):>20}  {'compiled' if compiled else 'eager':<9}{cells}")


if __name__ == "__main__":
    main()
