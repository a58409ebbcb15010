"""The scales of all weights, precomputed: one collective a step instead of one per weight and gather.

A weight with one scale, or with one per block, is quantized for an 8-bit all-gather by amaxes of all ranks
(weight_amax.py). Weights change once a step, so once is enough:

    scales = PrecomputedScales(model, optimizer)     after fully_shard
    ... train ...

The first gather after a change measures all weights and merges the amaxes in one all-reduce over the ranks
that share their rows; all other gathers find theirs. The optimizer says that it changed them, loading says
so, and whoever else writes to weights calls `weights_changed(model)`, on all ranks.

A scale must not outlive its weight: a stale one is silent, saturating what grew and coarsening what shrank.
A tensor's version counter tells of neither AdamW nor loading, and whether to measure again must be decided
alike on all ranks, or they wait for each other forever. So a scale is not trusted but checked: at each gather
a rank compares the amax of its rows with the one that it contributed. Where nobody announced a change and a
scale would no longer be right, that is an error, whichever way the weight was written. The check reads a
shard, which is read anyway to be quantized, and waits for nothing.

Without PrecomputedScales everything is as right, at a collective for each gather. `float8_delayed` needs
none (delayed.py).
"""

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lptune.config import UserError
from lptune.kernels import LIVE
from lptune.linear.kind import kind_of
from lptune.linear.module import LowPrecisionLinear
from lptune.linear.weights.master_weight import MasterWeight, is_master
from lptune.linear.weights.weight_amax import max_over_ranks, shard_amaxes


class PrecomputedScales:
    """Amaxes of the weights of `model` that are gathered in 8 bits by scales of a tensor or of blocks;
    nothing, at no cost, where there are none.
    """

    def __init__(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        """model: sharded. optimizers: all that update its weights. Raises UserError before `fully_shard`."""
        self._weights: dict[int, _Weight] = {}
        self._amaxes: dict[int, tuple[Tensor, Tensor]] = {}  # number: of this rank's rows, of all
        for name, module in model.named_modules():
            if not isinstance(module, LowPrecisionLinear) or not is_master(module.weight):
                continue
            kind = kind_of(module.spec)
            if kind.row_scales or kind.has_history:  # no rank waits for another one's amaxes
                continue
            if not isinstance(module.weight, DTensor):
                raise UserError(
                    f"make linear.LowPrecision after fully_shard: {name or 'model'} is not sharded"
                )
            self._weights[module.number] = _Weight(name, module)
            LIVE[module.number].amax_source = self
        if self._weights:
            for optimizer in optimizers:
                # Before, so that a step that fails half way has announced its changes; after, for what a step
                # gathers itself (a closure).
                optimizer.register_step_pre_hook(self._stepped)
                optimizer.register_step_post_hook(self._stepped)

    def whole_amax(self, number: int, mine_BC: Tensor, mesh: DeviceMesh) -> Tensor:
        """See AmaxSource. Raises RuntimeError (on CUDA: fails an assertion on the device) naming the layer
        whose weight changed unannounced.
        """
        if number not in self._amaxes:
            self._measure(mesh, mine_BC.device)
        then_BC, whole_BC = self._amaxes[number]
        same = (mine_BC == then_BC) | (mine_BC.isnan() & then_BC.isnan())
        # No `if`: it would wait for the device.
        torch._assert_async(
            same.all(),
            f"layer {self._weights[number].name}: its weight was changed after its scale was measured, and "
            "not by the optimizer or load_state_dict; call linear.weights_changed(model) on all ranks after "
            "such a change",
        )
        return whole_BC

    def weight_changed(self) -> None:
        """The next gather measures all weights again."""
        self._amaxes.clear()

    def _stepped(self, *_: Any) -> None:
        self.weight_changed()

    def _measure(self, mesh: DeviceMesh, device: torch.device) -> None:
        sharded = {number: weight.sharded() for number, weight in self._weights.items()}
        # Those that the ranks of `mesh` hold together: all, unless parts of a model have meshes of their own.
        group = mesh.get_group()
        masters: dict[int, MasterWeight] = {
            number: weight.to_local()  # type: ignore[misc]
            for number, weight in sharded.items()
            if group in weight.device_mesh.get_all_groups()
        }
        mine = shard_amaxes([master.shard(master.rows_NK, mesh) for master in masters.values()])
        together = torch.cat([amax_BC.flatten() for amax_BC in mine]).to(device)
        whole = max_over_ranks(together, mesh)
        sizes = [amax_BC.numel() for amax_BC in mine]
        parts = zip(masters, mine, together.split(sizes), whole.split(sizes), strict=True)
        for number, amax_BC, then, now in parts:
            self._amaxes[number] = then.view(amax_BC.shape), now.view(amax_BC.shape)


class _Weight:
    """Where the rows of a weight are, without keeping a model alive."""

    def __init__(self, name: str, module: LowPrecisionLinear) -> None:
        self.name = name
        self._module, self._sharded = weakref.ref(module), weakref.ref(module.weight)

    def sharded(self) -> DTensor:
        """The parameter that is sharded: while a module is gathered (after an evaluation, say) it holds
        another one, and after loading with assign=True a new one.
        """
        module = self._module()
        if module is not None and is_master(module.weight):
            self._sharded = weakref.ref(module.weight)
        weight: Any = self._sharded()
        assert isinstance(weight, DTensor)
        return weight
