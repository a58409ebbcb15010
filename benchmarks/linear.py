"""Forward and backward of one linear layer, quantization included: every kind against bf16 and torchao.

    python benchmarks/linear.py [--threads N] [--shape T K N]... [--kind KIND]... [--mode eager|compiled]...
                                [--json FILE]

Prints milliseconds (the fastest of several interleaved rounds: other work only ever adds time) and the
ratio to bf16 in the same mode. torchao's layer stands beside ours where it is installed and has the kind.
Runs on whatever device it finds; what a device has no 8-bit GEMM for runs emulated and is marked so: that
time says nothing about the kind.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from lptune import linear
from lptune.config import PRECISION_KINDS, PrecisionConfig, UserError

CPU_SHAPES = [(2048, 2048, 2048), (2048, 2048, 5632)]
GPU_SHAPES = [(8192, 4096, 14336), (8192, 14336, 4096), (8192, 4096, 4096), (8192, 4096, 1024)]
ROUNDS = 9

Shape = tuple[int, int, int]


def our_layer(kind: str, layer: nn.Sequential) -> tuple[str, linear.Plan]:
    """Converts `layer` in place; the kind's label, marked where the device only emulates it, and the plan."""
    try:
        plan = linear.convert(layer, PrecisionConfig(kind=kind))
    except UserError:
        plan = linear.convert(layer, PrecisionConfig(kind=kind, emulate=True))
    emulated = plan.backend(next(layer.parameters()).device.type) == "emulation"
    return f"{kind} (emulated)" if emulated else kind, plan


def torchao_layer(kind: str, layer: nn.Sequential) -> str | None:
    """torchao's conversion of the same kind in place, None where there is none."""
    try:
        if kind == "int8_rowcol":
            from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig
            from torchao.quantization import quantize_

            # Without module_swap it changes nothing at all since 0.15.
            quantize_(layer, Int8MixedPrecisionTrainingConfig(module_swap=True))
            return "torchao int8_rowcol"
        recipe = {
            "float8_tensorwise": "tensorwise",
            "float8_rowwise": "rowwise",
            "float8_rowwise_with_gw_hp": "rowwise_with_gw_hp",
        }.get(kind)
        if recipe is None or not _has_float8(layer):
            return None
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(layer, config=Float8LinearConfig.from_recipe_name(recipe))
        return f"torchao {kind}"
    except ImportError:
        return None


def _has_float8(layer: nn.Sequential) -> bool:
    device = next(layer.parameters()).device
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def step(layer: nn.Module, shape: Shape, compiled: bool) -> Callable[[], None]:
    """One forward and backward through `layer`: x (T, K), weight (N, K), bfloat16."""
    tokens, k, n = shape
    device = next(layer.parameters()).device
    run = torch.compile(layer, dynamic=False) if compiled else layer
    x = torch.randn(tokens, k, dtype=torch.bfloat16, device=device, requires_grad=True)
    g = torch.randn(tokens, n, dtype=torch.bfloat16, device=device)

    def once() -> None:
        x.grad = None
        layer.zero_grad(set_to_none=True)
        run(x).backward(g)

    once()
    return once


def steps(
    shape: Shape, kinds: list[str], compiled: bool, device: str, peers: bool = True
) -> dict[str, Callable[[], None]]:
    """What is timed under which label; ours is verified to run in 8 bits."""

    def new_layer() -> nn.Sequential:
        return nn.Sequential(nn.Linear(shape[1], shape[2], bias=False, dtype=torch.bfloat16, device=device))

    found = {}
    for kind in kinds:
        layer = new_layer()
        label, plan = our_layer(kind, layer)
        found[label] = step(layer, shape, compiled)
        with linear.verify_step(layer, plan, 1):
            found[label]()
        layer = new_layer()
        theirs = torchao_layer(kind, layer) if peers else None
        if theirs is not None:
            found[theirs] = step(layer, shape, compiled)
    return found


def fastest_ms(timed: dict[str, Callable[[], None]], device: str, rounds: int = ROUNDS) -> dict[str, float]:
    """The fastest of so many rounds; the kinds take turns, so that a disturbance meets all of them."""
    best = dict.fromkeys(timed, float("inf"))
    calls = 10 if device == "cuda" else 1  # queued together, so that the GPU and not the launching is timed
    for _ in range(rounds):
        for label, once in timed.items():
            if device == "cuda":
                torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(calls):
                once()
            if device == "cuda":
                torch.cuda.synchronize()
            best[label] = min(best[label], 1e3 * (time.perf_counter() - started) / calls)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--shape", type=int, nargs=3, action="append", metavar=("T", "K", "N"))
    parser.add_argument("--kind", action="append", choices=list(PRECISION_KINDS))
    parser.add_argument("--mode", action="append", choices=["eager", "compiled"])
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    # Every layer timed is compiled for itself; together that is more than a function's limit.
    torch._dynamo.config.recompile_limit = 100
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {args.threads} threads"
    shapes = [tuple(s) for s in args.shape] if args.shape else GPU_SHAPES if device == "cuda" else CPU_SHAPES
    kinds = ["none", *(kind for kind in args.kind or PRECISION_KINDS if kind != "none")]
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {name}")
    rows = []
    for shape in shapes:
        for mode in args.mode or ["eager", "compiled"]:
            print(f"\n{' x '.join(map(str, shape))} (T x K x N), {mode}: ms per forward + backward")
            times = fastest_ms(steps(shape, kinds, mode == "compiled", device), device)
            for label, ms in times.items():
                print(f"  {label:<38}{ms:10.1f}  {times['none'] / ms:6.2f}x of bf16")
                row = {"shape": shape, "mode": mode, "label": label, "ms": ms, "ratio": times["none"] / ms}
                rows.append(row)
    if args.json:
        facts = {"torch": torch.__version__, "device": name, "rows": rows}
        args.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
