"""Weights on one rank: copies in the precision of the forward pass, without FSDP.

FSDP2 on one rank has nothing to gather, and still casts each weight, copies it into a buffer, copies its
gradient into another buffer and that one into a third: 24 bytes read and written for each parameter, where
the cast and one copy of the gradient take 12. Here a parameter has two tensors:

    master          the parameter: float32, ordinary. The optimizer, checkpoints and your own code see it.
    compute weight  its copy in the compute dtype; in 8 bits where the plan says `low`. It is in the place of
                    the master in its module from the beginning of forward to the end of backward.

    before forward  Masters are copied: once in a step, however many micro-batches it has. Compute weights
                    take the places of the masters.
    backward        When a compute weight has its gradient, that is added to the master's, in float32, and
                    freed.
    afterwards      The masters are back: at the end of backward, or of a forward without gradients.

Masters are copied again after a backward, unless it is known that no update follows (`keep`), after a step
of their optimizer, and when torch's version counters tell of a write, such as by `load_state_dict`. The
counters alone would not do: fused optimizers and writes to `.data` are not counted. So a trained master is
also copied again after each forward without gradients: before the next forward, a loop may exchange weights
for their averages.

Copies and gradients are those of FSDP2, bit for bit. The copies stay allocated: 2 bytes for each parameter,
1 in 8 bits.

A master needs no copy if it has the compute dtype already, is stored in INT8 (Int8Weight), or stays float32.
"""

import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Never

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from lptune.linear.weights.master_weight import MasterWeight
from lptune.linear.weights.row_tensor import RowTensor

_ATTRIBUTE = "_compute_weights"
_UNKNOWN = -1


@dataclass
class _Copied:
    """A master with its compute weight."""

    master: nn.Parameter
    weight: nn.Parameter
    places: list[tuple[nn.Module, str]]
    """The modules that have it, and under which names: several for a tied weight."""
    version: int
    """The master's when it was copied last, or _UNKNOWN."""


class ComputeWeights:
    """The compute weights of one model. Made by `use_compute_weights`."""

    def __init__(
        self, model: nn.Module, compute_dtype: torch.dtype, mesh: DeviceMesh, float32_names: Collection[str]
    ) -> None:
        """mesh: of one rank. A MasterWeight finds by it which rows of the weight it has."""
        self._model, self._dtype, self._mesh = model, compute_dtype, mesh
        self._float32_names = float32_names
        self._copied: list[_Copied] = []
        self._in_place = self._updates_follow = False
        _ALL.add(self)
        self.keep = False
        """Whether no update follows the next backward, because more micro-batches do."""

    @staticmethod
    def of(model: nn.Module | None) -> "ComputeWeights | None":
        """The compute weights of `model`; None if it has none, for example because FSDP shards it."""
        return None if model is None else vars(model).get(_ATTRIBUTE)

    def copies(self) -> dict[nn.Parameter, nn.Parameter]:
        """Master -> its compute weight, of all that exist."""
        return {each.master: each.weight for each in self._copied}

    def put_in_place(self) -> None:
        """Copies the masters that changed, and puts the compute weights into their modules."""
        self.take_out()  # a forward before this one may have had no backward
        # A compute weight that evaluation in inference mode makes must serve training too.
        with torch.inference_mode(False):
            self._find_masters()
            if self._updates_follow:
                self.masters_changed(lambda _: True)
                self._updates_follow = False
            self._copy_again()
        self._put()

    def _put(self) -> None:
        if not self._in_place:
            self._swap(lambda each: (each.master, each.weight))
            self._in_place = True

    @torch.no_grad()
    def _copy_again(self) -> None:
        stale = [each for each in self._copied if each.version != _version(each.master)]
        plain = [each for each in stale if not isinstance(each.weight, RowTensor)]
        if plain:
            torch._foreach_copy_([each.weight for each in plain], [each.master for each in plain])
        for each in stale:
            if isinstance(each.weight, RowTensor):
                # The parameter stays, because it has the hook. It gets new parts, which the quantizer made.
                new = self._copy(each.master)
                assert isinstance(new, RowTensor)
                for name, part in zip(new.PARTS, new.parts(), strict=True):
                    setattr(each.weight, name, part)
                # The backward of a forward that read the old parts raises, as it does for an ordinary tensor.
                torch.autograd.graph.increment_version(each.weight)
            each.version = _version(each.master)

    def take_out(self) -> None:
        """Puts the masters back into their modules."""
        if self._in_place:
            self._swap(lambda each: (each.weight, each.master))
            self._in_place = False

    def _swap(self, old_and_new: Callable[[_Copied], tuple[nn.Parameter, nn.Parameter]]) -> None:
        for each in self._copied:
            old, new = old_and_new(each)
            for module, name in each.places:
                if module._parameters.get(name) is old:  # not one that was assigned since
                    module._parameters[name] = new

    def masters_changed(self, written: Callable[[Tensor], bool]) -> None:
        """Makes the next forward copy those masters again of which `written` is true."""
        for each in self._copied:
            if written(each.master):
                each.version = _UNKNOWN

    def _find_masters(self) -> None:
        """Makes `_copied` fit the model: parameters may have been loaded, moved, frozen or tied since."""
        known = {id(each.master): each for each in self._copied}
        found: dict[int, _Copied] = {}
        for prefix, module in self._model.named_modules():
            for name, master in module._parameters.items():
                if (
                    master is None
                    or not self._needs_copy(master)
                    or f"{prefix}.{name}" in self._float32_names
                ):
                    continue
                if id(master) not in found:
                    old = known.get(id(master))
                    found[id(master)] = old if old and _fits(old) else self._new(master)
                    found[id(master)].places = []
                found[id(master)].places.append((module, name))
        self._copied = list(found.values())

    def _needs_copy(self, master: Tensor) -> bool:
        if isinstance(master, RowTensor):
            return isinstance(master, MasterWeight)
        return master.is_floating_point() and master.dtype != self._dtype

    def _new(self, master: nn.Parameter) -> _Copied:
        weight = nn.Parameter(self._copy(master), requires_grad=master.requires_grad)
        if master.requires_grad:
            # A weak reference: Python's garbage collector does not look into the hooks of a tensor.
            weight.register_post_accumulate_grad_hook(_adds_to(master, weakref.ref(self)))
        return _Copied(master, weight, [], _version(master))

    def note_backward(self) -> None:
        """Called in each backward: an update may follow, so the next forward copies masters again.

        Each gradient calls it too: `watch` misses a backward if it found no tensor in the output.
        """
        self._updates_follow |= not self.keep

    @torch.no_grad()
    def _copy(self, master: Tensor) -> Tensor:
        if isinstance(master, MasterWeight):
            return master.whole(master.quantized_rows(self._mesh), self._dtype)
        return master.detach().to(self._dtype)

    def before_forward(self, *_: Any) -> None:
        """A forward hook of the model."""
        self.put_in_place()

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """A forward hook of the model."""
        if torch.is_grad_enabled():
            self.watch(output)
        else:
            self.take_out()
            if not self.keep:
                self.masters_changed(lambda master: master.requires_grad)

    def before_parameters(self, *_: Any, **__: Any) -> None:
        """A hook of the model's state_dict and load_state_dict."""
        self.take_out()

    def watch(self, output: Any) -> None:
        """Makes the backward of the tensors in `output` find the compute weights in their modules, which a
        recomputed forward reads, and the masters be back when it ends.
        """
        for each in tree_leaves(output):
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(self._before_backward)

    def _before_backward(self, gradient: Tensor) -> None:
        self._put()  # without a new copy: backward needs the values of forward, even if masters have changed
        torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        self.take_out()
        self.note_backward()

    def __deepcopy__(self, memo: object) -> Never:
        raise TypeError(
            "a model cannot be copied after parallelize(): compiled parts and methods of the copy would be "
            "those of the original; build another model and load_state_dict() into it"
        )


_ALL: "weakref.WeakSet[ComputeWeights]" = weakref.WeakSet()


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    updated = {id(each) for group in optimizer.param_groups for each in group["params"]}
    for each in _ALL:
        each.masters_changed(lambda master: id(master) in updated)


register_optimizer_step_post_hook(_after_step)


def use_compute_weights(
    model: nn.Module,
    compute_dtype: torch.dtype,
    mesh: DeviceMesh,
    methods: tuple[str, ...] = (),
    float32_names: Collection[str] = (),
) -> None:
    """Gives `model`, on one rank, compute weights in `compute_dtype`; in place. It replaces `fully_shard`;
    `gather_in_8_bits` comes before it too.

    methods: names of further methods of `model` that run forward. After one of them without gradients the
    compute weights stay, for what the caller computes with them next; `take_out` ends that. float32_names: of
    parameters that forward reads as they are.
    """
    weights = ComputeWeights(model, compute_dtype, mesh, float32_names)
    object.__setattr__(model, _ATTRIBUTE, weights)
    model.register_forward_pre_hook(weights.before_forward)
    model.register_forward_hook(weights.after_forward)
    # These read and write all parameters, also between forward and backward.
    model.register_state_dict_pre_hook(weights.before_parameters)
    model.register_load_state_dict_pre_hook(weights.before_parameters)
    model.zero_grad = _with_masters(model.zero_grad, weights)  # type: ignore[method-assign]
    for name in methods:
        setattr(model, name, _as_forward(getattr(model, name), weights))


def is_parallelized(model: nn.Module) -> bool:
    """Whether `fully_shard`, or in its place `use_compute_weights`, was applied to a module of `model`."""
    return any(
        isinstance(each, FSDPModule) or ComputeWeights.of(each) is not None for each in model.modules()
    )


def has_compute_weight(model: nn.Module | None, weight: Tensor) -> bool:
    """Whether `weight` is a parameter of a part of `model` to which `use_compute_weights` was applied."""
    parts = [each for each in model.modules() if ComputeWeights.of(each) is not None] if model else []
    return any(each is weight for part in parts for each in part.parameters())


def _as_forward(method: Callable[..., Any], weights: ComputeWeights) -> Callable[..., Any]:
    def with_compute_weights(*args: Any, **kwargs: Any) -> Any:
        weights.put_in_place()
        output = method(*args, **kwargs)
        if torch.is_grad_enabled():
            weights.watch(output)
        return output

    return with_compute_weights


def _adds_to(master: nn.Parameter, weights: Callable[[], ComputeWeights | None]) -> Callable[[Tensor], None]:
    def add(weight: Tensor) -> None:
        gradient, weight.grad = weight.grad, None
        assert gradient is not None
        if master.grad is None:
            master.grad = gradient.to(master.dtype)
        else:
            master.grad += gradient
        del gradient  # a hook of the master may need the memory
        if (found := weights()) is not None:
            found.note_backward()
        for hook in list((master._post_accumulate_grad_hooks or {}).values()):  # as FSDP2 calls them
            hook(master)

    return add


def _with_masters(method: Callable[..., Any], weights: ComputeWeights) -> Callable[..., Any]:
    def with_masters(*args: Any, **kwargs: Any) -> Any:
        weights.take_out()
        return method(*args, **kwargs)

    return with_masters


def _version(master: Tensor) -> int:
    """Changes with each write to `master` that torch counts. For a RowTensor torch counts some writes for its
    parts only, and others for the whole only.
    """
    return master._version + sum(part._version for part in _parts(master))


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    if isinstance(tensor, RowTensor):
        yield from tensor.parts()


def _fits(old: _Copied) -> bool:
    weight, master = old.weight, old.master
    return (weight.shape, weight.device, weight.requires_grad) == (
        master.shape,
        master.device,
        master.requires_grad,
    )
