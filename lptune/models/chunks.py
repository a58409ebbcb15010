"""The head and an objective, a chunk of tokens at a time, and within a chunk a block of rows at a time.

With V = 128,256 words the float32 logits of 8,192 tokens are 4 GB, and their gradient as much again. So the
tokens go through the head in chunks: each chunk's logits are made, reduced to a number (or one for each
token) and dropped; backward makes them again. That is one more head GEMM per step, which is small against
what it saves. A batch that fits one chunk is not recomputed.

Of a chunk's logits there are at most two copies in the dtype of the head's output: the logits and their
gradient (one gradient for each differentiable `for_each_token`; the objectives of loss.py have one). What
lies between them (float32 logits, soft-capped ones, log-probabilities, and a gradient for each of these)
exists for a block of rows only: `Logits.for_each_token` computes block by block, saves the head's output
alone, and in backward goes through the blocks again, each forward and backward. A block has a sixteenth of
the chunk's rows, and at least 2**20 logits, so that small chunks are one block. A compiled chunk
has no blocks: there the compiler fuses what lies between into the loops that read and write the two copies.

Shapes: T tokens, t tokens of a chunk, b of a block, H hidden, V vocabulary, v words of this head (words.py).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lptune.hardware.planned import planned_device_type
from lptune.hardware.trials import tries
from lptune.models.words import Words

MAX_LOGITS_PER_CHUNK = 2**27
"""Half a gigabyte of float32."""

BLOCKS_PER_CHUNK = 16
MIN_LOGITS_PER_BLOCK = 2**20

Rows = Callable[..., Tensor]
"""(b, v) float32 logits, further tensors of b rows -> (b, …). No row of the result depends on another row."""


def max_logits_per_chunk(device: torch.device) -> int:
    """How many logits a chunk on `device` may have. Each chunk reads and writes the head's gradient once
    more; LPTUNE_TRY=large_loss_chunks makes fewer of them, for more memory.
    """
    is_cuda = (planned_device_type() or device.type) == "cuda"
    return 4 * MAX_LOGITS_PER_CHUNK if is_cuda and tries("large_loss_chunks") else MAX_LOGITS_PER_CHUNK


def in_chunks(
    of_chunk: Callable[..., Tensor], tensors: Sequence[Tensor], width: int, *, max_logits: int | None = None
) -> Tensor:
    """`of_chunk(*tensors)`, computed for chunks of rows: the sum of the numbers, or the rows one after the
    other.

    tensors: of T rows each. of_chunk: returns a number or (t, …); it is called once for each chunk of at most
    `max_logits` / `width` rows (None: `max_logits_per_chunk`), and where there is more than one chunk again
    in backward.
    """
    num_tokens, max_logits = len(tensors[0]), max_logits or max_logits_per_chunk(tensors[0].device)
    num_chunks = max(1, -(-num_tokens * width // max_logits))
    if num_chunks == 1:
        return of_chunk(*tensors)
    chunk_tokens = -(-num_tokens // num_chunks)
    parts: list[Tensor] = [
        # No randomness inside, so its state need not be saved and restored around each chunk.
        checkpoint(of_chunk, *chunk, use_reentrant=False, preserve_rng_state=False)
        for chunk in zip(*(torch.split(each, chunk_tokens) for each in tensors), strict=True)
    ]
    return torch.cat(parts) if parts[0].dim() else sum(parts[1:], parts[0])


class Logits:
    """Of the tokens of a chunk, for an objective to ask numbers of: never there as a whole in float32."""

    def __init__(self, raw_tv: Tensor, finish: Callable[[Tensor], Tensor], words: Words) -> None:
        self._raw_tv, self._finish = raw_tv, finish
        self.words = words
        """The words that the logits are of."""
        self.width: int = raw_tv.shape[1]

    def for_each_token(self, function: Rows, *tensors: Tensor) -> Tensor:
        """`function(logits, *tensors)` with float32 logits; differentiable in the logits alone.

        tensors: of a row for each token, without a gradient: ValueError for one that requires it. At any time
        `function` sees a block of rows.
        """
        if any(each.requires_grad for each in tensors):
            raise ValueError(
                "for_each_token is differentiable in the logits alone; detach the tensors beside them, or "
                "combine the results of two calls afterwards"
            )
        if torch.compiler.is_compiling():
            return function(self._finish(self._raw_tv.float()), *tensors)
        found: Tensor = _ByBlocks.apply(self._raw_tv, self._finish, function, *tensors)  # type: ignore[no-untyped-call]
        return found


class _ByBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, raw_tv: Tensor, finish: Callable[[Tensor], Tensor], function: Rows, *tensors: Tensor
    ) -> Tensor:
        ctx.finish, ctx.function = finish, function
        ctx.save_for_backward(raw_tv, *tensors)
        blocks = _blocks(raw_tv, *tensors)
        return torch.cat([function(finish(raw_bv.float()), *rest) for raw_bv, *rest in blocks])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError("the loss has no second derivative here; call backward without create_graph")
        raw_tv, *tensors = ctx.saved_tensors
        gradient_tv = torch.empty_like(raw_tv)
        for raw_bv, gradient_bv, g_b, *rest in _blocks(raw_tv, gradient_tv, g, *tensors):
            with torch.enable_grad():
                leaf_bv = raw_bv.detach().requires_grad_()
                found = ctx.function(ctx.finish(leaf_bv.float()), *rest)
            gradient_bv.copy_(torch.autograd.grad(found, leaf_bv, g_b)[0])
        return gradient_tv, None, None, *(None for _ in tensors)


def _blocks(raw_tv: Tensor, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Rows of a block of each of the tensors; one empty block of no rows."""
    num_rows, width = raw_tv.shape
    rows = max(-(-num_rows // BLOCKS_PER_CHUNK), -(-MIN_LOGITS_PER_BLOCK // max(1, width)))
    return list(zip(*(torch.split(each, rows) for each in (raw_tv, *tensors)), strict=True))
