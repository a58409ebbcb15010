"""The sum of an objective over chunks of tokens, and its gradients, in one pass over the chunks.

If an objective is a number L, it is a sum over chunks c of tokens. Backward starts at a number J that you
compute from L, and one number g = dJ/dL multiplies all gradients:

    L = sum over c of f(h_c, W)        dJ/dh_c = g * df/dh_c        dJ/dW = g * (sum over c of df/dW)

So forward can compute the gradients of a chunk while its logits exist, for an expected g called e:

    forward, for each chunk    f, e * df/dh_c (kept: T x H), e * df/dW (added to a float32 sum); frees logits
    backward                   multiplies both by g / e

The head then takes three GEMMs per token. Recomputing a chunk in backward (chunks.py) takes four. The Liger
kernel (arXiv:2410.10989) has the gradients of a linear layer and cross-entropy in this way; here head and
objective may be any, because autograd differentiates a chunk. (Cut cross-entropy, arXiv:2411.09009, keeps no
gradients and recomputes the logits.)

Numerics: the gradient of the head is summed in float32 and rounded once. Recomputed chunks round it for each
chunk, and add in its own dtype. The gradient of the hidden states has the bits of recomputed chunks if g = e.
If not, it is rounded twice: in bfloat16 its error grows from about 1.7e-3 of its norm to 2.4e-3. A recipe
knows g before forward, and passes it as e.

Memory at the peak, in addition to what is there before the loss: the gradient of h, T x H; the float32 sum of
the gradient of W, and the gradient of W of one chunk in the dtype of W; a chunk's gradient of the logits.
(While the gradient of the logits is computed, the logits and the temporary tensors of a block exist too, and
the chunk's gradient of W does not yet.)

A loss under grad mode that has no backward computes its gradients for nothing: evaluate in torch.no_grad(),
where no gradient is computed.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

# Backward scales a gradient in this many blocks, of at least MIN_BLOCK elements.
BLOCKS = 16
MIN_BLOCK = 2**20


class NotInOnePassError(Exception):
    """A chunk depends on a trained tensor that is not among those whose gradients are wanted."""


def sum_in_one_pass(
    of_chunk: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    parameters: Sequence[Tensor],
    chunk_tokens: int,
    expected_gradient: float = 1.0,
) -> Tensor:
    """Same as the sum of `of_chunk` over chunks of `chunk_tokens` rows of `tensors`, a number.

    Differentiable once, in `tensors` and `parameters`. tensors: T > 0 rows each. expected_gradient: e above;
    any number but 0. Raises NotInOnePassError if of_chunk depends on another tensor that requires a gradient;
    ValueError if its result is no number, or if expected_gradient is 0 or not finite.
    """
    if expected_gradient == 0 or not math.isfinite(expected_gradient):
        raise ValueError(f"expected_gradient must be finite and not 0, got {expected_gradient}")
    trained = [each for each in parameters if each.requires_grad]
    found: Tensor = _OnePass.apply(  # type: ignore[no-untyped-call]
        of_chunk, chunk_tokens, expected_gradient, len(tensors), *tensors, *trained
    )
    return found


class _OnePass(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        of_chunk: Callable[..., Tensor],
        chunk_tokens: int,
        expected: float,
        num_tensors: int,
        *inputs: Tensor,
    ) -> Tensor:
        tensors, parameters = inputs[:num_tensors], inputs[num_tensors:]
        kept = [torch.empty_like(each) if each.requires_grad else None for each in tensors]
        sums: list[Tensor | None] = [None] * len(parameters)
        values: list[Tensor] = []
        for start in range(0, len(tensors[0]), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            chunk = [each[rows].detach().requires_grad_(each.requires_grad) for each in tensors]
            with torch.enable_grad():
                value = of_chunk(*chunk)
            leaves = [each for each in (*chunk, *parameters) if each.requires_grad]
            _check(value, leaves)
            values.append(value.detach())
            gradients = iter(
                torch.autograd.grad(value, leaves, torch.full_like(value, expected), allow_unused=True)
                if value.requires_grad
                else [None] * len(leaves)
            )
            del value  # frees what the graph has saved
            for each in kept:
                if each is not None:
                    _fill(each[rows], next(gradients))
            for i, gradient in enumerate(gradients):
                sums[i] = _added(sums[i], gradient)
                del gradient  # the last one would exist beside the next chunk's logits
        ctx.expected = expected
        ctx.dtypes = [each.dtype for each in inputs]
        ctx.save_for_backward(*kept, *sums)
        return sum(values[1:], values[0])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError("the loss has no second derivative here; call backward without create_graph")
        # g / e is exactly 1 for equal float32 numbers, as both are rounded alike.
        factor = g / torch.full_like(g, ctx.expected)
        gradients = (
            None if each is None else _scaled(each, factor, dtype)
            for each, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return None, None, None, None, *gradients


def _check(value: Tensor, leaves: Sequence[Tensor]) -> None:
    """Raises as `sum_in_one_pass`. value: of a chunk, with its graph."""
    if value.dim():
        raise ValueError(
            f"an objective with is_number = True returned {tuple(value.shape)} for a chunk; return a number, "
            "or leave is_number out"
        )
    known = {id(each) for each in leaves}
    if any(id(each) not in known for each in _leaves(value)):
        raise NotInOnePassError


def _leaves(value: Tensor) -> Iterator[Tensor]:
    """The tensors to which a backward of `value` would add gradients."""
    nodes, seen = [value.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        nodes += [each for each, _ in node.next_functions]


def _fill(rows: Tensor, gradient: Tensor | None) -> None:
    if gradient is None:
        rows.zero_()
    else:
        rows.copy_(gradient)


def _added(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """total + gradient, at least in float32; in place."""
    if gradient is None:
        return total
    if total is None:
        # A copy in any case: autograd may share a gradient between several tensors.
        return gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
    return total.add_(gradient)


def _scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """factor * x, rounded once to `dtype`. factor: a number."""
    scaled = torch.empty_like(x, dtype=dtype)
    x_n, scaled_n = (_local(each).view(-1) for each in (x, scaled))
    # A 0-dimensional factor would be rounded to the dtype of x first.
    factor_1 = factor.reshape(1)
    # A CPU computes in a float32 copy of what it writes in another dtype: of a block and not of all.
    block = max(MIN_BLOCK, -(-len(x_n) // BLOCKS))
    for part_n, out_n in zip(x_n.split(block), scaled_n.split(block), strict=True):
        torch.mul(part_n, factor_1, out=out_n)
    return scaled


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x
