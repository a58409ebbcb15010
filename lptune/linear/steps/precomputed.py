"""Precomputes the scales of all weights: one collective per step instead of one per weight and gather.

To quantize a weight with one scale, or one scale per block, for an 8-bit gather, a rank needs the amaxes of
all ranks (weight_amax.py). Weights change once per step, so measuring them once per step is enough:

    scales = PrecomputedScales(model, optimizer)     after sharding; linear.LowPrecision does this
    ... train ...

The first gather after a change measures all weights, and merges the amaxes in one all-reduce over the ranks
that share their rows. (If parts of the model have different meshes, each mesh has its all-reduce.) Later
gathers look the amaxes up. Hooks announce the changes of optimizers, and loading announces its own. Code that
writes to weights in another way must call `linear.weights_changed(model)` on all ranks.

A stale scale is a silent error: it saturates a weight that grew, and coarsens a weight that shrank. Nothing
can notice each change and measure again: the version counter of a tensor misses changes by AdamW and by
loading, and a rank that measures alone deadlocks in the collective. But each gather can check the scale: a
rank compares the amax of its rows with the amax that it contributed to the scale. If they differ, a change
was not announced, and that is an error, however the weight was written. The check reads the shard, which
quantizing reads anyway. It makes no rank wait for another, and no host for its device.

Without PrecomputedScales the results are the same, with one collective per gather. `float8_delayed` needs no
collective (delayed.py).

Shapes: B x C scale blocks of a weight, 1 x 1 for one scale.
"""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lptune.base.errors import UserError
from lptune.kernels import LIVE
from lptune.linear.module import LowPrecisionLinear
from lptune.linear.weights.compute_weights import has_compute_weight
from lptune.linear.weights.master_weight import MasterWeight, is_master
from lptune.linear.weights.weight_amax import max_over_ranks, shard_amaxes


class PrecomputedScales:
    """Amaxes of the weights of `model` that are gathered in 8 bits with one scale, or one per block. Empty,
    at no cost, if the model has no such weight.
    """

    def __init__(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        """model: after `fully_shard` or `parallelize`, else UserError is raised. optimizers: all that update
        its weights.
        """
        self._weights: dict[int, _Weight] = {}
        self._amaxes: dict[int, tuple[Tensor, Tensor]] = {}  # layer number: of this rank's rows, of all rows
        for name, module in model.named_modules():
            if not isinstance(module, LowPrecisionLinear) or not is_master(module.weight):
                continue
            kind = module.spec.kind
            if kind.row_scales or kind.has_history:
                continue  # no collective: scales are of a rank's own rows, or from past steps
            if has_compute_weight(model, module.weight):
                continue  # one rank: nothing to agree on, and one copy in a step
            if not isinstance(module.weight, DTensor):
                raise UserError(
                    f"make linear.LowPrecision after fully_shard: {name or 'model'} is not sharded"
                )
            self._weights[module.number] = _Weight(name, module)
            LIVE[module.number].amax_source = self  # every gather of the layer calls it
        if self._weights:
            for optimizer in optimizers:
                # Before the step: if it fails half way, its changes are announced. After it: a closure may
                # have gathered weights, and so measured them, before the step changed them.
                optimizer.register_step_pre_hook(self._stepped)
                optimizer.register_step_post_hook(self._stepped)

    def leave_out(self, like: Mapping[int, int]) -> None:
        self._weights |= {left: self._weights[here] for left, here in like.items() if here in self._weights}

    def whole_amax(self, number: int, mine_BC: Tensor, mesh: DeviceMesh) -> Tensor:
        """See AmaxSource. Raises RuntimeError, with the layer's name, if its weight changed without an
        announcement (on CUDA: an assertion on the device fails).
        """
        if number not in self._amaxes:
            self._measure(mesh, mine_BC.device)
        then_BC, whole_BC = self._amaxes[number]
        same = (mine_BC == then_BC) | (mine_BC.isnan() & then_BC.isnan())  # NaN does not equal itself
        # An `if` would make the host wait for the device.
        torch._assert_async(
            same.all(),
            f"layer {self._weights[number].name}: its weight was changed after its scale was measured, and "
            "not by the optimizer or load_state_dict; call linear.weights_changed(model) on all ranks after "
            "such a change",
        )
        return whole_BC

    def weight_changed(self) -> None:
        """See AmaxSource. The next gather measures all weights again, not only the one that changed."""
        self._amaxes.clear()

    def _stepped(self, *_: Any) -> None:
        self.weight_changed()

    def _measure(self, mesh: DeviceMesh, device: torch.device) -> None:
        sharded = {number: weight.sharded() for number, weight in self._weights.items()}
        # Only weights that are sharded over `mesh`. Parts of a model may have other meshes.
        group = mesh.get_group()
        masters: dict[int, MasterWeight] = {
            number: weight.to_local()  # type: ignore[misc]
            for number, weight in sharded.items()
            if group in weight.device_mesh.get_all_groups()
        }
        mine = shard_amaxes([master.shard(mesh) for master in masters.values()])
        flat_mine = torch.cat([amax_BC.flatten() for amax_BC in mine]).to(device)
        flat_whole = max_over_ranks(flat_mine, mesh)
        sizes = [amax_BC.numel() for amax_BC in mine]
        parts = zip(masters, mine, flat_mine.split(sizes), flat_whole.split(sizes), strict=True)
        for number, amax_BC, of_mine, of_whole in parts:
            self._amaxes[number] = of_mine.view(amax_BC.shape), of_whole.view(amax_BC.shape)


class _Weight:
    """Finds the sharded weight of a layer, by weak references, so that the model can be freed."""

    def __init__(self, name: str, module: LowPrecisionLinear) -> None:
        self.name = name
        self._module, self._sharded = weakref.ref(module), weakref.ref(module.weight)

    def sharded(self) -> DTensor:
        """The sharded parameter. It is looked up each time, because loading with assign=True makes a new one.
        While the module is gathered (for example after an evaluation), it has another tensor in its place;
        this method then returns the parameter that it found last.
        """
        module = self._module()
        if module is not None and is_master(module.weight):
            self._sharded = weakref.ref(module.weight)
        weight: Any = self._sharded()
        assert isinstance(weight, DTensor)
        return weight
