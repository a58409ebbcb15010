"""Predicts the time of a training step on one GPU from counted bytes and FLOPs. Nothing here is measured.

    python benchmarks/predict.py [--preset llama3_2/3b ...] [--tokens 8192 16384] [--device h200]

The model of a step, its assumptions and its error: lptune/plan/from_counts.py.
"""

import math

import harness
from traffic import KINDS, config_of

from lptune.hardware.devices import Device, named_device
from lptune.plan.from_counts import BF16, REFERENCE, Part, parts, total


def needed_rate(found: list[Part], bf16_ms: float, speedup: float, flops: float) -> float:
    """FLOP/s of the linear layers at which the step is `speedup` times as fast; inf: no rate suffices."""
    others = sum(each.ms[0] for each in found[1:])
    left = bf16_ms / speedup - others
    return flops / (1e-3 * left) if left > 0 else math.inf


def row(preset: str, tokens: int, device: Device = REFERENCE) -> str:
    """A row of the table in docs/gpu.md, of rows of 4096 tokens."""
    config = config_of(preset)
    sums = {kind: total(parts(kind, config, tokens, 4096, device)) for kind in KINDS}
    bf16 = sums["none"][0]
    cells = [f"{bf16:.0f}"]
    for kind in KINDS[1:]:
        ratios = "x to ".join(_ratios(bf16, sums[kind]).split(" to "))
        cells.append(f"{_range(sums[kind])} ({ratios}x)")
    name = preset.partition("/")[2].upper()
    return f"| {name}, {tokens // 1024}k tokens | {' | '.join(cells)} |"


def main() -> None:
    """Prints a step of each kind, and what a speed-up of 1.3 would need."""
    parser = harness.parser(__doc__)
    parser.add_argument("--preset", nargs="+", default=["llama3_2/1b", "llama3_2/3b"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--device", default="h200")
    args = parser.parse_args()
    device = named_device(args.device)
    with harness.Results(args.json, measured=False) as results:
        for preset in args.preset:
            config = config_of(preset)
            for tokens in args.tokens:
                found = {kind: parts(kind, config, tokens, args.seq_len, device) for kind in KINDS}
                print(f"\n{preset}, {tokens} tokens, {device.name}: predicted milliseconds")
                print(f"{'':28}" + "".join(f"{kind:>20}" for kind in KINDS))
                for rows in zip(*found.values(), strict=True):
                    print(f"{rows[0].name:28}" + "".join(f"{_range(row.ms):>20}" for row in rows))
                bf16 = total(found["none"])[0]
                sums = [total(each) for each in found.values()]
                print(f"{'step':28}" + "".join(f"{_range(each):>20}" for each in sums))
                print(f"{'times bf16':28}" + "".join(f"{_ratios(bf16, each):>20}" for each in sums))
                flops = 1e-3 * found["none"][0].ms[0] * BF16 * device.bf16 / REFERENCE.bf16
                for kind in KINDS[1:]:
                    rate = needed_rate(found[kind], bf16, 1.3, flops) / 1e12
                    print(f"  1.3x of bf16 with {kind}: linear layers at {rate:,.0f} TFLOP/s")
                for kind, each in zip(KINDS, sums, strict=True):
                    parts_ms = {part.name: part.ms for part in found[kind]}
                    results.add(preset=preset, tokens=tokens, kind=kind, ms=each, parts=parts_ms)


def _range(ms: tuple[float, float]) -> str:
    low, high = (f"{each:.0f}" if each >= 9.95 else f"{each:.1f}" for each in ms)
    return low if low == high else f"{low} to {high}"


def _ratios(bf16: float, ms: tuple[float, float]) -> str:
    low, high = (f"{bf16 / each:.2f}" for each in ms)
    return low if low == high else f"{low} to {high}"


if __name__ == "__main__":
    main()
