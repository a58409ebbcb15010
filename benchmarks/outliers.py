"""Makes a checkpoint that computes what another does, but whose activations have outlier channels.

    python benchmarks/outliers.py FOLDER OUT [--channels 2] [--factor 64]

A small model has no outliers, and outliers are what 8 bits suffer from. Here some channels of what a linear
layer of a Llama reads become FACTOR times as large, and the weights that multiply them as much smaller:

    input_layernorm, post_attention_layernorm   weight x FACTOR    q_proj, k_proj, v_proj; gate_proj, up_proj
    up_proj                                     rows x FACTOR      down_proj

FACTOR is a power of two, so no rounding changes: in high precision the logits are the same bits. Training is
another one, as Adam moves a small weight as far as a large one. Then `lptune sweep --config C model.path=OUT
precision.kind=all` compares the kinds.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.up_proj": ("mlp.down_proj",),
}
"""What writes channels -> the layers that read them."""
TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Norms of other types multiply by 1 + weight, or stand elsewhere."""


def with_outliers(
    weights: dict[str, Tensor], num_layers: int, channels: int, factor: float
) -> dict[str, Tensor]:
    """The weights of the same function with outliers, by the names of a Hugging Face folder."""
    found = {name: weight.clone() for name, weight in weights.items()}
    generator = torch.Generator().manual_seed(0)
    for layer in range(num_layers):
        for writer, readers in READERS.items():
            written = found[f"model.layers.{layer}.{writer}.weight"]
            chosen = torch.randperm(len(written), generator=generator)[:channels]
            written[chosen] *= factor
            for reader in readers:
                found[f"model.layers.{layer}.{reader}.weight"][:, chosen] /= factor
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--channels", type=int, default=2)
    parser.add_argument("--factor", type=float, default=64.0)
    args = parser.parse_args()
    config = json.loads((args.folder / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] not in TYPES:
        sys.exit(f"{args.folder}: is of type {config['model_type']}; give one of {', '.join(TYPES)}")
    if torch.frexp(torch.tensor(args.factor)).mantissa != 0.5:
        sys.exit(f"--factor: {args.factor:g} is no power of two; weights would be rounded")
    shutil.copytree(args.folder, args.out)
    file = args.out / "model.safetensors"
    weights = with_outliers(load_file(file), config["num_hidden_layers"], args.channels, args.factor)
    save_file(weights, file, metadata={"format": "pt"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
