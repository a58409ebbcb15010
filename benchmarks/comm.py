"""Bytes of FSDP's all-gathers: 8-bit weights against bfloat16, for models of real shapes.

    python benchmarks/comm.py [--preset llama3_2/1b]... [--ranks 8] [--kind int8_rowcol]

The closed form: a converted weight (N, K) brings K bytes a row to each rank, and 16 more where a row has a
scale of its own, N padded to the number of ranks; everything else its compute dtype. Scales of tensors and
blocks are not gathered: one all-reduce a step brings their amaxes, 4 bytes each (last column; float8_delayed
sends those of x and g with them). tests/distributed/test_gather.py counts the bytes of collectives as they
run and holds them to the same form. Nothing is allocated: the models are on meta.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from lptune import linear, models
from lptune.checkpoint.files import write_json
from lptune.config import PrecisionConfig
from lptune.kernels import OPERANDS
from lptune.linear.weights.master_weight import gather_bytes

PRESETS = ["llama3_2/1b", "llama3_2/3b", "llama3_1/8b", "llama3_1/70b", "qwen3/0.6b", "gemma2/2b"]


def build(preset: str) -> nn.Module:
    """The model of a preset on meta."""
    family, _, size = preset.partition("/")
    with tempfile.TemporaryDirectory() as folder:
        write_json(Path(folder) / "config.json", dict(models.PRESETS[family][size]))
        return models.build_on_meta(models.read_config(Path(folder)))


def gathered_bytes(model: nn.Module, low: dict[str, linear.LinearSpec], num_ranks: int) -> int:
    """What one gather of all weights brings to a rank; `low`: the weights that come in 8 bits."""
    total = 0
    for name, parameter in model.named_parameters():
        rows = -(-parameter.shape[0] // num_ranks) * num_ranks
        high = rows * 2 * (parameter.numel() // parameter.shape[0])
        total += gather_bytes(parameter.shape, num_ranks, low[name]) if name in low else high
    return total


def reduced_bytes(shape: Sequence[int], spec: linear.LinearSpec) -> int:
    """What a step's all-reduce holds for a weight of `shape`: float32 amaxes."""
    kind = linear.kind_of(spec)
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
