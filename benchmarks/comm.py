"""Bytes of FSDP's all-gathers: 8-bit rows against bfloat16, for models of real shapes.

    python benchmarks/comm.py [--preset llama3_2/1b]... [--ranks 8] [--kind int8_rowcol]

The closed form: a converted weight (N, K) brings 16 + K bytes a row to each rank, N padded to the number of
ranks; everything else its compute dtype. tests/distributed/test_gather.py counts the bytes of collectives as
they run and holds them to the same form. Nothing is allocated: the models are on meta.
"""

import argparse
import tempfile
from pathlib import Path

from torch import nn

from lptune import linear, models
from lptune.checkpoint.files import write_json
from lptune.config import PrecisionConfig
from lptune.linear.row_tensor import HEADER_BYTES

PRESETS = ["llama3_2/1b", "llama3_2/3b", "llama3_1/8b", "llama3_1/70b", "qwen3/0.6b", "gemma2/2b"]


def build(preset: str) -> nn.Module:
    """The model of a preset on meta."""
    family, _, size = preset.partition("/")
    with tempfile.TemporaryDirectory() as folder:
        write_json(Path(folder) / "config.json", dict(models.PRESETS[family][size]))
        return models.build_on_meta(models.read_config(Path(folder)))


def gathered_bytes(model: nn.Module, low: set[str], num_ranks: int) -> int:
    """What one gather of all weights brings to a rank; `low`: names of the weights that come in 8 bits."""
    total = 0
    for name, parameter in model.named_parameters():
        rows = -(-parameter.shape[0] // num_ranks) * num_ranks
        width = parameter.numel() // parameter.shape[0]
        total += rows * (HEADER_BYTES + width if name in low else 2 * width)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", action="append")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--kind", default="int8_rowcol")
    args = parser.parse_args()
    print(f"{args.kind}, {args.ranks} ranks; GB that one gather of all weights brings to a rank")
    print(f"{'':<16}{'bfloat16':>10}{'8-bit':>10}{'ratio':>8}{'converted weights alone':>26}")
    for preset in args.preset or PRESETS:
        model = build(preset)
        plan = linear.convert(model, PrecisionConfig(kind=args.kind))
        low = {f"{layer.name}.weight" for layer in plan.converted if layer.spec and layer.spec.gathers_low}
        parameters = dict(model.named_parameters())
        sizes = [parameters[name].shape for name in low]
        alone = sum(n * (HEADER_BYTES + k) for n, k in sizes) / max(1, sum(2 * n * k for n, k in sizes))
        before, after = (gathered_bytes(model, names, args.ranks) for names in (set(), low))
        row = f"{before / 1e9:>10.3f}{after / 1e9:>10.3f}{after / before:>8.3f}{alone:>26.4f}"
        print(f"{preset:<16}{row}")


if __name__ == "__main__":
    main()
