"""Recurrent mixers (short convolutions, Mamba, gated delta nets): a document starts from an empty state.

A mixer reads a row from left to right and knows no documents. So each document becomes a row of a batch of
its own, padded on the right, which is exact: a mixer is causal, and padding follows. The kernels of fla and
causal_conv1d that take bounds of documents are faster, and are not used yet.

The number and length of documents are data, so a mixer has other shapes in each batch, which the compiler
would compile anew each time. So it leaves the mixers alone: where blocks are compiled, what is around a mixer
is (`runs_eagerly`, distributed/compilation.py).

In generation a mixer keeps its states in a cache of transformers (`make_states`). It does not know where a
prompt ends before its padding, so prompts of one length run together, and the states of all lengths are
joined.

Shapes: B batch, S sequence, T = B * S, H hidden.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from lptune.models.documents import DocumentBounds


class Rows(NamedTuple):
    """Where the tokens of packed rows go in a batch of one document a row."""

    places_T: Tensor
    """int64."""
    num_documents: int
    longest: int
    """In tokens."""

    @classmethod
    def of(cls, documents: DocumentBounds) -> "Rows":
        """The rows of these documents. Reads their number and lengths back from the device. A dry run has no
        values: there, each row is one document, without padding.
        """
        num_tokens = documents.positions_BS.numel()
        if detect_fake_mode() is not None:
            places_T = torch.arange(num_tokens, device=documents.positions_BS.device)
            return cls(places_T, *documents.positions_BS.shape)
        starts = documents.offsets[documents.offsets < num_tokens].unique().long()
        flat = torch.arange(num_tokens, device=starts.device)
        number_T = torch.searchsorted(starts, flat, right=True) - 1
        longest = int(documents.positions_BS.max()) + 1
        return cls(number_T * longest + flat - starts[number_T], len(starts), longest)


def find(model: nn.Module) -> list[nn.Module]:
    """The recurrent mixers of a model of transformers: each has a convolution over tokens."""
    return [each for each in model.modules() if any(isinstance(c, nn.Conv1d) for c in each.children())]


class Prompts(NamedTuple):
    """Rows that begin, padded on the right, in generation."""

    lengths: tuple[int, ...]


def keep_documents_apart(mixer: nn.Module) -> None:
    """Makes `mixer` take an argument `lptune_rows`, of Rows or Prompts, in place."""
    cls: Any = type(mixer)
    mixer.__class__ = _with_rows(cls)


@functools.cache  # mixers of one class stay of one class: a dry run finds blocks alike by it
def _with_rows(cls: Any) -> type[nn.Module]:
    def forward(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        rows: Rows | Prompts | None = kwargs.pop("lptune_rows", None)
        if rows is None:
            return cls.forward(self, hidden_states, *args, **kwargs)
        if isinstance(rows, Prompts):
            return _begin(functools.partial(cls.forward, self), hidden_states, rows, self.layer_idx, kwargs)
        shape, flat_TH = hidden_states.shape, hidden_states.flatten(0, 1)
        padded = flat_TH.new_zeros(rows.num_documents * rows.longest, flat_TH.shape[1])
        padded = padded.index_copy(0, rows.places_T, flat_TH)
        found = cls.forward(self, padded.unflatten(0, (rows.num_documents, rows.longest)), *args, **kwargs)
        first, *others = found if isinstance(found, tuple) else (found,)
        back = first.flatten(0, 1).index_select(0, rows.places_T).unflatten(0, shape[:2])
        return (back, *others) if isinstance(found, tuple) else back

    own = {"forward": forward, "runs_eagerly": True, "__module__": cls.__module__}
    return type(cls.__name__, (cls,), own)


def _begin(
    forward: Callable[..., Any], prompts_BSH: Tensor, rows: Prompts, layer: Any, kwargs: Mapping[str, Any]
) -> Any:
    """The mixer's forward for prompts, length by length. Its states of all rows go into the cache."""
    name = "cache_params" if "cache_params" in kwargs else "past_key_values"
    cache = kwargs[name]
    numbers = defaultdict[int, list[int]](list)
    for number, length in enumerate(rows.lengths):
        numbers[length].append(number)
    found_BSH, others, states = torch.zeros_like(prompts_BSH), [], []
    for length, some in numbers.items():
        own = cache.fresh()
        found = forward(prompts_BSH[some, :length], **{**kwargs, name: own})
        first, *others = found if isinstance(found, tuple) else (found,)
        found_BSH[some, :length] = first
        states.append(own.layers[layer])
    order = [number for some in numbers.values() for number in some]
    joined = _joined(
        [vars(each) for each in states], torch.tensor(order, device=prompts_BSH.device).argsort()
    )
    vars(cache.layers[layer]).update(joined)
    return (found_BSH, *others) if isinstance(found, tuple) else found_BSH


def _joined(values: Sequence[Any], order_B: Tensor) -> Any:
    """Tensors of several lots of rows as those of all rows; what is no tensor is equal in all lots."""
    if isinstance(values[0], Tensor):
        return torch.cat(tuple(values))[order_B]
    if isinstance(values[0], dict):
        return {key: _joined([each[key] for each in values], order_B) for key in values[0]}
    return values[0]


def make_states(config: Any) -> Any:
    """An empty cache of transformers that keeps the states of recurrent mixers, and no keys and values: those
    are kept by attention.PastTokens, which knows the lengths of rows.
    """
    from transformers import DynamicCache

    class States(DynamicCache):
        def fresh(self) -> Any:
            return States(config=config)

        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
            return key_states, value_states

        def get_seq_length(self, *_: Any, **__: Any) -> int:
            return 0

        def get_query_offset(self, *_: Any, **__: Any) -> int:
            return 0

        def get_mask_sizes(self, query_length: int, *_: Any, **__: Any) -> tuple[int, int]:
            return query_length, 0

    return States(config=config)
