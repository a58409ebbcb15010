"""The key-value cache: what generation keeps of past tokens, so that each new token costs one token of work.

Attention is causal, and the rotation of a key depends on its own position alone. So the key and the value of
a token are the same in every later forward. The cache stores them once per layer. A forward of S new tokens
then computes queries, keys and values for these tokens only; the queries attend to the new and to the stored
keys. Without a cache, the n-th token runs a row of n tokens again: n times the work.

The cost is memory: 2 * layers * M * D * P elements for each row. P is the largest number of tokens, because
all of it is allocated at once. Layers with a window also keep all places.

Rows of different lengths. The token at position p of its row is stored at place p, so a query at position p
sees the places 0 ... p of its own row (in a layer with a window, the last `window` of these). Short rows are
padded on the right. A padding token is written beyond the end of its row. No token of the row sees it there,
and the row's next tokens overwrite it.

`longrope` rotates all keys of a document by other frequencies once the document is longer than its original
length. Stored keys keep the old rotation, so the row must then be computed again: see `KVCache.is_outgrown`.

Shapes: B batch, S new tokens, P places, N query heads, M key heads, D head size.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lptune.models.attention import make_visibilities
from lptune.models.config import DecoderConfig, LayerConfig
from lptune.models.documents import DocumentBounds, Visibility


class LayerCache(NamedTuple):
    """The part of the cache of one layer, for one forward."""

    keys_BMPD: Tensor
    values_BMPD: Tensor
    first_B1: Tensor | None
    """int64: the place of the first new token of each row. None: all rows are empty."""
    num_places: int
    """The number of places that are in use after this forward."""

    def extend(self, k_BSMD: Tensor, v_BSMD: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the keys and values of the new tokens. Returns those to attend to, (B, S or P, M, D): of all
        places in use, or, if all rows were empty, of the new tokens.
        """
        seq_len = k_BSMD.shape[1]
        if self.first_B1 is None:
            self.keys_BMPD[:, :, :seq_len] = k_BSMD.transpose(1, 2)
            self.values_BMPD[:, :, :seq_len] = v_BSMD.transpose(1, 2)
            return k_BSMD, v_BSMD
        places_BS = self.first_B1 + torch.arange(seq_len, device=k_BSMD.device)
        rows_B1 = torch.arange(k_BSMD.shape[0], device=k_BSMD.device)[:, None]
        self.keys_BMPD[rows_B1, :, places_BS] = k_BSMD
        self.values_BMPD[rows_B1, :, places_BS] = v_BSMD
        used = self.num_places
        return self.keys_BMPD[:, :, :used].transpose(1, 2), self.values_BMPD[:, :, :used].transpose(1, 2)


class KVCache:
    """Keys and values of up to `num_places` tokens of each of `batch` rows, for all layers. It starts empty.

    `Backbone.next_logits` fills it. dtype: the compute dtype of the model.
    """

    def __init__(
        self, config: DecoderConfig, batch: int, num_places: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.config = config
        self.num_places = num_places
        shape = (config.num_layers, batch, config.num_kv_heads, num_places, config.head_dim)
        # Zeros: masked places are multiplied by 0, and a NaN in uninitialized memory would stay NaN.
        self._keys = torch.zeros(shape, device=device, dtype=dtype)
        self._values = torch.zeros(shape, device=device, dtype=dtype)
        self._lengths_B1 = torch.zeros((batch, 1), device=device, dtype=torch.int64)
        self._num_used = 0  # the longest row, or more: kept on the host, which must not wait for the device

    def append(self, batch: int, seq_len: int, lengths_B: Tensor) -> tuple[DocumentBounds, list[Visibility]]:
        """Makes room for new tokens (batch, seq_len), padded on the right. Returns their positions, and for
        each layer which keys they see and where `attend` stores theirs.

        lengths_B: int64, 1 ... seq_len: the number of new tokens in each row.
        """
        before_B1, is_empty = self._lengths_B1, self._num_used == 0
        assert batch == before_B1.shape[0], (batch, before_B1.shape)
        self._num_used += seq_len
        assert self._num_used <= self.num_places, (self._num_used, self.num_places)
        self._lengths_B1 = before_B1 + lengths_B[:, None]
        new_S = torch.arange(seq_len, device=before_B1.device)
        positions_BS = before_B1 + new_S
        # Padding counts as a second document, so that the row's last position is that of its last token.
        index_BS = (new_S >= lengths_B[:, None]).long()
        documents = DocumentBounds(positions_BS, index_BS, offsets=new_S[:0].int())
        visible = self._visibilities(batch, seq_len, positions_BS, is_empty)
        first_B1 = None if is_empty else before_B1
        return documents, [
            visible[layer]._replace(past=LayerCache(self._keys[i], self._values[i], first_B1, self._num_used))
            for i, layer in enumerate(self.config.layers)
        ]

    def _visibilities(
        self, batch: int, seq_len: int, positions_BS: Tensor, is_empty: bool
    ) -> dict[LayerConfig, Visibility]:
        if is_empty and self.config.attention_softcap is None:
            # All keys are new: the same attention as in training, with its fast backends. (Not with a
            # soft-cap: flex_attention would compile for each length.)
            device, dtype = self._keys.device, self._keys.dtype
            return make_visibilities(self.config, None, batch, seq_len, device, dtype)
        place_P = torch.arange(self._num_used, device=positions_BS.device)
        distance_BSP = positions_BS[:, :, None] - place_P
        seen_BSP = distance_BSP >= 0
        masks = dict[int | None, Tensor]()
        for window in dict.fromkeys(layer.window for layer in self.config.layer_kinds):
            seen = seen_BSP if window is None else seen_BSP & (distance_BSP < window)
            masks[window] = seen[:, None]
        return {layer: Visibility(mask_B1SS=masks[layer.window]) for layer in self.config.layer_kinds}

    def is_outgrown(self, lengths: Sequence[int]) -> bool:
        """Whether stored keys of a row that now has one of these lengths, in tokens, became wrong with its
        last token: a layer has longrope, and the row just passed its original length. Compute the row anew.
        """
        ropes = self.config.rope_kinds
        limits = [r.original_max_position_embeddings for r in ropes if r.kind == "longrope"]
        return any(length == limit + 1 for length in lengths for limit in limits)
