"""`convert(model, precision)` turns nn.Linear into LowPrecisionLinear and reports what it did to each layer.

No layer is skipped silently: the plan gives a reason for each layer that stays in compute dtype. A conversion
that changes no layer is an error, because that run would train in compute dtype under a low-precision name.
"""

import fnmatch
import math
from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from lptune.base.errors import UserError, closest, no_8_bit_gemm_error
from lptune.config import PRECISION_KINDS, PrecisionConfig
from lptune.hardware.planned import planned
from lptune.kernels import choose_backend, requested_backend
from lptune.linear.crossover import measurements, published_as_small
from lptune.linear.dtensors import ALIGNMENT
from lptune.linear.instance_forward import has_own_forward, redirect
from lptune.linear.kind import Kind, LinearSpec
from lptune.linear.module import LowPrecisionLinear, num_groups
from lptune.linear.plan import LayerPlan, OtherWeight, Plan
from lptune.linear.verify import verify_first_update
from lptune.linear.weights.compute_weights import is_parallelized


def convert(
    model: nn.Module,
    precision: PrecisionConfig | str,
    *,
    skip: Iterable[str] = (),
    device: torch.device | None = None,
    num_tokens: int | None = None,
) -> Plan:
    """Turns each `nn.Linear` of `model` that `precision` selects into a LowPrecisionLinear; returns the plan.

    Works on any module tree, including `model` itself, on any device including meta, before or after weights
    are loaded. Call it before `fully_shard` and before compiling. Modules and parameters stay the same
    objects with the same names and hooks (for int8_weight_only, parameters become Int8Weights in place). A
    subclass of nn.Linear may have another forward; it is not converted, and the plan says so. It also lists
    the weights outside nn.Linear, such as the experts of a mixture in one parameter, which stay high.

    precision: a PrecisionConfig, or a kind: `"int8_rowcol"` means PrecisionConfig(kind="int8_rowcol"). skip:
    names or globs in addition to `precision.skip`. A pattern matches a full name or its last components
    (`lm_head`, `layers.0.*`, `*.o_proj`). device: where the model will run, if that is not where it is now.
    num_tokens: rows of x in one forward (batch * sequence), needed for `precision.skip_small`.

    The GEMMs and the gather of each converted layer are compared with the plan before the first step of any
    torch optimizer for which the layer has a gradient; PrecisionNotAppliedError is raised if they differ
    (verify.py). `precision.verify=False` switches this off.

    Raises UserError: for a pattern that matches no layer; if no layer would be converted; if the device has
    no 8-bit GEMM for the kind; if skip_small has no measurement; for an unknown LPTUNE_KERNELS; for a layer
    whose instance attribute `forward` would hide the converted forward; and after `fully_shard`.
    """
    if isinstance(precision, str):
        precision = PrecisionConfig(kind=precision)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if any(isinstance(module, LowPrecisionLinear) for module in model.modules()):
        raise UserError("this model was converted before; call unconvert() first")
    if not precision.is_none and is_parallelized(model):
        raise UserError(
            "convert() comes before fully_shard and parallelize(); this model has been through one"
        )
    if precision.is_none:
        plans = [
            LayerPlan(
                name,
                m.in_features,
                m.out_features,
                None,
                is_frozen=not m.weight.requires_grad,
                num_groups=num_groups(m),
                share_used=_share_used(model, m),
            )
            for name, m in linears.items()
        ]
        return Plan(precision.kind, tuple(plans), _frozen(model), _others(model, is_none=True))

    requested_backend()
    patterns = [*precision.skip, *skip]
    _check_patterns(patterns, linears)
    device = device or _device(model)
    spec = _for_device(LinearSpec.from_config(precision), device)
    small = _small_layers(spec, device, num_tokens) if precision.skip_small else None
    owners = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    # The head of a Backbone has the name lm_head, too, whatever it is called.
    head = getattr(model, "head", None) if hasattr(model, "facts") else None
    names = {name: (name, "lm_head") if module is head else (name,) for name, module in linears.items()}
    reasons = {
        name: _reason_to_skip(names[name], module, patterns, owners[id(module.weight)] > 1, spec.kind)
        for name, module in linears.items()
    }
    for name, module in linears.items():
        if reasons[name] is None and num_groups(module):
            reasons[name] = spec.kind.why_not_grouped(spec)
        if reasons[name] is None and small is not None and num_tokens is not None:
            reasons[name] = small(num_tokens, module.in_features, module.out_features)
        if reasons[name] is None and has_own_forward(module) and not redirect(module, dry_run=True):
            raise UserError(
                f"layer {name}: its instance attribute forward ({module.forward!r}) hides the forward of its "
                "class, and keeps no nn.Linear.forward that could be replaced; call convert() before it is "
                "set, or name the layer in precision.skip"
            )
    layers = []
    for name, module in linears.items():
        reason = reasons[name]
        number = LowPrecisionLinear.adopt(module, spec) if reason is None else None
        layers.append(
            LayerPlan(
                name,
                module.in_features,
                module.out_features,
                None if reason else spec,
                all_gather="high" if reason else spec.describe_gather(),
                reason=reason,
                number=number,
                is_frozen=not module.weight.requires_grad,
                num_groups=num_groups(module),
                share_used=_share_used(model, module),
            )
        )
    plan = Plan(precision.kind, tuple(layers), _frozen(model), _others(model))
    if not plan.converted:
        found = [each.reason for each in plan.layers] + [each.reason for each in plan.others]
        why = "; ".join(sorted(set(map(str, found)))) or "the model has no nn.Linear"
        raise UserError(
            f"precision.kind: {precision.kind} would convert no layer ({why}); training would stay in "
            "compute dtype. Change precision.skip or set precision.kind=none"
        )
    if precision.verify:
        verify_first_update(model, plan)
    return plan


def unconvert(model: nn.Module) -> int:
    """Turns converted modules back into plain `nn.Linear`, in place; returns their number. Raises UserError
    after `fully_shard`.
    """
    converted = [module for module in model.modules() if isinstance(module, LowPrecisionLinear)]
    for module in converted:
        module.release()
    return len(converted)


def native_kinds(device: torch.device) -> list[str]:
    """`none` and the kinds whose GEMMs `device` runs without emulation, in the order of PRECISION_KINDS.

    `convert` decides, on a layer of 32 x 32: so this is what a run would do, LPTUNE_KERNELS included.
    """
    return [kind for kind in PRECISION_KINDS if _is_native(kind, device)]


def _is_native(kind: str, device: torch.device) -> bool:
    with torch.device("meta"):
        layer = nn.Sequential(nn.Linear(32, 32, bias=False))
    precision = PrecisionConfig(kind=kind, verify=False)
    try:
        return convert(layer, precision, device=device).backend(device.type) != "emulation"
    except UserError:  # the device has no such GEMM
        return False


def _frozen(model: nn.Module) -> tuple[str, ...]:
    """Names of the parameters that need no gradient."""
    return tuple(name for name, parameter in model.named_parameters() if not parameter.requires_grad)


def _others(model: nn.Module, *, is_none: bool = False) -> tuple[OtherWeight, ...]:
    """The weights that are in no nn.Linear: of a mixture's experts and router, of convolutions, of modules of
    the model's own. Whether a parameter multiplies cannot be seen from outside, so what is known not to is
    left out: embeddings, biases, and what has one row (tokens and positions that are added).

    Of stacked experts (E, …) a token uses as many as the model's config says; without a config, all count.
    """
    num_experts = _num_experts_used(model)
    known = [
        module for module in model.modules() if isinstance(module, (nn.Linear, nn.Embedding, nn.EmbeddingBag))
    ]
    seen = {id(parameter) for module in known for parameter in module.parameters(recurse=False)}
    found = []
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            shape = tuple(parameter.shape)
            if len(shape) < 2 or shape[0] == 1 or name.endswith("bias") or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            has_experts = len(shape) > 2 and not isinstance(module, _ConvNd)
            num_rows = min(shape[0], num_experts) if has_experts else shape[0]
            reason = None if is_none else f"in {type(module).__name__}, not in nn.Linear"
            num_used = int(num_rows) * math.prod(shape[1:])
            found.append(OtherWeight(name, shape, num_used, reason, not parameter.requires_grad))
    return tuple(found)


def _num_experts_used(model: nn.Module) -> float:
    """The number of experts that a token uses, as the model's config says; inf without one."""
    config = getattr(model, "config", None)
    given = [
        getattr(each, name, None)
        for each in (config, getattr(config, "text_config", None))
        for name in ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")
    ]
    return next((each for each in given if isinstance(each, int)), math.inf)


def _share_used(model: nn.Module, module: nn.Module) -> float:
    """The share of a layer's weight that multiplies a token."""
    groups = num_groups(module)
    return min(1.0, _num_experts_used(model) / groups) if groups else 1.0


def _device(model: nn.Module) -> torch.device | None:
    """The device of the model; None if it has no storage (meta) or no parameter."""
    parameter = next(model.parameters(), None)
    return None if parameter is None or parameter.device.type == "meta" else parameter.device


def _for_device(spec: LinearSpec, device: torch.device | None) -> LinearSpec:
    """`spec`, with `emulate` set if the device has no such GEMM and the kind then emulates it.

    Raises UserError if the device has no such GEMM and the kind does not emulate it.
    """
    kind = spec.kind
    if not kind.operations:
        return spec._replace(emulate=False)  # any device runs a GEMM in compute dtype
    if device is not None and device.type == "cuda" and not spec.emulate:
        for operation in (*kind.operations, "quantize"):  # an op that cannot run raises now, not in a step
            choose_backend(operation, device.type)
    if device is None or spec.emulate or choose_backend(kind.operations[0], device.type) != "reference":
        return spec
    if kind.emulated_where_missing or requested_backend() == "reference":
        return spec._replace(emulate=True)
    raise no_8_bit_gemm_error(spec.kind.name, spec.fmt, _name(device))


def _name(device: torch.device) -> str:
    planned_device = planned()
    if planned_device is not None:
        return planned_device.name or device.type
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} here"


def _small_layers(
    spec: LinearSpec, device: torch.device | None, num_tokens: int | None
) -> Callable[[int, int, int], str | None]:
    """The rule of precision.skip_small: (num_tokens, in_features, out_features) -> the reason to keep such a
    layer in compute dtype, or None if 8 bits are faster. Raises UserError if it has nothing to decide by.
    """
    if not spec.multiplies_in_8_bits:
        raise UserError(
            f"precision.skip_small: {spec.kind.name} multiplies in compute dtype, so no layer is faster in "
            "it; set precision.skip_small=false"
        )
    if num_tokens is None:
        raise UserError("precision.skip_small: convert() needs num_tokens, the rows of x in one forward")
    if device is None:
        raise UserError("precision.skip_small: convert() needs the device on which the model will run")
    found = None if spec.emulate else measurements(spec.kind.name, device.type)
    if found is None and (spec.emulate or device.type == "cpu"):
        emulated = "emulated " if spec.emulate else ""
        raise UserError(
            f"precision.skip_small: {emulated}{spec.kind.name} has not been measured on {device.type}; set "
            "precision.skip_small=false and name layers in precision.skip, or run benchmarks/crossover.py"
        )
    one_scale = spec.kind.one_scale

    def reason(num_tokens: int, in_features: int, out_features: int) -> str | None:
        if found is None:
            small = published_as_small(one_scale, in_features, out_features)
            how = f"published H100 thresholds, {spec.kind.name} was not measured on {device.type}"
        else:
            speedup = found.at(num_tokens, in_features, out_features)
            small, how = speedup < 1, f"{speedup:.2f}x of bf16 at {num_tokens} tokens"
        return f"precision.skip_small: {how}" if small else None

    return reason


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"*.{pattern}")


def _check_patterns(patterns: list[str], linears: dict[str, nn.Linear]) -> None:
    for pattern in patterns:
        # The default pattern is lm_head, and not every model has a layer of this name (an encoder has none).
        if pattern not in PrecisionConfig.skip and not any(_matches(name, pattern) for name in linears):
            parts = {part for name in linears for part in (name, name.rpartition(".")[2])}
            raise UserError(f"precision.skip: {pattern!r} matches no linear layer{closest(pattern, parts)}")


def _reason_to_skip(
    names: tuple[str, ...], module: nn.Linear, patterns: list[str], tied: bool, kind: Kind
) -> str | None:
    if type(module) is not nn.Linear and not num_groups(module):
        return f"a subclass of nn.Linear: {type(module).__name__}"
    if tied:
        return "tied to another module's weight"
    for pattern in patterns:
        if any(_matches(name, pattern) for name in names):
            return f"precision.skip: {pattern}"
    if module.in_features % ALIGNMENT or module.out_features // max(1, num_groups(module)) % ALIGNMENT:
        return f"sizes are not multiples of {ALIGNMENT}"
    if module.in_features % kind.weight_group:
        return f"in_features are no multiple of {kind.weight_group}, the columns that share a scale"
    return None
