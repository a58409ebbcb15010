"""Packed rows and their documents, by lptune and by transformers; a model of which nothing is left out."""

from pathlib import Path

import torch
from torch import Tensor, nn

from lptune import checkpoint, models
from lptune.models import DocumentBounds

LENGTHS = ((20, 11, 17), (5, 43))
"""Of the documents of two rows, in tokens."""
SEQ_LEN = sum(LENGTHS[0])


def bounds() -> DocumentBounds:
    """Of the rows of LENGTHS."""
    rows = LENGTHS
    starts = [
        row * SEQ_LEN + sum(lengths[:n]) for row, lengths in enumerate(rows) for n in range(len(lengths))
    ]
    num_tokens = len(rows) * SEQ_LEN
    return DocumentBounds(
        torch.tensor([[place for length in row for place in range(length)] for row in rows]),
        torch.tensor([[n for n, length in enumerate(row) for _ in range(length)] for row in rows]),
        torch.tensor([*starts, *[num_tokens] * (num_tokens + 1 - len(starts))], dtype=torch.int32),
    )


def loaded(folder: Path) -> models.Backbone:
    """The model of `folder`, every value of which was read or computed."""
    base = checkpoint.read_base(str(folder), print)
    model = models.build_on_meta(base.config).to_empty(device="cpu")
    with torch.no_grad():
        for each in (*model.parameters(), *model.buffers()):
            each.fill_(torch.nan) if each.is_floating_point() else each.fill_(-1)
    model.reset_buffers("cpu")
    checkpoint.load_hf(model, base.index)
    return model


def alone(reference: nn.Module, tokens_BS: Tensor) -> Tensor:
    """Logits (B, S, V) of a model of transformers, each document of LENGTHS by itself."""
    rows = []
    for row, lengths in enumerate(LENGTHS):
        parts = tokens_BS[row].split(list(lengths))
        rows.append(torch.cat([reference(input_ids=part[None], use_cache=False).logits[0] for part in parts]))
    return torch.stack(rows)
