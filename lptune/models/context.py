"""Context parallelism: the ranks of a group hold a part each of the tokens of every row.

Everything but attention computes each token by itself, so a rank needs only its own tokens. Attention needs
all tokens of a row, but computes each head by itself. So before it an all-to-all turns some tokens with all
heads into all tokens with some heads, and another one turns its result back (DeepSpeed Ulysses,
arXiv:2309.14509). In between, attention.py runs as on one rank, with the bounds of documents in whole rows,
so its numbers are those of one rank. No rank may be without a key head, which limits their number.

                  forward          backward
    to_heads      all-to-all       all-to-all                           before attention
    to_tokens     all-to-all       all-to-all                           after it
    summed        all-reduce       gradient * ranks                     a loss
    gathered      all-gather       own part of (gradient * ranks)       values of tokens

The last two end the forward: each rank of a group has the result for whole rows, and computes from it what
the others compute. The factor is there because FSDP takes the mean of the gradients of all ranks, and the
ranks of a group have to add up: each has the gradient of its own tokens.

Rows are cut in parts of equal size, in the order of the ranks. Without a group, all functions return their
argument.

Shapes: B batch, S tokens of a row, c ranks, s = S / c, N heads, n = N / c, D head size.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lptune.base.errors import UserError


class Group(NamedTuple):
    """The ranks of a process group, as plain values, which are constants for the compiler."""

    name: str
    size: int
    rank: int

    @classmethod
    def of(cls, group: ProcessGroup) -> "Group":
        """The plain values of `group`, which this process is in."""
        return cls(group.group_name, group.size(), group.rank())


def part(x_BS: Tensor, group: Group | None) -> Tensor:
    """This rank's part (B, s, …) of (B, S, …), in memory of its own. UserError if S is not s * ranks."""
    if group is None:
        return x_BS
    length, rest = divmod(x_BS.shape[1], group.size)
    if rest:
        raise UserError(
            f"parallel.context: {x_BS.shape[1]} tokens of a row do not divide among {group.size} ranks; "
            "change the length of rows, or set it to 1"
        )
    return x_BS.narrow(1, group.rank * length, length).clone()


def to_heads(x_BsND: Tensor, group: Group | None) -> Tensor:
    """All tokens of this rank's heads (B, S, n, D), from all heads of its tokens. UserError if N is not n *
    ranks.
    """
    if group is None:
        return x_BsND
    if x_BsND.shape[2] % group.size:
        raise UserError(
            f"parallel.context: {group.size} ranks do not divide the {x_BsND.shape[2]} heads of a layer; set "
            f"it to {x_BsND.shape[2]}, which is the most, or to one of its divisors"
        )
    x_cBsnD = x_BsND.unflatten(2, (group.size, -1)).permute(2, 0, 1, 3, 4)
    received_cBsnD: Tensor = _Exchange.apply(x_cBsnD, group)  # type: ignore[no-untyped-call]
    return received_cBsnD.transpose(0, 1).flatten(1, 2)


def to_tokens(x_BSnD: Tensor, group: Group | None) -> Tensor:
    """All heads of this rank's tokens (B, s, N, D): undoes `to_heads`."""
    if group is None:
        return x_BSnD
    x_cBsnD = x_BSnD.unflatten(1, (group.size, -1)).transpose(0, 1)
    received_cBsnD: Tensor = _Exchange.apply(x_cBsnD, group)  # type: ignore[no-untyped-call]
    return received_cBsnD.permute(1, 2, 0, 3, 4).flatten(2, 3)


def own_heads(x_N: Tensor, group: Group | None) -> Tensor:
    """What belongs to this rank's heads (n,), of a parameter that has one number for each head."""
    return x_N if group is None else x_N.unflatten(0, (group.size, -1))[group.rank]


def summed(x: Tensor, group: Group | None) -> Tensor:
    """The sum of `x` over the ranks of the group."""
    if group is None:
        return x
    total: Tensor = _Sum.apply(x, group)  # type: ignore[no-untyped-call]
    return total


def gathered(x_Bs: Tensor, group: Group | None) -> Tensor:
    """(B, S, …) of whole rows, from the parts (B, s, …) of the ranks."""
    if group is None:
        return x_Bs
    whole_BS: Tensor = _Gather.apply(x_Bs, group)  # type: ignore[no-untyped-call]
    return whole_BS


class _Exchange(torch.autograd.Function):
    """Sends x[i] to rank i; puts what comes from rank i at i. So it undoes itself, also for gradients."""

    @staticmethod
    def forward(ctx: Any, x_c: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _all_to_all(x_c, group)

    @staticmethod
    def backward(ctx: Any, g_c: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(g_c, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.size, functional = group.size, torch.ops._c10d_functional
        total: Tensor = functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", group.name))
        return total

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g * ctx.size, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_Bs: Tensor, group: Group) -> Tensor:
        ctx.group, functional = group, torch.ops._c10d_functional
        stacked = functional.wait_tensor(
            functional.all_gather_into_tensor(x_Bs.contiguous(), group.size, group.name)
        )
        return torch.cat(stacked.chunk(group.size), dim=1)

    @staticmethod
    def backward(ctx: Any, g_BS: Tensor) -> tuple[Tensor, None]:
        return part(g_BS, ctx.group) * ctx.group.size, None


def _all_to_all(x_c: Tensor, group: Group) -> Tensor:
    functional, ones = torch.ops._c10d_functional, [1] * group.size
    received_c: Tensor = functional.wait_tensor(
        functional.all_to_all_single(x_c.contiguous(), ones, ones, group.name)
    )
    return received_c
