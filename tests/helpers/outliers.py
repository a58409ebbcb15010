"""A model whose activations have outliers, as those of trained models do, and labels that it knows."""

import torch

from lptune.data import Batch
from lptune.models import Decoder, DecoderConfig, DocumentBounds, build_on_meta


@torch.no_grad()
def fill(model: Decoder, factor: float) -> None:
    """Random weights that are large enough for every layer to matter. One channel that down_proj reads is
    `factor` times as large, and the weights that multiply it are as much smaller: the same function.
    """
    for name, parameter in model.named_parameters():
        values = model.initial_value(name, seed=0)
        if values.dim() == 2:
            values *= 16.0
        if name.endswith("up_proj.weight"):
            values[3] *= factor
        if name.endswith("down_proj.weight"):
            values[:, 3] /= factor
        parameter.copy_(values)


@torch.no_grad()
def known_batch(config: DecoderConfig, rows: int, seq_len: int, seed: int = 0) -> Batch:
    """Random tokens; labels are drawn from what the model predicts in high precision, so an error costs its
    Kullback-Leibler divergence.
    """
    model = build_on_meta(config)
    model.to_empty(device="cpu")
    model.reset_buffers("cpu")
    fill(model, 1.0)
    generator = torch.Generator().manual_seed(seed)
    tokens_BS = torch.randint(config.vocab_size, (rows, seq_len), generator=generator)
    logits_BSV = model(tokens_BS, DocumentBounds.single(rows, seq_len, torch.device("cpu")))
    labels_BS = logits_BSV.softmax(-1).flatten(0, 1).multinomial(1, generator=generator).view(rows, seq_len)
    positions_BS = torch.arange(seq_len).expand(rows, seq_len).contiguous()
    zeros_BS, ends = torch.zeros_like(tokens_BS), torch.arange(rows + 1, dtype=torch.int32) * seq_len
    numbers_D = torch.arange(rows)
    return Batch(
        tokens_BS,
        labels_BS,
        positions_BS,
        zeros_BS,
        ends,
        tokens_BS.numel(),
        True,
        zeros_BS,
        numbers_D,
    )
