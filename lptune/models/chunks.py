"""Computes the head and an objective for a chunk of tokens at a time, and in a chunk for a block of rows.

With V = 128,256 words, the float32 logits of 8,192 tokens take 4 GB, and so does their gradient. So the
tokens go through the head in chunks: the logits of a chunk are computed, reduced to one number (or one number
per token) and freed. If they were reduced to one number, their gradient is computed at the same time
(one_pass.py). Otherwise backward computes them again, which costs one more GEMM of the head per token. If a
batch fits into one chunk, autograd keeps the logits.

In a chunk, two tensors of the size of its logits exist at most, in the dtype of the head's output: the logits
and their gradient (one gradient for each differentiable `for_each_token`; the objectives of loss.py have
one). All intermediate tensors (float32 logits, soft-capped logits, log-probabilities, their gradients) exist
for one block of rows only. `Logits.for_each_token` computes block by block and saves only the head's output;
its backward runs forward and backward of each block again. A block has 1/16 of the rows of a chunk, but at
least 2**20 logits, so a small chunk is one block. A compiled chunk has no blocks, because the compiler fuses
the intermediate steps into the loops that read the logits and write their gradient.

Shapes: T tokens, t tokens of a chunk, b tokens of a block, H hidden, V vocabulary, v words of this head
(words.py).
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lptune.hardware.devices import known_device
from lptune.hardware.planned import constant_result, planned
from lptune.models.one_pass import NotInOnePassError, sum_in_one_pass
from lptune.models.words import Words

MAX_LOGITS_PER_CHUNK = 2**27
"""As float32, these take half a gigabyte."""

LARGE_MEMORY = 60 * 10**9
"""A GPU with so many bytes takes larger chunks."""

BLOCKS_PER_CHUNK = 16
MIN_LOGITS_PER_BLOCK = 2**20

Rows = Callable[..., Tensor]
"""(b, v) float32 logits and further tensors of b rows -> (b, …). Each row of the result depends only on the
same row of the arguments.
"""


@constant_result
def max_logits_per_chunk(device: torch.device) -> int:
    """The largest number of logits in a chunk on `device`. Each chunk reads and writes the sum of the head's
    gradient, so four times as many logits on a GPU with the memory for it: at 3B the step is 2 to 3 % shorter
    for 1 GiB (docs/gpu.md).
    """
    return (4 if _memory_bytes(device) >= LARGE_MEMORY else 1) * MAX_LOGITS_PER_CHUNK


def _memory_bytes(device: torch.device) -> int:
    """The memory of a GPU, in a dry run of the planned one, which is large if no model is named; else 0."""
    planned_gpu = planned()
    if planned_gpu is not None:
        known = known_device(planned_gpu.name or "")
        large = LARGE_MEMORY if known is None else known.memory_bytes
        return large if planned_gpu.device_type == "cuda" else 0
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def in_chunks(
    of_chunk: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    width: int,
    *,
    max_logits: int | None = None,
    parameters: Sequence[Tensor] | None = None,
    expected_gradient: float = 1.0,
) -> Tensor:
    """Same as `of_chunk(*tensors)`, but computed in chunks of rows.

    tensors: T rows each. of_chunk: called with t rows of each tensor; returns a number, and the results are
    added, or (t, …), and they are concatenated. width: logits per row. max_logits: a chunk has at most
    max_logits / width rows; None: `max_logits_per_chunk`. If there is more than one chunk, backward calls
    `of_chunk` again for each. But if it returns a number, and `parameters` are those it depends on, forward
    computes the gradients, for this `expected_gradient` of the number (one_pass.py).
    """
    num_tokens, max_logits = len(tensors[0]), max_logits or max_logits_per_chunk(tensors[0].device)
    num_chunks = max(1, -(-num_tokens * width // max_logits))
    if num_chunks == 1:
        return of_chunk(*tensors)
    chunk_tokens = -(-num_tokens // num_chunks)
    if parameters is not None and _computes_gradients(tensors, parameters):
        with suppress(NotInOnePassError):
            return sum_in_one_pass(of_chunk, tensors, parameters, chunk_tokens, expected_gradient)
    parts: list[Tensor] = [
        # A chunk uses no random numbers, so the state of the generator need not be saved and restored.
        checkpoint(of_chunk, *chunk, use_reentrant=False, preserve_rng_state=False)
        for chunk in zip(*(torch.split(each, chunk_tokens) for each in tensors), strict=True)
    ]
    return torch.cat(parts) if parts[0].dim() else sum(parts[1:], parts[0])


def _computes_gradients(tensors: Sequence[Tensor], parameters: Sequence[Tensor]) -> bool:
    """Whether forward computes the gradients of a number."""
    if torch.compiler.is_compiling():  # compile=model: torch.compile cannot trace torch.autograd.grad
        return False
    trained = [each for each in (*tensors, *parameters) if each.requires_grad]
    # A hook would see the gradient of each chunk, and that of all chunks as well.
    return torch.is_grad_enabled() and bool(trained) and not any(each._backward_hooks for each in parameters)


class Logits:
    """The logits of a chunk, for an objective. They are never all in float32 at the same time."""

    def __init__(self, raw_tv: Tensor, finish: Callable[[Tensor], Tensor], words: Words) -> None:
        self._raw_tv, self._finish = raw_tv, finish
        self.words = words
        """The words to which the columns of the logits belong."""
        self.width: int = raw_tv.shape[1]

    def for_each_token(self, function: Rows, *tensors: Tensor) -> Tensor:
        """Same as `function(logits, *tensors)` with float32 logits. Differentiable in the logits only.

        function: called for a block of rows at a time. tensors: one row for each token; must not require a
        gradient, else ValueError is raised.
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

    def log_normalizer(self) -> Tensor:
        """(t,) log of the sum of exp(logits) over all words, on a cut vocabulary those of all parts.
        Differentiable: the gradient of a part's logits is their softmax.
        """
        if self.words.is_all:
            return self.for_each_token(_log_sum)
        with torch.no_grad():
            largest_t = self.words.largest(self.for_each_token(_largest))
        return self.words.sum(self.for_each_token(_sum_of_exp, largest_t)).log() + largest_t


def _log_sum(x_bV: Tensor) -> Tensor:
    return x_bV.logsumexp(1)


def _largest(x_bv: Tensor) -> Tensor:
    return x_bv.amax(1)


def _sum_of_exp(x_bv: Tensor, largest_b: Tensor) -> Tensor:
    return (x_bv - largest_b[:, None]).exp().sum(1)


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
    """The tensors divided into blocks of rows. Tensors without rows give one empty block."""
    num_rows, width = raw_tv.shape
    rows = max(-(-num_rows // BLOCKS_PER_CHUNK), -(-MIN_LOGITS_PER_BLOCK // max(1, width)))
    return list(zip(*(torch.split(each, rows) for each in (raw_tv, *tensors)), strict=True))
