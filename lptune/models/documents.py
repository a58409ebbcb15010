"""Several documents in one row, and what a token may see of them.

A packed row holds documents one after the other. Attention must stay inside a document, so that packing
changes speed and not the result: query i sees key j iff both lie in the same document, j <= i, and, in a
layer with a window, i - j < window. This file says that in the forms that the attention backends want.

Shapes: B batch, S sequence.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:  # it imports the compiler
    from torch.nn.attention.flex_attention import BlockMask


class Documents(NamedTuple):
    """Where the documents of a batch lie."""

    positions_BS: Tensor
    """int64, the position in the document: restarts at 0 in each."""
    index_BS: Tensor
    """int64, the number of the document within its row: 0, 1, 2, ..."""
    offsets: Tensor
    """int32, where documents start in the B*S flattened tokens, then B*S until the length is constant."""

    @classmethod
    def single(cls, batch: int, seq_len: int, device: torch.device | str | None = None) -> "Documents":
        """Each row one document."""
        return cls(
            positions_BS=torch.arange(seq_len, device=device).expand(batch, seq_len),
            index_BS=torch.zeros(batch, seq_len, dtype=torch.int64, device=device),
            offsets=torch.arange(0, (batch + 1) * seq_len, seq_len, dtype=torch.int32, device=device),
        )


class Visibility(NamedTuple):
    """What one kind of layer must know about documents, as its backend wants it; all None is plain causal."""

    mask_B1SS: Tensor | None = None
    """bool, True where query (dim 2) sees key (dim 3); B may be 1."""
    offsets: Tensor | None = None
    """As in Documents, for varlen."""
    blocks: "BlockMask | None" = None
    """For flex_attention."""


def visibility_mask(
    documents: Documents | None, seq_len: int, window: int | None, device: torch.device
) -> Tensor:
    """Bool (B, 1, S, S), or (1, 1, S, S) when each row is one document (`documents` is None)."""
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
    documents: Documents | None, batch: int, seq_len: int, window: int | None, device: torch.device
) -> "BlockMask":
    """The same as a BlockMask, which lets flex_attention skip the blocks that nothing is seen in."""
    from torch.nn.attention.flex_attention import create_block_mask

    index_BS = None if documents is None else documents.index_BS

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = query >= key
        if window is not None:
            visible = visible & (query - key < window)
        if index_BS is not None:
            visible = visible & (index_BS[b, query] == index_BS[b, key])
        return visible

    # Without compilation it holds the whole (B, S, S) mask.
    compiles = device.type == "cuda" and not torch.compiler.is_compiling()
    make = torch.compile(create_block_mask) if compiles else create_block_mask
    rows = None if documents is None else batch
    blocks: BlockMask = make(sees, B=rows, H=None, Q_LEN=seq_len, KV_LEN=seq_len, device=device)
    return blocks
