"""What an export in 8 bits and a server's rule for tokens change of a trained model, on its held-out rows.

    python benchmarks/quantized.py RUN --format int8

RUN: a finished run of continued_pretrain on one rank, in a precision.kind that --format serves. Each line is
the mean loss less that of training's own forward, its standard error, and the KL divergence from it:

    high export                     weights in the dtypes of the base, tokens in high precision
    quantized, server's tokens      training's codes and scales; tokens by the rule of the format
    requantized, server's tokens    the high export, rounded anew by the usual rule (amax / 127.5, amax / 448)
"""

import argparse
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lptune import checkpoint, data, linear, models
from lptune.checkpoint.resume import newest_verified
from lptune.config import ExportConfig, PretrainConfig, load_config

Weights = dict[str, Tensor]


def usual(x: Tensor, fmt: str, dim: int | tuple[int, ...]) -> Tensor:
    """x by the servers' rule, with one scale for all elements along `dim`, dequantized."""
    scale = x.abs().amax(dim, keepdim=True) / (127.5 if fmt == "int8" else 448)
    if fmt == "int8":
        return (x / scale).round().clamp(-128, 127) * scale
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def usual_tokens(x: Tensor, fmt: str) -> Tensor:
    if fmt == "float8_block":
        return usual(x.unflatten(-1, (-1, 128)), fmt, -1).flatten(-2)
    return usual(x, fmt, -1)


def usual_weight(w_NK: Tensor, fmt: str) -> Tensor:
    if fmt != "float8_block":
        return usual(w_NK, fmt, 1)
    n, k = w_NK.shape
    padded = nn.functional.pad(w_NK, (0, -k % 128, 0, -n % 128))
    blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    return usual(blocks, fmt, (1, 3)).flatten(2).flatten(0, 1)[:n, :k]


def exported(path: Path, base: models.HFIndex, cfg: ExportConfig) -> tuple[Weights, set[str]]:
    """(weights in float32, names of those in 8 bits) of an export of the checkpoint `path`."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.export_hf(path, base, Path(folder) / "export", cfg)
        files = [load_file(file) for file in (Path(folder) / "export").glob("*.safetensors")]
    in_8_bits = {name for file in files for name, tensor in file.items() if tensor.element_size() == 1}
    weights: Weights = {}
    for name, tensor in (item for file in files for item in file.items()):
        scale = next((file[each] for file in files for each in (f"{name}_scale",) if each in file), None)
        blocks = next((file[each] for file in files for each in (f"{name}_scale_inv",) if each in file), None)
        if blocks is not None:
            scale = blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)[
                : len(tensor), : tensor.shape[1]
            ]
        weights[name] = tensor.float() if scale is None else tensor.float() * scale
    return weights, in_8_bits


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--format", required=True, choices=["int8", "float8", "float8_block"])
    args = parser.parse_args()
    fmt, cfg = args.format, load_config(PretrainConfig, args.run / "config.yaml")
    base = checkpoint.read_base(cfg.model.path, print)
    newest = newest_verified(args.run / "checkpoints", print)
    assert newest is not None
    trained, _ = exported(newest.folder, base.index, ExportConfig(dtype="float32"))
    high, _ = exported(newest.folder, base.index, ExportConfig())
    low, in_8_bits = exported(newest.folder, base.index, ExportConfig(quantized=fmt))
    again = {name: usual_weight(w, fmt) if name in in_8_bits else w for name, w in high.items()}
    tokenizer = data.load_tokenizer(base.folder, cfg.data.chat_template)
    vocab_size = base.config.vocab_size
    held_out = data.prepare(cfg.data, tokenizer, seed=cfg.seed, vocab_size=vocab_size).held_out

    def log_p(weights: Weights, *, converts: bool = False, serves: bool = False) -> tuple[Tensor, Tensor]:
        """(log probabilities, labels) of all held-out targets."""
        model = base.build_on_meta()
        if converts:
            linear.convert(model, cfg.precision, device=torch.device("cpu"))
        model.to_empty(device="cpu")
        model.reset_buffers("cpu")
        for names in models.aliases(model):
            model.get_parameter(names[0]).copy_(next(weights[name] for name in names if name in weights))
        for name, module in model.named_modules():
            if serves and f"{name}.weight" in in_8_bits:
                module.register_forward_pre_hook(lambda _, inputs: (usual_tokens(inputs[0], fmt),))
        found = []
        for batch in data.evaluation_batches(held_out, cfg.micro_batch_size):
            logits = model(batch.tokens_BS, models.DocumentBounds.of(batch))
            is_target = batch.labels_BS != models.IGNORE_INDEX
            found.append((logits[is_target].float().log_softmax(-1), batch.labels_BS[is_target]))
        return torch.cat([each for each, _ in found]), torch.cat([each for _, each in found])

    own, labels = log_p(trained, converts=True)
    print(f"training's forward: loss {-own.gather(1, labels[:, None]).mean():.5f} of {len(labels)} targets")
    for name, weights, serves in (
        ("high export", high, False),
        ("quantized, server's tokens", low, True),
        ("requantized, server's tokens", again, True),
    ):
        theirs, _ = log_p(weights, serves=serves)
        more = (own - theirs).gather(1, labels[:, None]).double()
        error = more.std() / len(labels) ** 0.5
        divergence = (own.exp() * (own - theirs)).sum(-1).mean()
        print(f"{name:30s} {more.mean():+.5f} +- {error:.5f}  KL {divergence:.2e}")


if __name__ == "__main__":
    main()
