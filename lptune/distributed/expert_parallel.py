"""Expert parallelism: the ranks of a group have the experts of a mixture among them, E / n each, whole.

Without it FSDP gathers all experts of a block on every rank. Here it gathers a rank's own alone, over the
ranks that have the same ones, and tokens go to their experts:

    rows of tokens, sorted by expert    on each rank, one for each expert of a token
    counts                              all-to-all of E numbers; the host reads them
    there                               all-to-all; then sorted by expert, rank, row
    the experts                         as on one rank that has the rows of the whole group
    back                                there, reversed; each rank multiplies by its own factors, and sums

Backward sends gradients the same two ways. A rank gets as many rows as its experts were chosen for, none or
all, so the host must know how many: it waits for the device once in each forward of a mixture.

Rows travel in the compute dtype. In forward they go there in 8 bits, with their scales, if all products of
the first layer use the same 8-bit rows (`precision.tp_all_gather`): quantizing rows and sending them commute,
so all bits are those of sending first.

The mesh of experts has the axes (replicate,) fsdp and expert: neighbours on the axis fsdp of other weights
are a group. A stack of matrices (E * N, K) is cut by rows over `expert`, that is between experts, then
sharded by FSDP as any weight.

FSDP averages gradients over the ranks of its axis, and each rank has the gradient of a whole group's tokens.
So what is divided by is the number of all ranks that have other tokens, as for other weights.

Shapes: S rows sent, R received, K columns, n ranks of the group, E experts, e = E / n.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lptune.distributed.session import Experts, World
from lptune.distributed.tensor_parallel import cut_rows
from lptune.kernels import pack_rows, unpack_rows
from lptune.linear import LinearSpec, LowPrecisionLinear, QuantizedTokens
from lptune.models import Backbone, Group
from lptune.numerics import FORMATS

_Send = Callable[[Tensor], Tensor]


class Trip(NamedTuple):
    """Where the rows of one forward of a mixture go."""

    group: Group
    spec: LinearSpec | None
    sent: list[int]
    received: list[int]
    """Rows to and from each rank of the group."""
    experts_R: Tensor
    """The expert of each received row, sorted: its number among this rank's own."""
    order_R: Tensor
    """Sorts received rows by expert."""
    back_R: Tensor
    """Undoes that."""
    most: int
    """No expert of this rank has more rows."""

    def there(self, x_SK: Tensor) -> Tensor | QuantizedTokens:
        """The rows for this rank's experts (R, K), by expert. x_SK: sorted by expert."""
        if self.spec is None:
            x_RK: Tensor = _Way.apply(x_SK, self.send, self.send_back)  # type: ignore[no-untyped-call]
            return x_RK
        return QuantizedTokens(*_ThereLow.apply(x_SK, self, self.spec))  # type: ignore[no-untyped-call]

    def back(self, x_RK: Tensor) -> Tensor:
        """What the experts made of this rank's rows (S, K), in the order in which they were sent."""
        x_SK: Tensor = _Way.apply(x_RK, self.send_back, self.send)  # type: ignore[no-untyped-call]
        return x_SK

    def send(self, x_SK: Tensor) -> Tensor:
        """Any rows to the ranks of their experts (R, …), as `there` does; without a gradient."""
        return _all_to_all(x_SK, self.received, self.sent, self.group)[self.order_R]

    def send_back(self, x_RK: Tensor) -> Tensor:
        """Any rows of this rank's experts back (S, …), as `back` does; without a gradient."""
        return _all_to_all(x_RK[self.back_R], self.sent, self.received, self.group)


class Exchange:
    """Sends the rows of one mixture between the ranks of a group."""

    def __init__(self, num_experts: int, experts: Experts, spec: LinearSpec | None) -> None:
        """num_experts: E. spec: of the layer that takes the rows, if they go there in 8 bits."""
        self.experts, self.group, self.spec = experts, experts.group, spec
        self.first = num_experts // self.group.size * self.group.rank
        """Number of this rank's first expert among all."""
        self._num_experts = num_experts

    def trip(self, experts_S: Tensor) -> Trip:
        """Tells the other ranks how many rows they get. experts_S: the expert of each row, sorted."""
        size = self._num_experts // self.group.size
        if isinstance(experts_S, FakeTensor):  # a dry run, in which all experts have equally many rows
            sent = [len(experts_S) // self.group.size] * self.group.size
            sent[0] += len(experts_S) - sum(sent)
            received = [sent[self.group.rank]] * self.group.size
            most = -(-sum(received) // size)
            found_R = experts_S.new_empty(sum(received))
        else:
            numbers_E = torch.arange(self._num_experts + 1, device=experts_S.device)
            mine_E = torch.searchsorted(experts_S, numbers_E).diff()
            shares = [size] * self.group.size
            theirs_E = _all_to_all(mine_E, shares, shares, self.group)
            mine, theirs = torch.stack([mine_E, theirs_E]).unflatten(1, (-1, size)).tolist()
            sent, received = [sum(each) for each in mine], [sum(each) for each in theirs]
            most = max(map(sum, zip(*theirs, strict=True)))
            own_E = numbers_E[:size].repeat(self.group.size)
            found_R = own_E.repeat_interleave(theirs_E, output_size=sum(received))  # else the host waits
        experts_R, order_R = torch.sort(found_R, stable=True)
        return Trip(self.group, self.spec, sent, received, experts_R, order_R, torch.argsort(order_R), most)


def share_experts(model: Backbone, world: World) -> None:
    """Leaves each rank of a group its own experts of every mixture of `model`, in place. Call it after
    `linear.convert` and before `fully_shard`. Their number divides (`Facts.check_execution`).
    """
    assert world.experts is not None
    size, mesh = world.experts.group.size, world.experts.mesh["expert"]
    for mixture in model.mixtures.values():
        layers: list[Any] = expert_layers(mixture)
        num_experts = layers[0].num_groups
        for layer in layers:
            cut_rows(layer, mesh)
            layer.num_groups //= size
        spec = layers[0].spec if isinstance(layers[0], LowPrecisionLinear) else None
        sends_low = spec is not None and spec.token_gather != "high"
        mixture.exchange = Exchange(num_experts, world.experts, spec if sends_low else None)  # type: ignore[assignment]
        mixture.runs_eagerly = True  # type: ignore[assignment]  # sizes depend on data


def expert_layers(mixture: nn.Module) -> list[nn.Module]:
    """The grouped linear layers of a mixture, first the one that takes its rows."""
    return [each for each in mixture.modules() if getattr(each, "num_groups", 0)]


def expert_weights(mixture: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of `expert_layers` by their names in `mixture`."""
    layers = {id(layer) for layer in expert_layers(mixture)}
    return {
        f"{name}.weight": module.weight for name, module in mixture.named_modules() if id(module) in layers
    }


class _Way(torch.autograd.Function):
    """Sends rows one way, and their gradients the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, way: _Send, back: _Send) -> Tensor:
        ctx.back = back
        return way(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(g), None, None


class _ThereLow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SK: Tensor, trip: Trip, spec: LinearSpec) -> tuple[Tensor, Tensor, Tensor]:
        ctx.trip = trip
        rows = spec.kind.quantize_tokens(spec, x_SK, lambda amax: amax)  # the kind has scales of rows
        buffer = _all_to_all(pack_rows(rows, len(x_SK)), trip.received, trip.sent, trip.group)
        bytes_RK, scale_R1 = unpack_rows(buffer, len(buffer), torch.uint8)
        q_RK, scale_R1 = bytes_RK[trip.order_R].view(FORMATS[spec.fmt].dtype), scale_R1[trip.order_R]
        ctx.mark_non_differentiable(q_RK, scale_R1)
        return x_SK.new_zeros(()).expand_as(q_RK), q_RK, scale_R1

    @staticmethod
    def backward(ctx: Any, g_RK: Tensor, *_: Any) -> tuple[Tensor, None, None]:
        return ctx.trip.send_back(g_RK), None, None


def _all_to_all(x: Tensor, received: list[int], sent: list[int], group: Group) -> Tensor:
    functional = torch.ops._c10d_functional
    found: Tensor = functional.wait_tensor(
        functional.all_to_all_single(x.contiguous(), received, sent, group.name)
    )
    return found
