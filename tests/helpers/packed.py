"""Packed rows and their documents, by lptune and by transformers; a model of which nothing is left out."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from lptune import checkpoint, distributed, linear, models
from lptune.config import FinetuneConfig
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


def batch(number: int, vocab_size: int = 100) -> tuple[Tensor, Tensor]:
    """Tokens and labels (B, S) of such rows. number: decides them."""
    draw = torch.Generator().manual_seed(number)
    tokens_BS = torch.randint(0, min(vocab_size, 100), (2, SEQ_LEN), generator=draw)
    labels_BS = tokens_BS.roll(-1, 1)
    labels_BS[bounds().positions_BS.roll(-1, 1) == 0] = models.IGNORE_INDEX
    return tokens_BS, labels_BS


def built(
    facts: models.Facts,
    cfg: FinetuneConfig,
    world: distributed.World,
    edit: Callable[[str, Tensor], Tensor] = lambda name, value: value,
) -> models.Backbone:
    """A model as a recipe makes it, with the same values on any ranks. edit: gets a name and its values."""
    model = models.build_on_meta(facts)
    linear.convert(model, cfg.precision, device=world.device, num_tokens=cfg.tokens_per_forward)
    distributed.parallelize(model, world, cfg)
    distributed.materialize(model, world, cfg)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for piece in distributed.local_pieces(parameter, ()):
                value = model.initial_value(name, 0)
                # So that biases, sinks and norms matter, which begin as zeros and ones.
                value = value + torch.linspace(-0.1, 0.1, len(value)) if value.dim() == 1 else value
                piece.values.copy_(edit(name, value)[piece.region])
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The whole gradient of each parameter, all of which have one. A collective."""
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = distributed.full_tensor(parameter.grad).contiguous()
    return found


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
