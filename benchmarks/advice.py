"""Does `lptune advise` rank the kinds as whole training steps do? One command, one table.

    python benchmarks/advice.py [--hidden 2048] [--mlp 5632] ... [--seconds 60] [--rounds 7] [--json FILE]

First advise's own code times the parts and predicts a step of each kind that runs natively; then whole steps
of the same model are timed as benchmarks/step.py does, in turns, on the same tokens. Rows are one document
each, as advise has them. Prints the predicted and the measured speed-up over `none` for each kind, and the
rank correlation (Spearman's, over all kinds, `none` included).
"""

import statistics
import tempfile
from pathlib import Path

import step as step_benchmark  # benchmarks/step.py
import torch
from harness import Results, device_name, parser, strict_compilation
from step_variants import Packed, Setting, make, write_inputs

from lptune import distributed, linear, models
from lptune.config import DataConfig, FinetuneConfig, ModelConfig, ParallelConfig
from lptune.tools.advise import from_times, measure


def ranks(values: list[float]) -> list[int]:
    """The place of each value, the smallest first. Ties keep their order."""
    order = sorted(range(len(values)), key=values.__getitem__)
    return [order.index(i) for i in range(len(values))]


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Spearman's rank correlation of values without ties."""
    return statistics.correlation(ranks(a), ranks(b))


def main() -> None:
    arguments = parser(__doc__)
    sizes = {"layers": 2, "hidden": 2048, "heads": 16, "kv-heads": 8, "mlp": 5632, "vocab": 2020}
    for name, size in {**sizes, "batch": 4, "seq-len": 512}.items():
        arguments.add_argument(f"--{name}", type=int, default=size)
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--seconds", type=float, default=60.0, help="for advise")
    args = arguments.parse_args()
    torch.set_num_threads(args.threads)
    content = step_benchmark.config_of(args)
    cfg = FinetuneConfig(
        model=ModelConfig(path="none"),
        data=DataConfig(source="builtin", seq_len=args.seq_len),
        micro_batch_size=args.batch,
        global_batch_size=args.batch,
        activation_checkpointing="none",
    )
    with (
        tempfile.TemporaryDirectory() as temporary,
        distributed.session("auto", ParallelConfig()) as world,
        Results(args.json, config=content) as results,
    ):
        kinds = [kind for kind in linear.native_kinds(world.device) if kind != "none"]
        found = measure.measure(cfg, models.config_from_dict(content), kinds, args.seconds, world)
        predicted = {each.kind: each.speedup for each in from_times.predict(found, num_micro_batches=1)}
        print(
            f"{device_name()}: advise took {found.duration_s:.1f} s, {len(found.pairs)} of "
            f"{len(found.groups) * len(kinds)} pairs, with {found.timed_tokens} of {found.tokens} tokens"
        )
        for (group, kind), pair in found.pairs.items():
            none_ms, low_ms = ([1e3 * each for each in times] for times in (pair.none, pair.low))
            print(
                f"  {group.label:<10}{kind:<18} pass {none_ms[0]:.1f} -> {low_ms[0]:.1f} ms, "
                f"update {none_ms[1]:.1f} -> {low_ms[1]:.1f} ms",
                flush=True,
            )
        results.update(parts=from_times.parts_of(found, 1), advise_s=found.duration_s)

        torch._dynamo.reset()
        strict_compilation(32)
        rows = Packed.random(args.batch, args.seq_len, args.vocab, 0)
        write_inputs(folder := Path(temporary), content, rows, 0)
        rows = rows._replace(bounds=models.DocumentBounds.single(args.batch, args.seq_len))
        execution = distributed.Execution(parallel=ParallelConfig())
        setting = Setting(folder, rows, world, execution, Path())
        steps = {kind: make(kind, setting) for kind in ["none", *kinds]}
        for step in steps.values():
            step(), step()
        seconds = step_benchmark.measure(steps, args.rounds, results)
        print(f"{'kind':<20}{'predicted':>10}{'measured':>10}{'  (rounds)':<18}{'of the fastest':>16}")
        fastest = {kind: min(times) for kind, times in seconds.items()}
        for kind, times in seconds.items():
            ratios = [a / b for a, b in zip(seconds["none"], times, strict=True)]
            row = results.add(
                kind=kind,
                predicted=predicted[kind],
                measured=statistics.median(ratios),
                smallest=min(ratios),
                largest=max(ratios),
                of_fastest=fastest["none"] / fastest[kind],
                times_s=times,
            )
            spread = f"  ({row['smallest']:.2f} to {row['largest']:.2f})"
            print(
                f"{kind:<20}{row['predicted']:>9.2f}x{row['measured']:>9.2f}x{spread:<18}"
                f"{row['of_fastest']:>15.2f}x"
            )
        names = list(seconds)
        correlation = rank_correlation(
            [predicted[kind] for kind in names], [fastest["none"] / fastest[kind] for kind in names]
        )
        results.update(rank_correlation=correlation)
        print(f"rank correlation: {correlation:.2f}")


if __name__ == "__main__":
    main()
