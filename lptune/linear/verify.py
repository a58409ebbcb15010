"""Verifies the first step: did it really run in low precision? Five checks, of which a run has all.

    verify_step            counts of GEMMs and gathers of each layer, exactly; the loop says how many passes
    verify_first_update    the same without a word from the loop, so only what is true in any loop
    verify_gathers         bytes of the all-gathers that FSDP ran
    verify_token_gathers   how often tensor parallelism gathered activations in 8 bits
    verify_exchanges       how often expert parallelism sent tokens in 8 bits

The kernels count the GEMMs that they execute (`kernels.record_gemms`). The counts are compared with the
precision plan, layer by layer and GEMM by GEMM. An op counts itself when it runs, so this works in the same
way for eager code, compiled code and recomputation. In a step of m forward and backward passes:

- Each planned GEMM of a layer runs m times, or a multiple of m if the layer is called several times per pass
  (a head that works in chunks).
- grad_weight of a frozen layer runs 0 times. grad_input may run 0 times if no trained parameter comes before
  the layer, for example in q_proj, k_proj and v_proj if all before them is frozen.
- A GEMM that is planned in high precision never runs in low precision.
- A gather that `gather_in_8_bits` planned has exactly the number of bytes of the 8-bit values and scales.

Activation checkpointing runs `output` again in backward. The kernels count these runs separately, so the
rules above stay exact. The number of recomputations is not known in advance, because a compiler removes those
whose results are not used. It must only be the same in each pass.

FSDP2 gathers the parameters of a block in one all-gather: weights that `gather_in_8_bits` chose as 8-bit
rows, other parameters, such as a norm or a bias, in the compute dtype. Its size follows from the shapes:

    sum over 8-bit weights of R * ceil(N / R) * (16 + K)
    + sum over the other parameters of R * ceil(N / R) * (numbers per row) * (bytes of the compute dtype)

for R ranks on the axis. If a weight of a block is gathered in high precision, or in rows that are too long,
the gather of that block has a size that no block has in the plan.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lptune.kernels import GEMMS, RECOMPUTED, Executed, gathered_bytes, record_gemms
from lptune.linear.dtensors import on_this_rank
from lptune.linear.module import LowPrecisionLinear, num_groups
from lptune.linear.plan import LayerPlan, Plan
from lptune.linear.weights.compute_weights import has_compute_weight
from lptune.linear.weights.groups import fsdp_groups, padded_numel
from lptune.linear.weights.master_weight import is_master, num_gathering_ranks, planned_bytes
from lptune.linear.weights.reduce_scatter import num_narrow_reductions


class PrecisionNotAppliedError(RuntimeError):
    """A GEMM or a gather did not run in the precision that the plan says."""


@dataclass
class Verified:
    """Counts of a verified step; filled in when the step ends."""

    num_gemms: int = 0
    """Low-precision GEMMs that executed, recomputation included."""
    num_recomputed: int = 0
    """The GEMMs among these that activation checkpointing ran again in backward."""
    num_low_gathers: int = 0
    """Weights that came in 8 bits: gathered by FSDP, or on one rank quantized without a collective."""
    num_gathering_ranks: int = 1
    """Number of ranks over which weights were gathered."""
    low_precision_flops_fraction: float | None = None
    """Fraction of the FLOPs of linear layers and other weights, without recomputation, that ran in 8 bits;
    None before the step ended.
    """


@contextmanager
def verify_step(model: nn.Module, plan: Plan, num_passes: int) -> Iterator[Verified]:
    """Surrounds one step of `num_passes` forward and backward passes; compares its GEMMs and gathers with
    `plan`.

    Raises PrecisionNotAppliedError, with the names of the layers that did not run as planned.
    """
    verified = Verified()
    with record_gemms() as executed:
        yield verified
    plan = _numbered(model, plan)
    trained = _trained(model, plan, executed)
    faults: list[str] = []
    low_flops, all_flops = 0.0, sum(other.flops_per_token for other in plan.others)
    for layer in plan.layers:
        counts = dict.fromkeys(GEMMS, 0)
        if layer.number is not None:
            counts = {gemm: executed[layer.number, i] for i, gemm in enumerate(GEMMS)}
            again = executed[layer.number, RECOMPUTED]
            faults += _faults(layer, counts, again, num_passes, trained[layer.name])
            fault = _gather_fault(model, layer, model.get_submodule(layer.name).get_parameter("weight"))
            faults += fault
            if gathered_bytes(layer.number) and not fault:
                verified.num_low_gathers += 1
                weight = model.get_submodule(layer.name).get_parameter("weight")
                if isinstance(weight, DTensor):
                    over = num_gathering_ranks(weight)
                    verified.num_gathering_ranks = max(over, verified.num_gathering_ranks)
            verified.num_gemms += sum(counts.values()) + again
            verified.num_recomputed += again
        # FLOPs per call of the layer. Recomputation is not counted, as usual for model FLOPs.
        flops = layer.flops_per_gemm
        needed = (True, *trained[layer.name])
        all_flops += flops * sum(needed)
        if layer.spec and layer.spec.multiplies_in_8_bits:
            low_flops += flops * sum(n and counts[gemm] > 0 for n, gemm in zip(needed, GEMMS, strict=True))
    if faults:
        raise _not_as_planned(faults)
    verified.low_precision_flops_fraction = low_flops / max(all_flops, 1.0)


class FirstStep:
    """Applies `verify_step` to the first step of a run and does nothing in later steps, so that a loop can
    use it in every step.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        enabled: bool,
        report: Callable[[str], None] = print,
        watch: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """enabled: whether the first step is verified. report: gets one line when it ran as planned. watch:
        its context manager surrounds the first step, for other checks of it.
        """
        self._model, self._plan, self._enabled, self._report = model, plan, enabled, report
        self._watch, self._is_wanted, self._of = watch, enabled, ""
        self.verified = Verified()

    def verify_again(self, plan: Plan) -> None:
        """Makes the next step be verified with `plan`, if the first one was or is to be."""
        if not self._enabled:
            self._of = " of this plan"
        self._plan, self._enabled = plan, self._is_wanted
        for each in tuple(_watched):
            each.expect(plan)

    @contextmanager
    def __call__(self, num_passes: int) -> Iterator[None]:
        """Surrounds the forward and backward passes of each step. num_passes: as in `verify_step`."""
        if not self._enabled:
            yield
            return
        self._enabled = False
        # verify_step is inside of `watch`: if both find a fault, the error that names the layer is raised.
        with self._watch(), verify_step(self._model, self._plan, num_passes) as self.verified:
            yield
        if self.verified.num_gemms:
            gemms = f"{self.verified.num_gemms} {self._plan.gemm_name}"
            gathers = f", {self.verified.num_low_gathers} weights gathered in 8 bits"
            exchanged = self.verified.num_low_gathers > 0 and self.verified.num_gathering_ranks > 1
            self._report(
                f"verified: {gemms} ran in the first step{self._of}{gathers * exchanged}, as planned"
            )


def verify_first_update(model: nn.Module, plan: Plan) -> None:
    """Verifies each layer before the first optimizer step for which the layer has a gradient. For loops that
    do not use `verify_step`; the optimizer step then raises PrecisionNotAppliedError.

    It checks only what is true in any loop: `output`, and grad_weight of a trained layer, ran in low
    precision at least once, and the weight was gathered as planned. A layer with a zero gradient that did not
    run is checked later, because some libraries create optimizer state by such a step. A frozen layer that
    never ran in low precision is not reported, since the model may not use it.
    """
    _FirstUpdate(model, plan)


class _FirstUpdate:
    """The layers of one `convert` that are not verified yet."""

    _hook: RemovableHandle | None = None

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._model = weakref.ref(model)
        self._layers: dict[int, tuple[LayerPlan, weakref.ref[nn.Module]]] = {}
        for layer in plan.converted:
            assert layer.number is not None
            module = model.get_submodule(layer.name)
            self._layers[layer.number] = layer, weakref.ref(module)
            weakref.finalize(module, self._forget, layer.number).atexit = False
        self._recording = record_gemms()
        self._executed = self._recording.__enter__()
        _watched.append(self)
        # A global hook for all optimizers, because FSDP replaces the parameters. It is never removed, because
        # torch iterates over its hooks while they run.
        _FirstUpdate._hook = _FirstUpdate._hook or register_optimizer_step_pre_hook(_before_update)

    def expect(self, plan: Plan) -> None:
        """Makes the layers that are not verified yet be compared with `plan`."""
        for layer in plan.converted:
            assert layer.number is not None
            if known := self._layers.get(layer.number):
                self._layers[layer.number] = layer, known[1]

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before each step of `optimizer`. Raises PrecisionNotAppliedError."""
        updated = {id(each) for group in optimizer.param_groups for each in group["params"]}
        model = self._model()
        if not any(id(each) in updated for each in self._parameters(model)):
            return
        faults: list[str] = []
        done = []
        # Copies: a layer that the garbage collector frees meanwhile leaves the dictionary.
        for number, (layer, reference) in tuple(self._layers.items()):
            module: Any = reference()
            if getattr(module, "number", None) != number:
                done.append(number)  # released
                continue
            counts = {gemm: self._executed[number, i] for i, gemm in enumerate(GEMMS)}
            gradient = module.weight.grad if id(module.weight) in updated else None
            gradient = None if gradient is None else on_this_rank(gradient)
            if isinstance(gradient, FakeTensor):
                return  # a dry run executes nothing
            ran = any(counts.values())
            if gradient is None and (module.weight.requires_grad or not ran):
                continue  # the layer has not been used in a training step yet
            if gradient is not None and not ran and not gradient.any():
                continue
            done.append(number)
            faults += _first_update_faults(layer, counts, trained=gradient is not None)
            faults += _gather_fault(model, layer, module.weight)
        if faults:
            raise _not_as_planned(faults, "before the first optimizer step; precision.verify=False ends this")
        for number in done:
            self._forget(number)

    def _parameters(self, model: nn.Module | None) -> Iterator[Tensor]:
        modules = [reference() for _, reference in tuple(self._layers.values())] if model is None else [model]
        for module in modules:
            yield from module.parameters() if module is not None else ()

    def _forget(self, number: int) -> None:
        self._layers.pop(number, None)
        if not self._layers and self in _watched:
            _watched.remove(self)
            self._recording.__exit__(None, None, None)


_watched: list[_FirstUpdate] = []


def _before_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for each in tuple(_watched):
        each.check(optimizer)


# As torch.compiler.disable does, without importing the compiler. A compiled step calls the hook too.
_before_update._torchdynamo_disable = True  # type: ignore[attr-defined]
_before_update._torchdynamo_disable_msg = "reads what kernels counted"  # type: ignore[attr-defined]


def _first_update_faults(layer: LayerPlan, counts: dict[str, int], trained: bool) -> Iterator[str]:
    assert layer.spec is not None
    for gemm in ("output", "grad_weight") if trained else ("output",):
        if layer.spec.is_low(gemm) and not counts[gemm]:
            yield f"layer {layer.name}: {gemm} was to run in low precision, ran 0 times"


def _not_as_planned(faults: list[str], when: str = "") -> PrecisionNotAppliedError:
    shown = "; ".join(faults[:5]) + (f"; and {len(faults) - 5} more" if len(faults) > 5 else "")
    seen = f" ({when})" if when else ""
    return PrecisionNotAppliedError(f"the step did not run as planned{seen}: {shown}")


def _numbered(model: nn.Module, plan: Plan) -> Plan:
    """`plan` with the layer numbers of `model`, which may be a copy of the model that was converted."""
    layers = (
        layer
        if layer.number is None
        else replace(layer, number=getattr(model.get_submodule(layer.name), "number", layer.number))
        for layer in plan.layers
    )
    return replace(plan, layers=tuple(layers))


def _trained(model: nn.Module, plan: Plan, executed: Executed) -> dict[str, tuple[bool, bool]]:
    """By layer name: (whether its input needs a gradient, whether the layer is trained).

    The input needs a gradient if a trained layer of the plan ran before, or if another trained module is
    registered before. For layers of the plan, the order of execution counts, because a model may register its
    head first. Where parameters are frozen, a layer beside the first trained one may have the same input. If
    that input needs no gradient, grad_input ran in neither: k_proj beside q_proj, if all before is frozen.
    """
    layers = {layer.name: layer for layer in plan.layers}
    ran: dict[int, int] = {}
    for number, gemm in executed:
        if gemm == 0:
            ran.setdefault(number, len(ran))
    other_before, layer_before = False, False
    trained, input_needed = dict[str, bool](), dict[str, bool]()
    for name, module in model.named_modules():
        if name in layers:
            # A layer whose output is high was not counted, so its order of execution is unknown. Use the
            # order of registration.
            input_needed[name] = other_before or (layer_before and layers[name].number not in ran)
            # The module may be no LowPrecisionLinear any more; the counts then show the fault.
            trained[name] = module.get_parameter("weight").requires_grad
            layer_before = layer_before or trained[name]
        elif any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
            other_before = True
    running = {name: ran[layer.number] for name, layer in layers.items() if layer.number in ran}
    first = min((name for name in running if trained[name]), key=lambda name: running[name], default=None)
    has_frozen = not all(parameter.requires_grad for parameter in model.parameters())
    for name, order in running.items():
        if first is not None and order > running[first]:
            start, layer = layers[first], layers[name]
            may_share_input = (
                has_frozen
                and executed[start.number or 0, GEMMS.index("grad_input")] == 0
                and layer.in_features == start.in_features
                and name.rpartition(".")[0] == first.rpartition(".")[0]
            )
            input_needed[name] = input_needed[name] or not may_share_input
    return {name: (input_needed[name], trained[name]) for name in layers}


def _gather_fault(model: nn.Module | None, layer: LayerPlan, weight: Tensor) -> list[str]:
    """One message if the layer's weight was not gathered as planned (on one rank: not copied so), else none.
    model: None: was freed.
    """
    found = None if layer.number is None else gathered_bytes(layer.number)
    is_copied = has_compute_weight(model, weight)
    if layer.spec is None or not (is_copied or isinstance(weight, DTensor)):
        return []
    is_gathered = is_copied or _is_sharded(model, weight)
    if layer.spec.gathers_low and not is_master(weight) and found is None and is_gathered:
        return [
            f"layer {layer.name}: its weight was to be gathered in 8 bits, and comes in compute "
            "dtype; call linear.gather_in_8_bits(model, compute_dtype) after convert() and before "
            "fully_shard, or set precision.all_gather=high"
        ]
    if found is None:
        return []
    wanted = planned_bytes(weight, layer.spec)
    if found == wanted:
        return []
    came = f"took {found}" if found else "came in high precision"
    return [f"layer {layer.name}: its weight was to be gathered in 8 bits, {wanted} bytes, and {came}"]


def _is_sharded(model: nn.Module | None, weight: Tensor) -> bool:
    """Whether FSDP shards `weight`. A weight that only tensor parallelism cut is a DTensor too."""
    modules: list[Any] = [each for each in model.modules() if isinstance(each, FSDPModule)] if model else []
    return any(parameter is weight for module in modules for parameter in module.parameters())


def _faults(
    layer: LayerPlan, counts: dict[str, int], recomputed: int, num_passes: int, trained: tuple[bool, bool]
) -> Iterator[str]:
    low = [gemm for gemm in GEMMS if layer.spec and layer.spec.is_low(gemm)]
    # The counts of backward come first, because a layer may also run forward without backward.
    calls = max(counts["grad_input"], counts["grad_weight"]) or counts["output"] or num_passes
    input_trained, weight_trained = trained
    allowed: dict[str, tuple[int, ...]] = {
        "output": (calls,),
        # Even if no trained parameter comes before the layer, the caller may want the gradient of the input.
        "grad_input": (calls,) if input_trained else (0, calls),
        "grad_weight": (calls,) if weight_trained else (0,),
    }
    for gemm, count in counts.items():
        wanted = allowed[gemm] if gemm in low else (0,)
        if count not in wanted:
            times = " or ".join(str(n) for n in wanted)
            yield f"layer {layer.name}: {gemm} was to run {times} times in low precision, ran {count} times"
        elif count % num_passes:
            yield (
                f"layer {layer.name}: {gemm} was to run equally often in each of {num_passes} passes, and "
                f"ran {count} times in all (is num_passes right?)"
            )
    if recomputed % num_passes or (recomputed and "output" not in low):
        wanted_again = f"a multiple of {num_passes}" if "output" in low else "0"
        yield (
            f"layer {layer.name}: recomputation of output was to run {wanted_again} times in low precision, "
            f"ran {recomputed} times"
        )


# --- Bytes of the gathers of FSDP.


def planned_gathers(model: nn.Module, compute_dtype: torch.dtype) -> dict[str, tuple[int, int]]:
    """FSDP module -> (bytes of its all-gather, bytes of 8-bit weights among them).

    model: not gathered (`distributed.reshard`), else parameters that FSDP left gathered would be missed.
    """
    # Does not look at the weight: a weight that is no longer wrapped is a fault to report.
    in_8_bits = {
        id(layer.weight): layer.spec
        for layer in model.modules()
        if isinstance(layer, LowPrecisionLinear)
        and (layer.spec.kind.keys.stores_low or gathered_bytes(layer.number) is not None)
    }
    planned = dict[str, tuple[int, int]]()
    for group in fsdp_groups(model):
        dtype = torch.float32 if group.in_float32 else compute_dtype
        low = other = 0
        for parameter in group.parameters:
            if not isinstance(parameter, DTensor):
                continue
            if num_gathering_ranks(parameter) == 1 < parameter.device_mesh.size():
                continue  # experts that no other rank has: nothing is exchanged
            if id(parameter) in in_8_bits:
                low += planned_bytes(parameter, in_8_bits[id(parameter)])
            else:
                other += padded_numel(parameter) * dtype.itemsize
        if low + other:
            planned[group.name] = (low + other, low)
    return planned


def verify_gathers(
    planned: Mapping[str, tuple[int, int]], ran: Mapping[tuple[str, int], int], num_ranks: int
) -> None:
    """Raises PrecisionNotAppliedError for a gather that no module plans, and on several ranks for a module
    whose gather did not run; if any is planned in 8 bits.

    planned: of `planned_gathers`. ran: (dtype, bytes of one all-gather over FSDP's axis) -> number of calls.
    num_ranks: on that axis.
    """
    if not any(low for _, low in planned.values()):
        return
    groups, calls = Counter(size for size, _ in planned.values()), Counter[int]()
    for (_, num_bytes), count in ran.items():
        calls[num_bytes] += count
    others = [
        f"{dtype}, {num_bytes:,} bytes, {count} times"
        for (dtype, num_bytes), count in ran.items()
        if num_bytes not in groups
    ]
    if others:
        wanted = "; ".join(
            f"{count} modules of {size:,} bytes, of which {calls[size]} gathers ran"
            for size, count in sorted(groups.items())
        )
        raise PrecisionNotAppliedError(
            f"the step did not gather as planned: no module's weights take an all-gather in "
            f"{'; or in '.join(others[:5])}; planned: {wanted}"
        )
    missing = [name for name, (size, low) in planned.items() if low and not calls[size]]
    if missing and num_ranks > 1:  # on one rank FSDP gathers without a collective
        raise PrecisionNotAppliedError(
            "the step did not gather as planned: no all-gather ran of the size of "
            f"{missing[0] or 'the model'}"
        )


def verify_reductions(model: nn.Module, before: Mapping[str, int], num_float32: int, num_ranks: int) -> None:
    """Raises PrecisionNotAppliedError unless every trained group that reduces in parallel.reduce_dtype did so
    since `before`, of `num_narrow_reductions`, and no other one reduced.

    num_float32: the reduce-scatters over FSDP's axis since then. num_ranks: on that axis. On one rank FSDP
    reduces nothing.
    """
    after = num_narrow_reductions(model)
    if not after or num_ranks == 1:
        return
    groups = [group for group in fsdp_groups(model) if any(p.requires_grad for p in group.parameters)]
    narrow = [group.name for group in groups if group.name in after and not group.in_float32]
    missing = [name for name in narrow if after[name] == before[name]]
    if missing or (num_float32 and not any(group.in_float32 for group in groups)):
        raise PrecisionNotAppliedError(
            f"the step did not reduce gradients as planned: {num_float32} reduce-scatters ran, and "
            f"{len(narrow) - len(missing)} of {len(narrow)} groups reduced in parallel.reduce_dtype"
            + (f"; {missing[0] or 'the model'} did not" if missing else "")
        )


def verify_token_gathers(model: nn.Module, num_gathers: int) -> None:
    """Raises PrecisionNotAppliedError unless all modules with 8-bit gathers of their input made equally many
    of the `num_gathers`.
    """
    hows = {name: getattr(module, "token_gather", "none") for name, module in model.named_modules()}
    modules = [name for name, how in hows.items() if how not in ("none", "high")]
    if modules and (num_gathers == 0 or num_gathers % len(modules)):
        raise PrecisionNotAppliedError(
            f"the step gathered activations in 8 bits {num_gathers} times, where {len(modules)} modules "
            f"should gather their input equally often ({modules[0]}, …)"
        )


def verify_exchanges(models: Collection[nn.Module], num_sent: int) -> None:
    """Raises PrecisionNotAppliedError unless the mixtures whose first layer takes 8-bit rows from other ranks
    (distributed/expert_parallel.py), and no others, were sent them, `num_sent` times in all; those of one
    model equally often.
    """
    firsts = [  # a teacher has modules of the same names
        (name, next(each for each in module.modules() if num_groups(each)))
        for model in models
        for name, module in model.named_modules()
        if hasattr(module, "exchange")
    ]
    mixtures = [
        name
        for name, layer in firsts
        if isinstance(layer, LowPrecisionLinear) and layer.spec.token_gather != "high"
    ]
    uneven = len(models) == 1 and mixtures and num_sent % len(mixtures)
    if bool(mixtures) != bool(num_sent) or uneven:
        raise PrecisionNotAppliedError(
            f"the step sent tokens to experts in 8 bits {num_sent} times, where {len(mixtures)} mixtures "
            f"should get theirs so, equally often ({mixtures[0] if mixtures else 'none'}, …)"
        )
