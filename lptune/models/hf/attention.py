"""Attention of transformers' models by lptune's backends (models/attention.py), with exact document bounds.

transformers makes one mask for each kind of layer and hands it to the blocks, which hand it to the attention.
Both ends are open: `register()` puts a function for masks and one for attention into its tables. So a mask is
ours, and is a `Seen`: which keys a query sees, in the form that the backend needs. It reaches the attention
as an argument, so that a block that is recomputed in backward sees the same.

transformers keeps the documents of a packed row apart by the positions that a model passes on. Not every
model does. Here the bounds of the documents come from `running`, whatever the model passes; of transformers
only its rule of places is taken: which key a query of one whole document sees.

A rule is a function of two places. It is tried for all pairs of a row, once for each length: if it is causal,
with or without a window, every backend serves it. Any other (chunks) becomes a mask.

Shapes: B batch, S sequence, N query heads, M key heads, D head size, V head size of values.
"""

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from lptune.base.errors import UserError
from lptune.models.attention import attend, make_visibility
from lptune.models.cache import LayerCache
from lptune.models.context import Group, own_heads, to_heads, to_tokens
from lptune.models.documents import DocumentBounds, Visibility

NAME = "lptune"
"""Of the mask and the attention in transformers' tables."""

_ROWS_AT_ONCE = 256
_ALIGNMENT = 8  # of a head's size, for the kernels of SDPA

Rule = Callable[[Any, Any, Tensor, Tensor], Tensor]
"""transformers' mask functions: (row of the batch, head, place of the query, place of the key) -> bool."""


class PastTokens:
    """Keys and values of past tokens, for generation: the cache of models/cache.py, but each layer has the
    sizes that its own keys and values have. Row b's token at position p is at place p.
    """

    def __init__(self, batch: int, num_places: int, device: torch.device, states: Any = None) -> None:
        """states: of recurrent mixers (mixers.make_states)."""
        self.num_places, self.num_used, self.states = num_places, 0, states
        self.lengths_B1 = torch.zeros((batch, 1), dtype=torch.int64, device=device)
        self.positions_BS = self.lengths_B1
        # By layer, and by the number of the call: differential attention calls twice in a layer.
        self._stored: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._num_calls = Counter[int]()

    def append(self, lengths_B: Tensor, seq_len: int) -> Tensor:
        """Makes room for (B, seq_len) new tokens, padded on the right; returns their positions."""
        self._num_calls.clear()
        self._first_B1 = self.lengths_B1 if self.num_used else None
        self.positions_BS = self.lengths_B1 + torch.arange(seq_len, device=lengths_B.device)
        self.lengths_B1 = self.lengths_B1 + lengths_B[:, None]
        self.num_used += seq_len
        assert self.num_used <= self.num_places, (self.num_used, self.num_places)
        return self.positions_BS

    def extend(self, layer: int, k_BSMD: Tensor, v_BSMV: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the new keys and values of a layer; returns those of all places in use."""
        place = layer, self._num_calls[layer]
        self._num_calls[layer] += 1
        if place not in self._stored:
            self._stored[place] = tuple(  # type: ignore[assignment]
                each.new_zeros(each.shape[0], each.shape[2], self.num_places, each.shape[3])
                for each in (k_BSMD, v_BSMV)
            )
        return LayerCache(*self._stored[place], self._first_B1, self.num_used).extend(k_BSMD, v_BSMV)

    def mask(self, rule: Rule) -> Tensor:
        """Which places the new tokens see: bool (B, 1, S, places in use)."""
        query = self.positions_BS[:, None, :, None]
        rows = torch.arange(len(query), device=query.device)[:, None, None, None]
        place = torch.arange(self.num_used, device=query.device)
        return rule(rows, torch.zeros_like(rows), query, place) & (place <= query)

    def is_outgrown(self, lengths: Sequence[int]) -> bool:
        """Never: models whose rotations change with the length are refused (model.py)."""
        return False


class Running(NamedTuple):
    """What the masks of a forward depend on."""

    documents: DocumentBounds | None
    """None: each row is one document."""
    backend: Callable[[torch.dtype], str]
    """From the dtype of hidden states: one of models.attention.BACKENDS."""
    has_own_bounds: bool
    """Whether rules that transformers makes keep documents apart by themselves, by their positions."""
    past: PastTokens | None = None
    """In generation."""
    group: Group | None = None
    """The ranks that have a part of each row's tokens; the documents are of whole rows."""


class Seen(NamedTuple):
    """A mask, as it passes through the blocks."""

    visible: Visibility
    window: int | None
    past: PastTokens | None = None


_running: list[Running] = []


@contextmanager
def running(state: Running) -> Iterator[None]:
    """Within it, masks are made for `state`."""
    _running.append(state)
    try:
        yield
    finally:
        _running.pop()


@functools.cache
def register() -> None:
    """Makes transformers know both functions under NAME."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, make_mask)
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Rule,
    device: torch.device,
    dtype: torch.dtype,
    **_: Any,
) -> Seen:
    """The mask of one kind of layer. transformers calls it, and passes much that is not needed here."""
    state = _running[-1]
    assert q_length == kv_length, "transformers keeps no keys"
    if state.past is not None:
        return Seen(Visibility(mask_B1SS=state.past.mask(mask_function)), None, state.past)
    seq_len = q_length * (1 if state.group is None else state.group.size)
    window, is_plain = None, False
    if not (state.has_own_bounds and state.documents is not None):
        window, is_plain = _window(mask_function, seq_len)
    if is_plain:
        visible = make_visibility(state.backend(dtype), state.documents, batch_size, seq_len, window, device)
    else:
        mask_B1SS = _mask(mask_function, state, batch_size, seq_len, device)
        visible = Visibility(mask_B1SS=mask_B1SS)
    return Seen(visible._replace(group=state.group), window)


def _mask(rule: Rule, state: Running, batch: int, seq_len: int, device: torch.device) -> Tensor:
    """`rule` within documents: bool (B, 1, S, S), True where a query (dim 2) sees a key (dim 3)."""
    documents = state.documents or DocumentBounds.single(batch, seq_len, device)
    places_BS = torch.arange(seq_len, device=device).expand(batch, seq_len)
    if not state.has_own_bounds:  # a rule of a whole row counts from its start; here from the document's
        places_BS = documents.positions_BS
    rows = torch.arange(batch, device=device)[:, None, None, None]
    query, key = places_BS[:, None, :, None], places_BS[:, None, None, :]
    seen_B1SS = rule(rows, torch.zeros_like(rows), query, key)
    order = torch.arange(seq_len, device=device)
    same_BSS = documents.index_BS[:, :, None] == documents.index_BS[:, None, :]
    return seen_B1SS & same_BSS[:, None] & (order[:, None] >= order[None])


def _window(rule: Rule, seq_len: int) -> tuple[int | None, bool]:
    """(window, whether `rule` is causal with just this window) for a row of one document. None: no window."""
    key = _structure(rule)
    if key is None:
        return None, False
    if (key, seq_len) not in _windows:
        with unset_fake_temporarily():  # a dry run makes no values
            _windows[key, seq_len] = _try_all(rule, seq_len)
    return _windows[key, seq_len]


_windows: dict[tuple[Hashable, int], tuple[int | None, bool]] = {}


def _structure(value: object) -> Hashable | None:
    """What decides the results of a rule: its code and all that it was made with. None: not known."""
    if isinstance(value, FunctionType):
        made_with = [_structure(cell.cell_contents) for cell in value.__closure__ or ()]
        return None if None in made_with else (value.__code__, *made_with)
    if isinstance(value, tuple):
        parts = [_structure(each) for each in value]
        return None if None in parts else tuple(parts)
    return value if isinstance(value, int | str) else None


def _try_all(rule: Rule, seq_len: int) -> tuple[int | None, bool]:
    with torch.device("cpu"):
        places, zero = torch.arange(seq_len), torch.zeros((), dtype=torch.int64)
        last = rule(zero, zero, places[-1:], places).expand(seq_len)
        window = int(last.sum())
        for rows in places.split(_ROWS_AT_ONCE):
            distance = rows[:, None] - places
            seen = rule(zero, zero, rows[:, None], places).expand(distance.shape)
            if bool((seen & (distance < 0)).any()):
                raise UserError("model.path: this model sees later tokens; only causal models are trained")
            if not torch.equal(seen, (distance >= 0) & (distance < window)):
                return None, False
    return (None if window >= seq_len else window), True


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Seen | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of a transformers model. query (B, N, S, D), key (B, M, S, D), value (B, M, S, V); the result
    has (B, S, N, V). s_aux (N,): the score of a sink, which takes a share of each query's attention and has
    no value. Dropout is left out: lptune trains without.
    """
    if not isinstance(attention_mask, Seen):
        raise UserError(
            f"model.path: {type(module).__name__} passes no mask to its attention, so documents of a packed "
            "row would not be kept apart; this model cannot be trained"
        )
    visible, window, past = attention_mask
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    size = value.shape[-1]
    if past is not None:
        found = past.extend(module.layer_idx, key.transpose(1, 2), value.transpose(1, 2))  # type: ignore[arg-type]
        key, value = (each.transpose(1, 2) for each in found)
    if (group := visible.group) is not None:
        key, value, query = (
            to_heads(each.transpose(1, 2), group).transpose(1, 2) for each in (key, value, query)
        )
    if s_aux is not None:
        out_BSNV = _with_sinks(query, key, value, own_heads(s_aux, group), visible, scale)
        return to_tokens(out_BSNV, group), None
    if size != query.shape[-1]:  # the kernels want equal sizes; a zero adds nothing
        wide = max(size, query.shape[-1])
        query, key, value = (F.pad(each, (0, wide - each.shape[-1])) for each in (query, key, value))
    q_BSND, k_BSMD, v_BSMD = (each.transpose(1, 2) for each in (query, key, value))
    whole = visible._replace(group=None)
    out_BSND = attend(q_BSND, k_BSMD, v_BSMD, whole, scale=scale, window=window, softcap=softcap)
    return to_tokens(out_BSND[..., :size], group), None


def _with_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks_N: Tensor, visible: Visibility, scale: float
) -> Tensor:
    """A sink is one more key, whose value is 0: each query has its score in a dimension of its own, in which
    all other keys have 0. So the kernels of SDPA serve it, and no scores are stored: of those that take a
    mask, only the one that stores them takes grouped queries or sizes that are no multiples of 8.
    """
    batch, num_heads, seq_len, size = q.shape
    value_size = v.shape[-1]
    score_BNS1 = (sinks_N / scale).to(q.dtype)[None, :, None, None].expand(batch, num_heads, seq_len, 1)
    q = F.pad(torch.cat([q, score_BNS1], -1), (0, _ALIGNMENT - 1))
    k, v = (each.repeat_interleave(num_heads // each.shape[1], dim=1) for each in (k, v))
    sink = F.one_hot(torch.tensor(size, device=k.device), size + _ALIGNMENT).to(k.dtype)
    sink_BN1D = sink.expand(batch, num_heads, 1, -1)
    num_more = 1 + -(k.shape[2] + 1) % _ALIGNMENT
    k = F.pad(torch.cat([F.pad(k, (0, _ALIGNMENT)), sink_BN1D], 2), (0, 0, 0, num_more - 1))
    v = F.pad(v, (0, max(0, k.shape[-1] - value_size), 0, num_more))
    mask = visible.mask_B1SS
    if mask is None:
        mask = torch.ones(seq_len, seq_len, dtype=torch.bool, device=q.device).tril()[None, None]
    mask = F.pad(F.pad(mask, (0, 1), value=True), (0, num_more - 1), value=False)
    found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return found[..., :value_size].transpose(1, 2)
