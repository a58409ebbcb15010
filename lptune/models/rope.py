"""Rotary positions: dimensions i and i + R/2 of q and k are rotated by the angle position * inv_freq[i].

Some checkpoints pair dimensions 2i and 2i + 1. Their heads are put into the order above first, and stay so: q
and k have the same order, and the scores q @ k.T do not depend on it.

`inv_freq[i] = theta ** (-2i / R)` is a geometric series of frequencies. Checkpoints with a stretched context
change this series. `linear` divides all frequencies by a factor. `llama3` and `yarn` divide the slow
frequencies and keep the fast ones, with different ramps between. `longrope` divides each frequency by its own
number, with one set of numbers for documents up to the original length and one for longer documents.

Angles, cos, sin and the rotation are in float32, because at position 8,000 a bf16 angle is wrong by whole
turns. The tables are computed once per forward, for all layers that share them.

Shapes: B batch, S sequence, N heads, D head size, R rotated dimensions (R <= D), F = R/2 frequencies.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from lptune.models.config import RopeConfig
from lptune.models.context import Group, part
from lptune.models.documents import DocumentBounds


class Rope(NamedTuple):
    """cos and sin of the angles of each token, float32. B is 1 if all rows have the same positions."""

    cos_BS1R: Tensor
    sin_BS1R: Tensor
    query_scale_BS11: Tensor | None = None
    """Of rotated queries, see `RopeConfig.query_growth`; None: 1."""

    def part(self, group: Group) -> "Rope":
        """The rotations of this rank's part of the tokens (context.py)."""
        scale = self.query_scale_BS11
        cos, sin = part(self.cos_BS1R, group), part(self.sin_BS1R, group)
        return Rope(cos, sin, None if scale is None else part(scale, group))


def apply_rope(x_BSND: Tensor, rope: Rope, *, interleaved: bool = False) -> Tensor:
    """Rotates the first R dimensions of every head. Computed in float32, returned in the dtype of x.

    interleaved: the pairs are (2i, 2i + 1); the result has them at (i, i + R/2).
    """
    rotary_dim = rope.cos_BS1R.shape[-1]
    turned, passed = x_BSND[..., :rotary_dim].float(), x_BSND[..., rotary_dim:]
    if interleaved:
        turned = turned.unflatten(-1, (-1, 2)).transpose(-2, -1).flatten(-2)
    first, second = turned.chunk(2, dim=-1)
    rotated = turned * rope.cos_BS1R + torch.cat((-second, first), dim=-1) * rope.sin_BS1R
    rotated = rotated.to(x_BSND.dtype)
    return rotated if passed.shape[-1] == 0 else torch.cat((rotated, passed), dim=-1)


def inverse_frequencies(config: RopeConfig, *, long: bool = False) -> Tensor:
    """The frequencies, float32 (F,). long: for longrope, those of documents beyond the original length.

    Always computed on the CPU, because the last bit of pow() differs between devices.
    """
    with torch.device("cpu"):
        exponent_F = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
        base_F = config.theta**exponent_F
        if config.kind == "longrope":
            factors = config.long_factor if long else config.short_factor
            return 1.0 / (torch.tensor(factors, dtype=torch.float32) * base_F)
        if config.kind == "yarn":
            return _yarn(config, base_F)
        inv_freq_F = 1.0 / base_F
        if config.kind == "linear":
            return inv_freq_F / config.factor
        if config.kind == "llama3":
            return _llama3(config, inv_freq_F)
        return inv_freq_F


def _llama3(config: RopeConfig, inv_freq_F: Tensor) -> Tensor:
    """Divides slow frequencies by `factor`, keeps fast ones, with a ramp between, linear in 1/wavelength."""
    turns_F = config.original_max_position_embeddings * inv_freq_F / (2 * math.pi)
    keep_F = (turns_F - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    keep_F = keep_F.clamp(0, 1)
    return keep_F * inv_freq_F + (1 - keep_F) * inv_freq_F / config.factor


def _yarn(config: RopeConfig, base_F: Tensor) -> Tensor:
    """Like `_llama3`, with a ramp linear in the number of the dimension (arXiv:2309.00071, section 3.2)."""

    def dimension_that_turns(turns: float) -> float:
        length = config.original_max_position_embeddings / (turns * 2 * math.pi)
        return config.rotary_dim * math.log(length) / (2 * math.log(config.theta))

    low, high = dimension_that_turns(config.beta_fast), dimension_that_turns(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    width = high - low if high != low else 0.001
    stretch_F = ((torch.arange(base_F.shape[0], dtype=torch.float32) - low) / width).clamp(0, 1)
    return stretch_F / (config.factor * base_F) + (1 - stretch_F) / base_F


class RopeTable(nn.Module):
    """Computes `Rope` from positions. Its frequencies are buffers that no checkpoint stores.

    They are recomputed after each move or cast of the module, so that they are right after `to_empty()` and
    `.to(torch.bfloat16)`.
    """

    inv_freq_F: Tensor
    long_inv_freq_F: Tensor

    def __init__(self, config: RopeConfig) -> None:
        super().__init__()
        self.config = config
        device = torch.empty(0).device  # the default device, `meta` inside build_on_meta
        self.register_buffer("inv_freq_F", inverse_frequencies(config).to(device), persistent=False)
        if config.kind == "longrope":
            self.register_buffer(
                "long_inv_freq_F", inverse_frequencies(config, long=True).to(device), persistent=False
            )

    def reset(self, device: torch.device) -> None:
        """Computes the frequencies again, on `device`."""
        self.inv_freq_F = inverse_frequencies(self.config).to(device)
        if self.config.kind == "longrope":
            self.long_inv_freq_F = inverse_frequencies(self.config, long=True).to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.reset(self.inv_freq_F.device)
        return self

    def forward(self, documents: DocumentBounds | None, seq_len: int) -> Rope:
        """The rotation of every token. documents: None if each row is one document."""
        inv_freq_F = self.inv_freq_F
        if documents is None:
            positions_BS = torch.arange(seq_len, device=inv_freq_F.device)[None]
            if self.config.kind == "longrope" and seq_len > self.config.original_max_position_embeddings:
                inv_freq_F = self.long_inv_freq_F
        else:
            positions_BS = documents.positions_BS
            if self.config.kind == "longrope":
                is_long_BS = _last_position(documents) >= self.config.original_max_position_embeddings
                inv_freq_F = torch.where(is_long_BS[..., None], self.long_inv_freq_F, inv_freq_F)
        angle_BSF = positions_BS[..., None].float() * inv_freq_F
        angle_BS1R = torch.cat((angle_BSF, angle_BSF), dim=-1)[:, :, None, :]
        factor, query_scale_BS11 = self.config.attention_factor, None
        if growth := self.config.query_growth:
            lengths_BS = torch.floor(positions_BS / self.config.original_max_position_embeddings)
            query_scale_BS11 = (1 + growth * torch.log1p(lengths_BS))[..., None, None]
        return Rope(angle_BS1R.cos() * factor, angle_BS1R.sin() * factor, query_scale_BS11)


def _last_position(documents: DocumentBounds) -> Tensor:
    """(B, S): the last position of each token's document. Has static shapes, and the host does not wait."""
    largest = torch.zeros_like(documents.positions_BS)  # column i of a row: document i
    largest = largest.scatter_reduce(1, documents.index_BS, documents.positions_BS, "amax")
    return largest.gather(1, documents.index_BS)
