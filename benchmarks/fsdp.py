"""Measures what FSDP2 would cost on one rank, where it has nothing to shard.

    python benchmarks/fsdp.py [--preset llama3_2/1b] [--kind none --kind int8_rowcol] [--steps 20] [--profile]

Both variants have the same model, data and compiled blocks, and the same bits. `sharded` is FSDP2 over a mesh
of one rank (parallel.reshard_after_forward=true), with 8-bit gathers if the kind has them. `plain` is what
recipes run on one rank: compute weights. The two take turns step by step in one process, so that other load
on the machine affects both. --profile prints the operators of a sharded step that a plain step does not have:
the path of the gather.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from comm import build  # benchmarks/comm.py
from harness import Results, device_name, parser, strict_compilation, synchronize
from torch.profiler import ProfilerActivity, profile

from lptune import distributed, linear, models, training
from lptune.config import OptimizerConfig, ParallelConfig, PrecisionConfig

WARM_UP = 3


def step_of(world: distributed.World, preset: str, kind: str, sharded: bool, args: Any) -> Callable[[], None]:
    """A function that runs one training step, with its own model and optimizer."""
    model = build(preset)
    assert isinstance(model, models.Decoder)
    precision = PrecisionConfig(kind=kind, emulate=args.emulate)
    plan = linear.convert(model, precision, device=world.device)
    parallel = ParallelConfig(reshard_after_forward=True if sharded else None)
    execution = distributed.Execution(
        parallel=parallel, compile=args.compile, activation_checkpointing="selective"
    )
    distributed.parallelize(model, world, execution)
    distributed.materialize(model, world, execution)
    with torch.no_grad():
        for parameter in model.parameters():
            local = distributed.on_this_rank(parameter)
            # An INT8 weight is filled by its own method; other weights are written in place.
            (local if linear.int8_rows(local) else linear.plain_rows(local)).normal_(0.0, 0.02)
    optimizer = training.build_optimizer(model, OptimizerConfig())
    low = linear.LowPrecision(model, plan, optimizer, world=world, verify=False)
    words = model.config.vocab_size
    tokens_BS = torch.randint(0, words, (args.batch, args.seq_len + 1), device=world.device)

    def step() -> None:
        with low.step(0, num_passes=1):
            loss = model(tokens_BS[:, :-1], None, tokens_BS[:, 1:])
            (loss / tokens_BS.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(step: Callable[[], None]) -> float:
    """The seconds that one call takes, with the work on the device."""
    synchronize()
    started = time.perf_counter()
    step()
    synchronize()
    return time.perf_counter() - started


def operators(step: Callable[[], None], device: torch.device) -> dict[str, tuple[int, float]]:
    """By name of the operator or kernel: (calls, its own milliseconds) in one step."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as recorded:
        timed(step)
    return {
        each.key: (
            each.count,
            (each.self_device_time_total if on_gpu else each.self_cpu_time_total) / 1e3,
        )
        for each in recorded.key_averages()
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--preset", default="llama3_2/1b")
    arguments.add_argument("--kind", action="append")
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--batch", type=int, default=2)
    arguments.add_argument("--seq-len", type=int, default=2048)
    arguments.add_argument("--compile", default="block", choices=["block", "none"])
    arguments.add_argument("--emulate", action="store_true")
    arguments.add_argument("--profile", action="store_true")
    args = arguments.parse_args()
    strict_compilation(16)
    with distributed.session() as world, Results(args.json, preset=args.preset) as results:
        print(
            f"{args.preset}, {args.batch} x {args.seq_len} tokens, torch {torch.__version__}, {device_name()}"
        )
        print(f"{'':<28}{'plain ms':>10}{'sharded ms':>12}{'sharded / plain':>17}")
        for kind in args.kind or ["none", "int8_rowcol"]:
            steps = {
                way: step_of(world, args.preset, kind, way == "sharded", args) for way in ("plain", "sharded")
            }
            seconds: dict[str, list[float]] = {way: [] for way in steps}
            for number in range(WARM_UP + args.steps):
                for way, step in steps.items():
                    took = timed(step)
                    if number >= WARM_UP:
                        seconds[way].append(took)
            medians = {way: statistics.median(found) * 1e3 for way, found in seconds.items()}
            ratio = medians["sharded"] / medians["plain"]
            results.add(kind=kind, plain_ms=medians["plain"], sharded_ms=medians["sharded"], ratio=ratio)
            print(f"{kind:<28}{medians['plain']:>10.2f}{medians['sharded']:>12.2f}{ratio:>17.4f}", flush=True)
            if args.profile:
                plain, sharded = (operators(steps[way], world.device) for way in ("plain", "sharded"))
                extra = {name: found for name, found in sharded.items() if name not in plain and found[1] > 0}
                for name, (calls, ms) in sorted(extra.items(), key=lambda item: -item[1][1])[:15]:
                    print(f"    {name[:70]:<72}{calls:>6} x{ms:>9.3f} ms")
            del steps


if __name__ == "__main__":
    main()
