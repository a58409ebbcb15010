"""The collectives of tensor and sequence parallelism, each with its gradient.

Two kinds of layers have a matrix that is cut over ranks. A column-parallel layer computes a part of the
output features and needs all tokens of its input. A row-parallel layer reads a part of the input features,
and its output is a sum over ranks. No collective runs between the two. In the norms and residuals around
them, each rank holds all tokens or, with sequence parallelism, its share of the tokens of every row:

                         forward                backward
    gather_tokens        all-gather             reduce-scatter       before column-parallel layers
    scatter_tokens       reduce-scatter         all-gather           after row-parallel ones
    copy_tokens          nothing                all-reduce           the same places, without
    sum_tokens           all-reduce             nothing              sequence parallelism

Sums and gathers use the dtype of the activations. `gather_tokens_low` is the exception: the layers behind it
need 8-bit values, so it gathers 8-bit values, once for all of these layers. It returns q and scale, and a
tensor without storage that carries the gradient (linear.QuantizedTokens).

All are functional collectives, which get the name of their group and allocate their result: the compiler can
trace them.

Shapes: B batch, S tokens of a row, s = S / ranks, K features, V words, v = V / ranks rounded up, T = B * S.
"""

from typing import Any

import torch
from torch import Tensor

from lptune.base.errors import UserError
from lptune.kernels import pack_rows, unpack_rows
from lptune.linear import LinearSpec, QuantizedTokens
from lptune.models import Group, Words
from lptune.numerics import FORMATS, nan_as_inf

_TOKENS = 1  # the dim of tokens in (B, S, K)


def gather_tokens(x_BsK: Tensor, group: Group) -> Tensor:
    """All-gathers tokens: (B, s, K) of each rank -> (B, S, K) on all ranks."""
    x_BSK: Tensor = _GatherTokens.apply(x_BsK, group)  # type: ignore[no-untyped-call]
    return x_BSK


def scatter_tokens(x_BSK: Tensor, group: Group) -> Tensor:
    """Reduce-scatters tokens: sums (B, S, K) over ranks, each gets (B, s, K). UserError if S is not s *
    ranks.
    """
    if x_BSK.shape[_TOKENS] % group.size:
        raise UserError(
            f"parallel.sequence: {x_BSK.shape[_TOKENS]} tokens of a row do not divide among {group.size} "
            "tensor-parallel ranks; change the length of rows, or set it to false"
        )
    x_BsK: Tensor = _ScatterTokens.apply(x_BSK, group)  # type: ignore[no-untyped-call]
    return x_BsK


def copy_tokens(x_BSK: Tensor, group: Group) -> Tensor:
    """Identity in forward; all-reduces the gradient in backward."""
    copied: Tensor = _CopyTokens.apply(x_BSK, group)  # type: ignore[no-untyped-call]
    return copied


def sum_tokens(x_BSK: Tensor, group: Group) -> Tensor:
    """All-reduces (sums) in forward; identity in backward."""
    summed: Tensor = _SumTokens.apply(x_BSK, group)  # type: ignore[no-untyped-call]
    return summed


def gather_words(logits: Tensor, group: Group, vocab_size: int) -> Tensor:
    """All-gathers logits: (…, v) of each rank -> (…, V) on all. The last ranks may have fewer than v."""
    gathered: Tensor = _GatherWords.apply(logits, group, vocab_size)  # type: ignore[no-untyped-call]
    return gathered


def gather_tokens_low(x_BsK: Tensor, spec: LinearSpec, group: Group) -> QuantizedTokens:
    """`gather_tokens`, but quantized before the gather as layers of `spec` would after it: the same bits.

    Row scales are gathered with the rows. One scale for all tokens needs an all-reduce of one number first.
    """
    return QuantizedTokens(*_GatherTokensLow.apply(x_BsK, spec, group))  # type: ignore[no-untyped-call]


def first_word(vocab_size: int, group: Group) -> int:
    """Index of this rank's first word. The vocabulary is cut like the rows of a DTensor: Shard(0)."""
    return -(-vocab_size // group.size) * group.rank


class RankWords(Words):
    """The words of this rank's part of a head. The other ranks of `group` have the other words."""

    is_all = False

    def __init__(self, vocab_size: int, group: Group) -> None:
        super().__init__(vocab_size)
        self.first = first_word(vocab_size, group)
        self.width = -(-vocab_size // group.size)
        self._group = group

    def largest(self, x: Tensor) -> Tensor:
        """The maximum over ranks. It is undefined for NaN; NaN reaches all ranks through the sums."""
        return all_reduce(x, "max", self._group)

    def sum(self, x: Tensor) -> Tensor:
        return sum_tokens(x, self._group)

    def gather(self, logits: Tensor) -> Tensor:
        return gather_words(logits, self._group, self.vocab_size)


def all_reduce(x: Tensor, operation: str, group: Group) -> Tensor:
    """All-reduces into a new tensor, which has no gradient. operation: sum | max."""
    functional = torch.ops._c10d_functional
    reduced: Tensor = functional.wait_tensor(functional.all_reduce(x.contiguous(), operation, group.name))
    return reduced


def _all_gather(x: Tensor, dim: int, group: Group) -> Tensor:
    functional = torch.ops._c10d_functional
    x_ = functional.all_gather_into_tensor(x.contiguous(), group.size, group.name)
    gathered: Tensor = functional.wait_tensor(x_)  # ranks are stacked along dim 0
    if dim == 1 and x.shape[0] == 1:  # no copy
        return gathered.reshape(1, -1, *x.shape[2:])
    return gathered if dim == 0 else torch.cat(gathered.chunk(group.size), dim=dim)


def _reduce_scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    functional = torch.ops._c10d_functional
    parts = x if x.shape[:dim].numel() == 1 else torch.cat(x.chunk(group.size, dim=dim))
    flat = parts.reshape(group.size, -1)
    reduced: Tensor = functional.wait_tensor(
        functional.reduce_scatter_tensor(flat, "sum", group.size, group.name)
    )
    return reduced.view(*x.shape[:dim], x.shape[dim] // group.size, *x.shape[dim + 1 :])


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BsK: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _all_gather(x_BsK, _TOKENS, group)

    @staticmethod
    def backward(ctx: Any, g_BSK: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(g_BSK, _TOKENS, ctx.group), None


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSK: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _reduce_scatter(x_BSK, _TOKENS, group)

    @staticmethod
    def backward(ctx: Any, g_BsK: Tensor) -> tuple[Tensor, None]:
        return _all_gather(g_BsK, _TOKENS, ctx.group), None


class _CopyTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSK: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x_BSK.view_as(x_BSK)

    @staticmethod
    def backward(ctx: Any, g_BSK: Tensor) -> tuple[Tensor, None]:
        return all_reduce(g_BSK, "sum", ctx.group), None


class _SumTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSK: Tensor, group: Group) -> Tensor:
        return all_reduce(x_BSK, "sum", group)

    @staticmethod
    def backward(ctx: Any, g_BSK: Tensor) -> tuple[Tensor, None]:
        return g_BSK, None


class _GatherWords(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: Group, vocab_size: int) -> Tensor:
        ctx.num_words = logits.shape[-1]
        ctx.first = -(-vocab_size // group.size) * group.rank
        padded = torch.nn.functional.pad(logits, (0, -(-vocab_size // group.size) - ctx.num_words))
        gathered = _all_gather(padded, logits.dim() - 1, group)
        return gathered if gathered.shape[-1] == vocab_size else gathered[..., :vocab_size].contiguous()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        # All ranks use the same logits, so each rank has the whole gradient.
        return g[..., ctx.first : ctx.first + ctx.num_words].contiguous(), None, None


class _GatherTokensLow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BsK: Tensor, spec: LinearSpec, group: Group) -> tuple[Tensor, Tensor, Tensor]:
        ctx.group = group
        batch, num_tokens, k = x_BsK.shape
        x_tK, dtype = x_BsK.reshape(-1, k), FORMATS[spec.fmt].dtype
        kind = spec.kind
        mine = kind.quantize_tokens(spec, x_tK, lambda amax: all_reduce(nan_as_inf(amax), "max", group))
        if kind.row_scales:
            packed_BSR = _all_gather(pack_rows(mine, len(x_tK)).view(batch, num_tokens, -1), _TOKENS, group)
            q, scale = unpack_rows(packed_BSR.flatten(0, 1), batch * num_tokens * group.size, dtype)
        else:
            bytes_BsK = mine.q_NK.view(torch.uint8).view(batch, num_tokens, k)
            q, scale = _all_gather(bytes_BsK, _TOKENS, group).flatten(0, 1).view(dtype), mine.scale
        ctx.mark_non_differentiable(q, scale)
        carrier_BSK = x_BsK.new_zeros(()).expand(batch, num_tokens * group.size, k)
        return carrier_BSK, q, scale

    @staticmethod
    def backward(ctx: Any, g_BSK: Tensor, *_: Any) -> tuple[Tensor, None, None]:
        return _reduce_scatter(g_BSK, _TOKENS, ctx.group), None, None
