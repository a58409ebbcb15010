"""Recurrent mixers (short convolutions, Mamba, gated delta nets): a document starts from an empty state.

A mixer reads a row from left to right and knows no documents. So each document becomes a row of a batch of
its own, padded on the right, which is exact: a mixer is causal, and padding follows. The kernels of fla and
causal_conv1d that take bounds of documents are faster, and are not used yet.

The number and length of documents are data, so a mixer has other shapes in each batch, which the compiler
would compile anew each time. So it leaves the mixers alone: where blocks are compiled, what is around a mixer
is (`runs_eagerly`, distributed/compilation.py).

Shapes: B batch, S sequence, T = B * S, H hidden.
"""

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


def keep_documents_apart(mixer: nn.Module) -> None:
    """Makes `mixer` take an argument `lptune_rows`, in place."""
    cls: Any = type(mixer)

    def forward(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        rows: Rows | None = kwargs.pop("lptune_rows", None)
        if rows is None:
            return cls.forward(self, hidden_states, *args, **kwargs)
        shape, flat_TH = hidden_states.shape, hidden_states.flatten(0, 1)
        padded = flat_TH.new_zeros(rows.num_documents * rows.longest, flat_TH.shape[1])
        padded = padded.index_copy(0, rows.places_T, flat_TH)
        found = cls.forward(self, padded.unflatten(0, (rows.num_documents, rows.longest)), *args, **kwargs)
        first, *others = found if isinstance(found, tuple) else (found,)
        back = first.flatten(0, 1).index_select(0, rows.places_T).unflatten(0, shape[:2])
        return (back, *others) if isinstance(found, tuple) else back

    own = {"forward": forward, "runs_eagerly": True, "__module__": cls.__module__}
    mixer.__class__ = type(cls.__name__, (cls,), own)
