"""Causal attention on the CPU, one document of a packed row at a time: no work for other documents.

`F.scaled_dot_product_attention` sees packed rows only through a mask. It computes all S * S scores of a row,
those of other documents and of the future too, and adds minus infinity to them: for documents of L tokens,
about 2 * S / L times the scores that count. The mask itself is B * S * S values, which autograd keeps for
each layer. Here each document is a causal call of its own to torch's flash attention, which skips blocks of
the future and needs no mask.

The number and the lengths of documents are data, and differ from batch to batch. So the loop over them is
inside a custom op, which the compiler never looks into: one compiled graph serves all batches. It is torch's
custom_op, because ops that `@op` makes (lptune/kernels/op.py) have no gradient.

- **A document's result does not depend on what it is packed with.** The kernel gets the same shapes in every
  row and batch. (Documents of one length could share a call; the kernel may then choose other blocks.) With
  another number of threads, gradients may differ in their last bits, as those of `sdpa` in float32 do.
- **Grouped queries** need no copies: the kernel reads the key head of a query head in place, and sums the
  gradients of its query heads.
- **Short documents compute their gradients in float32**, also in bfloat16. torch's backward in bfloat16 calls
  a matrix product for each head and block of 32 queries, and the calls cost more than the products: for
  documents of 60 tokens it takes twice the time of float32, casts included; above about 200 tokens it takes
  less. The gradients are more exact.
- **Windows**: a document longer than the window gets a mask of its own, of its length squared. A shorter one
  is causal.

Shapes: B batch, S sequence, T = B * S, L tokens of a document, N query heads, M key heads, D head size.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

# Documents of at most this many tokens compute their gradients in float32.
_FLOAT32_BACKWARD_TOKENS = 192


def attend_documents(
    q_BSND: Tensor, k_BSMD: Tensor, v_BSMD: Tensor, offsets: Tensor, scale: float, window: int | None
) -> Tensor:
    """Causal attention inside of each document: (B, S, N, D) in the dtype of q. All tensors on the CPU.

    offsets: int32, the starts of documents in the T flattened tokens, from 0, padded with T
    (`DocumentBounds.offsets`). window: the number of keys that a query sees, its own included; None: all.
    Raises ValueError if offsets are not of T tokens.
    """
    results: tuple[Tensor, Tensor] = document_attention(q_BSND, k_BSMD, v_BSMD, offsets, scale, window)
    return results[0]


@torch.library.custom_op("lptune::document_attention", mutates_args=())
def document_attention(
    q_BSND: Tensor, k_BSMD: Tensor, v_BSMD: Tensor, offsets: Tensor, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """The op behind `attend_documents`: its result, and the logarithm of each query's sum of exponentials,
    (B, S, N), which backward needs: float32, or the dtype of q if that is wider.
    """
    out_BSND, logsumexp_BSN = _empty_results(q_BSND)
    lengths = _lengths(offsets, q_BSND)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    tensors = (q_BSND, k_BSMD, v_BSMD, out_BSND, logsumexp_BSN)
    for q_1NLD, k_1MLD, v_1MLD, out_1NLD, logsumexp_1NL in _by_document(lengths, *tensors):
        mask_LL = _mask(q_1NLD, window)
        # 0.0, True: no dropout, causal.
        found = flash(q_1NLD, k_1MLD, v_1MLD, 0.0, True, attn_mask=mask_LL, scale=scale)
        out_1NLD.copy_(found[0])
        logsumexp_1NL.copy_(found[1])
    return out_BSND, logsumexp_BSN


@torch.library.custom_op("lptune::document_attention_backward", mutates_args=())
def document_attention_backward(
    grad_BSND: Tensor,
    q_BSND: Tensor,
    k_BSMD: Tensor,
    v_BSMD: Tensor,
    out_BSND: Tensor,
    logsumexp_BSN: Tensor,
    offsets: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, in their dtypes, from the gradient and the results of the op."""
    grads = _empty_gradients(q_BSND, k_BSMD, v_BSMD)
    lengths = _lengths(offsets, q_BSND)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    # The kernel needs the elements of a head to be adjacent; a gradient may be expanded.
    read = (grad_BSND.contiguous(), q_BSND, k_BSMD, v_BSMD, out_BSND)
    for views in _by_document(lengths, *read, logsumexp_BSN, *grads):
        parts, logsumexp_1NL, parts_of_grads = views[:5], views[5], views[6:]
        is_short = logsumexp_1NL.shape[2] <= _FLOAT32_BACKWARD_TOKENS
        if is_short and logsumexp_1NL.dtype == torch.float32:  # not for float64
            parts = tuple(part.float() for part in parts)
        mask_LL = _mask(parts[1], window)
        found = flash(*parts, logsumexp_1NL, 0.0, True, attn_mask=mask_LL, scale=scale)
        for part, value in zip(parts_of_grads, found, strict=True):
            part.copy_(value)
    return grads


def _lengths(offsets: Tensor, q_BSND: Tensor) -> list[int]:
    """Of the documents, in tokens."""
    starts, num_tokens = offsets.tolist(), q_BSND.shape[0] * q_BSND.shape[1]
    if not starts or starts[0] != 0 or starts[-1] != num_tokens:
        raise ValueError(
            f"offsets of documents must begin with 0 and end with the number of tokens, {num_tokens}; they "
            f"are {starts[:1]} ... {starts[-1:]}"
        )
    return [stop - start for start, stop in pairwise(starts) if stop > start]


def _by_document(lengths: list[int], *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """For each document its parts of the tensors (B, S, N, ...): views (1, N, L, ...) for torch's kernel."""
    flat = [each.flatten(0, 1).transpose(0, 1)[None] for each in tensors]
    return zip(*(each.split(lengths, dim=2) for each in flat), strict=True)


def _mask(q_1NLD: Tensor, window: int | None) -> Tensor | None:
    """(L, L), to add to scores: minus infinity where the key is left of the query's window. The kernel itself
    excludes keys to the right. None: the window is at least as long as the document.
    """
    length = q_1NLD.shape[2]
    if window is None or window >= length:
        return None
    far_LL = q_1NLD.new_ones(length, length, dtype=torch.bool).tril(-window)
    return q_1NLD.new_zeros(length, length).masked_fill_(far_LL, float("-inf"))


@document_attention.register_fake
def _empty(
    q_BSND: Tensor, k_BSMD: Tensor, v_BSMD: Tensor, offsets: Tensor, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    return _empty_results(q_BSND)


def _empty_results(q_BSND: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q_BSND.dtype, torch.float32)
    return q_BSND.new_empty(q_BSND.shape), q_BSND.new_empty(q_BSND.shape[:3], dtype=wide)


@document_attention_backward.register_fake
def _empty_backward(
    grad_BSND: Tensor,
    q_BSND: Tensor,
    k_BSMD: Tensor,
    v_BSMD: Tensor,
    out_BSND: Tensor,
    logsumexp_BSN: Tensor,
    offsets: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_gradients(q_BSND, k_BSMD, v_BSMD)


def _empty_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)  # no zeros as the gradient of logsumexp


def _backward(ctx: Any, grad_BSND: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    q_BSND, k_BSMD, v_BSMD, offsets, out_BSND, logsumexp_BSN = ctx.saved_tensors
    grads = document_attention_backward(
        grad_BSND, q_BSND, k_BSMD, v_BSMD, out_BSND, logsumexp_BSN, offsets, ctx.scale, ctx.window
    )
    return *grads, None, None, None


document_attention.register_autograd(_backward, setup_context=_save)
