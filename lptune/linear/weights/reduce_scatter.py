"""Gradients that FSDP reduces in fewer bytes: parallel.reduce_dtype.

FSDP2 averages the gradients of a group by a reduce-scatter in float32, 4 bytes a parameter. A reduce-scatter
that sums in a narrow type rounds each partial sum. Here each value is rounded once, and the sum is float32:

    all-to-all      each rank gets what the others have for its shard, in bfloat16 or in 8 bits
    sum             in float32, in the order of the ranks, so that bits depend on the mesh alone

which moves (n - 1) / n of the narrow buffer, as a ring does. In 8 bits each BLOCK of 128 values has a float32
scale, amax / 127, that is 1.03 bytes a value. Codes are rounded stochastically, with bits of each rank's own,
so that the error of the sum has the mean 0 and falls with the root of the number of ranks. (ZeRO++,
arXiv:2306.10209, exchanges gradients in blocks, too, rounded to nearest.) A block may hold the end of one
parameter and the beginning of the next. A value that is not finite makes its block NaN, so the norm is NaN on
all ranks and the step is skipped.

The random bits are a function of (seed, step, the group's name, micro-batch of the step), as those of
`precision.stochastic_rounding`. Gradients of micro-batches add up in float32 before. Between copies of a
model (HSDP) the shards are averaged in float32 as ever.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lptune.kernels import quantize_weight_rows
from lptune.numerics import random_key

BLOCK = 128
_AT_ONCE = 2**25
"""Values that are encoded or decoded together: what float32 copies take beside the buffers."""
_ATTRIBUTE = "_narrow_reduce"


class NarrowReduceScatter:
    """The reduce-scatter of one FSDP group: an all-to-all of `dtype`, bfloat16 or int8, summed in float32. It
    has what torch's abstract class ReduceScatter asks for, which is private.
    """

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        """name: of the group, for its random bits."""
        self.name, self.dtype = name, dtype
        self.key: int | None = None
        """Of the random bits of the next reduction. int8 needs it."""
        self.num_calls = 0

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An empty tensor: FSDP's input and output, float32."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """output_tensor (S,) = this rank's part of the sum or mean over ranks of input_tensor (n * S,), both
        float32. A collective on the current stream.
        """
        assert not async_op
        assert op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG), op
        self.num_calls += 1
        num_ranks = group.size()
        parts_nS = input_tensor.view(num_ranks, -1)
        if self.dtype == torch.int8:
            _exchange_codes(output_tensor, parts_nS, group, self.key)
        else:
            sent_nS = parts_nS.to(self.dtype)
            got_nS = torch.empty_like(sent_nS)
            dist.all_to_all_single(got_nS, sent_nS, group=group)
            torch.sum(got_nS, dim=0, dtype=torch.float32, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor /= num_ranks


def reduce_narrowly(module: nn.Module, name: str, dtype: torch.dtype) -> None:
    """Makes FSDP reduce the gradients of the group of `module` in `dtype`. name: of the group."""
    assert isinstance(module, FSDPModule)
    comm = NarrowReduceScatter(name, dtype)
    module.set_custom_reduce_scatter(comm)  # type: ignore[arg-type]
    object.__setattr__(module, _ATTRIBUTE, comm)


def num_narrow_reductions(model: nn.Module) -> dict[str, int]:
    """Module of `model` whose group reduces narrowly -> how often it has done so."""
    return {name: comm.num_calls for name, comm in _narrow_reductions(model)}


class ReductionKeys:
    """Sets the keys of the reductions in 8 bits of a model; others cost nothing."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._seed = seed
        self._comms = [comm for _, comm in _narrow_reductions(model) if comm.dtype == torch.int8]

    def start(self, step: int, micro_batch: int) -> None:
        """Call before the passes of a micro-batch. micro_batch: its number in the global batch, which no
        other rank has, so that the errors of ranks are independent.
        """
        for comm in self._comms:
            comm.key = random_key(random_key(self._seed, step, comm.name), micro_batch, "reduce")

    def stop(self) -> None:
        """Removes the keys: a reduction before the next `start` raises an error."""
        for comm in self._comms:
            comm.key = None


def _narrow_reductions(model: nn.Module) -> Iterator[tuple[str, NarrowReduceScatter]]:
    for name, module in model.named_modules():
        if (comm := vars(module).get(_ATTRIBUTE)) is not None:
            yield name, comm


def _exchange_codes(output_S: Tensor, parts_nS: Tensor, group: dist.ProcessGroup, key: int | None) -> None:
    """output_S: the sum over ranks of their row of this rank, from codes and scales in one buffer."""
    if key is None:
        raise RuntimeError(
            "parallel.reduce_dtype=int8 has no random key: call low.micro_batch(number) of "
            "linear.LowPrecision before each forward and backward"
        )
    num_ranks, size = parts_nS.shape
    num_blocks = -(-size // BLOCK)
    num_codes = num_blocks * BLOCK
    sent = parts_nS.new_empty((num_ranks, num_codes + 4 * num_blocks), dtype=torch.uint8)
    # Some ranks' parts at a time, since a part whose end is padded is a copy in float32.
    for first in range(0, num_ranks, step := max(1, _AT_ONCE // num_codes)):
        ranks = slice(first, first + step)
        some_nS = parts_nS[ranks]
        if num_codes != size:
            some_nS = F.pad(some_nS, (0, num_codes - size))
        q_RB, scale_R1 = quantize_weight_rows(some_nS.reshape(-1, BLOCK), key, first * num_codes)
        sent[ranks, :num_codes] = q_RB.view(torch.uint8).view(-1, num_codes)
        sent[ranks, num_codes:] = scale_R1.view(torch.uint8).view(-1, 4 * num_blocks)
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=group)
    q_nbB = got[:, :num_codes].view(torch.int8).unflatten(1, (num_blocks, BLOCK))
    scale_nb1 = got[:, num_codes:].view(torch.float32).unsqueeze(2)
    sum_bB = output_S.view(-1, BLOCK) if num_codes == size else output_S.new_empty(num_blocks, BLOCK)
    for first in range(0, num_blocks, step := max(1, _AT_ONCE // (num_ranks * BLOCK))):
        blocks = slice(first, first + step)
        torch.sum(q_nbB[:, blocks] * scale_nb1[:, blocks], dim=0, out=sum_bB[blocks])
    if num_codes != size:
        output_S.copy_(sum_bB.flatten()[:size])
