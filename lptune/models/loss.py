"""Cross-entropy without the logits of the whole batch in memory.

With V = 128,256 words the float32 logits of 8,192 tokens are 4 GB, and their gradient as much again. So the
tokens go through the head in chunks: each chunk's logits are made, reduced to one number and dropped;
backward makes them again. That is one more head GEMM per step, which is small against what it saves. A batch
that fits one chunk is not recomputed.

Shapes: T tokens, H hidden, V vocabulary.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lptune.planned import planned_device_type
from lptune.trials import tries

IGNORE_INDEX = -100
"""Label of a token that no loss is on."""

MAX_LOGITS_PER_CHUNK = 2**27
"""Half a gigabyte of float32."""


def max_logits_per_chunk(device: torch.device) -> int:
    """How many logits a chunk on `device` may have. Each chunk reads and writes the head's gradient once
    more; LPTUNE_TRY=large_loss_chunks makes fewer of them, for more memory.
    """
    is_cuda = (planned_device_type() or device.type) == "cuda"
    return 4 * MAX_LOGITS_PER_CHUNK if is_cuda and tries("large_loss_chunks") else MAX_LOGITS_PER_CHUNK


def summed_cross_entropy(logits_tV: Tensor, labels_t: Tensor) -> Tensor:
    """Over labels other than IGNORE_INDEX. logits_tV: float32, as is the result."""
    return F.cross_entropy(logits_tV, labels_t, ignore_index=IGNORE_INDEX, reduction="sum")


def chunked_cross_entropy(
    hidden_TH: Tensor,
    labels_T: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    vocab_size: int,
    cross_entropy: Callable[[Tensor, Tensor], Tensor] = summed_cross_entropy,
    *,
    max_logits: int | None = None,
) -> Tensor:
    """Same as F.cross_entropy(logits_of(hidden_TH).float(), labels_T, ignore_index=-100, reduction="sum").

    `logits_of` maps (t, H) to logits (t, V). It is called once per chunk of at most `max_logits` / V tokens
    (None: `max_logits_per_chunk`), and where there is more than one chunk again in backward. cross_entropy:
    of such logits and their labels, for logits of which a rank has a part. Returns a float32 scalar.
    """

    def chunk_loss(hidden_tH: Tensor, labels_t: Tensor) -> Tensor:
        return cross_entropy(logits_of(hidden_tH).float(), labels_t)

    num_tokens, max_logits = hidden_TH.shape[0], max_logits or max_logits_per_chunk(hidden_TH.device)
    num_chunks = max(1, -(-num_tokens * vocab_size // max_logits))
    if num_chunks == 1:
        return chunk_loss(hidden_TH, labels_T)
    chunk_tokens = -(-num_tokens // num_chunks)
    loss = torch.zeros((), dtype=torch.float32, device=hidden_TH.device)
    for hidden_tH, labels_t in zip(
        torch.split(hidden_TH, chunk_tokens), torch.split(labels_T, chunk_tokens), strict=True
    ):
        # No randomness inside, so its state need not be saved and restored around each chunk.
        part = checkpoint(chunk_loss, hidden_tH, labels_t, use_reentrant=False, preserve_rng_state=False)
        loss = loss + part
    return loss
