"""Document bounds of packed rows, and which keys a query sees.

A packed row has several documents one after the other. Attention must stay inside a document, so that packing
changes the speed but not the result. Query i sees key j if and only if both are in the same document, j <= i,
and, in a layer with a window, i - j < window. This file expresses this rule in the form that each attention
backend needs.

Shapes: B batch, S sequence.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:  # it imports the compiler
    from torch.nn.attention.flex_attention import BlockMask

    from lptune.models.cache import LayerCache
    from lptune.models.context import Group


class DocumentBounds(NamedTuple):
    """Document bounds: where the documents of a batch begin and end."""

    positions_BS: Tensor
    """int64, the position of each token in its document, from 0."""
    index_BS: Tensor
    """int64, the number of the token's document in its row: 0, 1, 2, ..."""
    offsets: Tensor
    """int32, the starts of documents in the B*S flattened tokens, padded with B*S to a constant length."""

    @classmethod
    def of(cls, batch: Any) -> "DocumentBounds | None":
        """The document bounds of `batch`, a data.Batch. None if each row is one document: attention is then
        causal over the whole row.
        """
        bounds = cls(batch.positions_BS, batch.document_BS, batch.offsets)
        return None if batch.one_document_per_row else bounds

    @classmethod
    def single(cls, batch: int, seq_len: int, device: torch.device | str | None = None) -> "DocumentBounds":
        """The bounds for rows of one document each."""
        return cls(
            positions_BS=torch.arange(seq_len, device=device).expand(batch, seq_len),
            index_BS=torch.zeros(batch, seq_len, dtype=torch.int64, device=device),
            offsets=torch.arange(0, (batch + 1) * seq_len, seq_len, dtype=torch.int32, device=device),
        )


class Visibility(NamedTuple):
    """Which keys a query sees, in the form of one attention backend. If the first four are None: every
    earlier key.
    """

    mask_B1SS: Tensor | None = None
    """For sdpa and explicit: bool, True where query (dim 2) sees key (dim 3). B may be 1. With `past`, dim 3
    has the places of the cache."""
    offsets: Tensor | None = None
    """For varlen: `DocumentBounds.offsets`."""
    document_offsets: Tensor | None = None
    """For documents: `DocumentBounds.offsets`."""
    blocks: "BlockMask | None" = None
    """For flex_attention: the blocks in which any key is visible."""
    past: "LayerCache | None" = None
    """For generation: where keys and values of earlier tokens are, and those of new ones go."""
    group: "Group | None" = None
    """The ranks that have a part of each row's tokens (context.py); the others are of whole rows."""


def visibility_mask(
    documents: DocumentBounds | None, seq_len: int, window: int | None, device: torch.device
) -> Tensor:
    """The mask for sdpa and explicit: bool (B, 1, S, S), True where the query (dim 2) sees the key (dim 3).
    documents: None if each row is one document; the mask is then (1, 1, S, S).
    """
    place_S = torch.arange(seq_len, device=device)
    distance_SS = place_S[:, None] - place_S[None, :]
    near_SS = distance_SS >= 0
    if window is not None:
        near_SS = near_SS & (distance_SS < window)
    if documents is None:
        return near_SS[None, None]
    same_BSS = documents.index_BS[:, :, None] == documents.index_BS[:, None, :]
    return (near_SS & same_BSS)[:, None]


def visibility_blocks(
    documents: DocumentBounds | None, batch: int, seq_len: int, window: int | None, device: torch.device
) -> "BlockMask":
    """`visibility_mask` as a BlockMask, with which flex_attention skips blocks where nothing is visible."""
    from torch.nn.attention.flex_attention import create_block_mask

    index_BS = None if documents is None else documents.index_BS

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = query >= key
        if window is not None:
            visible = visible & (query - key < window)
        if index_BS is not None:
            visible = visible & (index_BS[b, query] == index_BS[b, key])
        return visible

    # Without compilation create_block_mask keeps the whole (B, S, S) mask in memory.
    compiles = device.type == "cuda" and not torch.compiler.is_compiling()
    make = torch.compile(create_block_mask) if compiles else create_block_mask
    rows = None if documents is None else batch
    blocks: BlockMask = make(sees, B=rows, H=None, Q_LEN=seq_len, KV_LEN=seq_len, device=device)
    return blocks
