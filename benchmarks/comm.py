"""Computes the bytes of FSDP's all-gathers, with 8-bit weights and with bfloat16, for models of real shapes.

    python benchmarks/comm.py [--preset llama3_2/1b]... [--ranks 8] [--kind int8_rowcol]

The formula: each rank receives K bytes per row of a converted weight (N, K), plus 16 bytes per row if rows
have scales, with N padded to a multiple of the number of ranks. Other weights are gathered in the compute
dtype. Scales of tensors and blocks are not gathered: one all-reduce per step exchanges their amaxes, 4 bytes
each (last column; for float8_delayed it includes the amaxes of x and g). tests/distributed/test_gather.py
counts the bytes of real collectives and compares them with this formula. Models are on meta, so nothing is
allocated.
"""

import argparse
from collections.abc import Sequence

from torch import nn
from traffic import config_of  # benchmarks/traffic.py

from lptune import linear, models
from lptune.config import PrecisionConfig
from lptune.kernels import OPERANDS
from lptune.linear.weights.master_weight import gather_bytes

PRESETS = ["llama3_2/1b", "llama3_2/3b", "llama3_1/8b", "llama3_1/70b", "qwen3/0.6b", "gemma2/2b"]


def build(preset: str) -> nn.Module:
    """The model of a preset, on the meta device."""
    return models.build_on_meta(config_of(preset))


def gathered_bytes(model: nn.Module, low: dict[str, linear.LinearSpec], num_ranks: int) -> int:
    """Bytes that a rank receives when all weights are gathered once. low: the weights gathered in 8 bits."""
    total = 0
    for name, parameter in model.named_parameters():
        rows = -(-parameter.shape[0] // num_ranks) * num_ranks
        high = rows * 2 * (parameter.numel() // parameter.shape[0])
        total += gather_bytes(parameter.shape, num_ranks, low[name]) if name in low else high
    return total


def reduced_bytes(shape: Sequence[int], spec: linear.LinearSpec) -> int:
    """Bytes of float32 amaxes in the all-reduce of a step, for a weight of `shape`."""
    kind = spec.kind
    if kind.row_scales:
        return 0
    if kind.has_history:
        return 4 * len(OPERANDS)
    block = kind.weight_block
    return 4 if block is None else 4 * -(-shape[0] // block) * -(-shape[1] // block)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", action="append")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--kind", default="int8_rowcol")
    args = parser.parse_args()
    print(f"{args.kind}, {args.ranks} ranks; GB that one gather of all weights brings to a rank")
    head = f"{'':<16}{'bfloat16':>10}{'8-bit':>10}{'ratio':>8}{'converted weights alone':>26}"
    print(f"{head}{'all-reduce, kB a step':>24}")
    for preset in args.preset or PRESETS:
        model = build(preset)
        plan = linear.convert(model, PrecisionConfig(kind=args.kind))
        low = {
            f"{layer.name}.weight": layer.spec
            for layer in plan.converted
            if layer.spec and layer.spec.gathers_low
        }
        parameters = dict(model.named_parameters())
        ours = sum(gather_bytes(parameters[name].shape, 1, spec) for name, spec in low.items())
        alone = ours / max(1, sum(2 * parameters[name].numel() for name in low))
        reduced = sum(reduced_bytes(parameters[name].shape, spec) for name, spec in low.items())
        before, after = (gathered_bytes(model, names, args.ranks) for names in ({}, low))
        row = f"{before / 1e9:>10.3f}{after / 1e9:>10.3f}{after / before:>8.3f}{alone:>26.4f}"
        print(f"{preset:<16}{row}{reduced / 1e3:>24.1f}")


if __name__ == "__main__":
    main()
