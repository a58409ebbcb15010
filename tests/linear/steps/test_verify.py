"""A fall-back to compute dtype cannot go unnoticed: it is planted in one GEMM of one layer, and named."""

import contextlib
import copy
import dataclasses
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lptune import linear
from lptune.config import PRECISION_KINDS, PrecisionConfig
from lptune.kernels import record_gemms
from lptune.kernels.record import note
from tests.helpers.slow import slow_but

INT8 = PrecisionConfig(kind="int8_rowcol")
KINDS = [kind for kind in PRECISION_KINDS if kind != "none"]
# Kinds that multiply in compute dtype have no switch to plant one with: one op in forward and backward.
SWITCHABLE = [kind for kind in KINDS if "high" in PRECISION_KINDS[kind].output]
PLANTED = [(kind, gemm) for kind in SWITCHABLE for gemm in PrecisionConfig(kind=kind).low_gemms()]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    # All tests compile the forward of one class: its eighth graph would be the last.
    torch._dynamo.reset()


def _model(width: int = 48) -> nn.Sequential:
    torch.manual_seed(0)
    ends = nn.Linear(32, width), nn.SiLU(), nn.Linear(width, 32)
    return nn.Sequential(*ends, nn.SiLU(), nn.Linear(32, 16))


def _step(model: nn.Module, num_passes: int = 2, scaling: linear.DelayedScaling | None = None) -> None:
    with scaling.step() if scaling else contextlib.nullcontext():
        for _ in range(num_passes):
            model(torch.randn(24, 32, requires_grad=True)).square().sum().backward()


def _convert(model: nn.Module, kind: str) -> linear.Plan:
    # Float8 has no GEMM on a CPU: emulated there.
    plan = linear.convert(model, PrecisionConfig(kind=kind, emulate=not kind.startswith("int")))
    linear.StochasticRounding(model, plan, seed=0).start(0, 0)
    return plan


def _plant(model: Any, name: str, **gemms: str) -> None:
    layer = model.get_submodule(name)
    layer.spec = layer.spec._replace(**gemms)


def _bypass(layer: Any) -> None:
    layer.forward = lambda x: nn.functional.linear(x, layer.weight, layer.bias)


@contextlib.contextmanager
def _fault(
    model: nn.Module, plan: linear.Plan, num_passes: int, message: str
) -> Iterator[pytest.ExceptionInfo[linear.PrecisionNotAppliedError]]:
    """Within it, a step of so many passes does not run as planned, and `message` says so."""
    with (
        pytest.raises(linear.PrecisionNotAppliedError, match=message) as raised,
        linear.verify_step(model, plan, num_passes),
    ):
        yield raised


# Compiled, every kind is counted in test_devices.py.
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_ran_as_planned_is_counted(kind: str) -> None:
    model = _model(width=64)
    plan = _convert(model, kind)
    scaling = linear.DelayedScaling(plan, torch.device("cpu"))
    with linear.verify_step(model, plan, 2) as verified:
        _step(model, scaling=scaling)
    low = PrecisionConfig(kind=kind).low_gemms()
    assert (verified.num_gemms, verified.num_recomputed) == (len(low) * 3 * 2, 0)
    # The first layer's grad_input is no need of training: no part of the fraction.
    sizes = (32 * 64, 64 * 32, 32 * 16)
    flops = {"output": sum(sizes), "grad_input": sum(sizes[1:]), "grad_weight": sum(sizes)}
    low_flops = sum(flops[gemm] for gemm in low)
    if not linear.KINDS[kind].operations:  # it multiplies in compute dtype
        low_flops = 0
    assert verified.low_precision_flops_fraction == pytest.approx(low_flops / sum(flops.values()))


@pytest.mark.parametrize(("kind", "gemm"), PLANTED)
def test_a_planted_fall_back_in_one_gemm_is_named(kind: str, gemm: str) -> None:
    model = _model()
    plan = _convert(model, kind)
    scaling = linear.DelayedScaling(plan, torch.device("cpu"))
    _plant(model, "2", **{gemm: "high"})
    with _fault(model, plan, 2, f"layer 2: {gemm} was to run 2 times .* ran 0 times") as raised:
        _step(model, scaling=scaling)
    assert str(raised.value).count("layer") == 1


# One compilation for a kind: each of its GEMMs falls back in a layer of its own (`output` in the last: what
# ran before a layer is read off the outputs).
@pytest.mark.parametrize("kind", slow_but(lambda kind: kind == "int8_rowcol", SWITCHABLE))
def test_compiled_each_planted_fall_back_is_named_with_its_layer(kind: str) -> None:
    model = _model()
    plan = _convert(model, kind)
    scaling = linear.DelayedScaling(plan, torch.device("cpu"))
    planted = list(zip(("4", "2", "0"), PrecisionConfig(kind=kind).low_gemms(), strict=False))
    for name, gemm in planted:
        _plant(model, name, **{gemm: "high"})
    with _fault(model, plan, 2, "did not run as planned") as raised:
        _step(torch.compile(model, fullgraph=True), scaling=scaling)
    message = str(raised.value)
    assert message.count("layer") == len(planted)
    for name, gemm in planted:
        assert f"layer {name}: {gemm} was to run 2 times in low precision, ran 0 times" in message


def test_a_fall_back_of_grad_input_is_seen_where_all_outputs_are_high() -> None:
    model = _model()
    plan = linear.convert(model, dataclasses.replace(INT8, output="high"))
    with linear.verify_step(model, plan, 2):
        _step(model)
    _plant(model, "2", grad_input="high")
    with _fault(model, plan, 2, "layer 2: grad_input was to run 2 times"):
        _step(model)


def test_low_precision_where_high_was_planned_is_named() -> None:
    model = _model()
    plan = linear.convert(model, dataclasses.replace(INT8, grad_weight="high"))
    _plant(model, "0", grad_weight="column")
    with _fault(model, plan, 2, "layer 0: grad_weight was to run 0 times"):
        _step(model)


def test_recomputed_outputs_are_counted_apart() -> None:
    model = _model()
    plan = linear.convert(model, INT8)
    with linear.verify_step(model, plan, 1) as verified:
        checkpoint(model, torch.randn(8, 32, requires_grad=True), use_reentrant=False).sum().backward()
    assert (verified.num_gemms, verified.num_recomputed) == (3 * 4, 3)


def test_a_fall_back_in_forward_is_seen_through_a_recomputation_in_low() -> None:
    # Counted together, one output in low and one in high would look like a step without checkpointing.
    model = _model()
    plan = linear.convert(model, INT8)
    low = model[2].spec
    with _fault(model, plan, 1, r"layer 2: output was to run 1 times .* ran 0"):
        _plant(model, "2", output="high")
        out = checkpoint(model, torch.randn(8, 32, requires_grad=True), use_reentrant=False)
        model[2].spec = low
        out.sum().backward()


def test_a_head_registered_before_the_body_is_understood() -> None:
    class HeadFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.body = nn.Linear(32, 16), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x))

    model = HeadFirst()
    plan = linear.convert(model, INT8)
    with linear.verify_step(model, plan, 1):
        model(torch.randn(4, 32)).sum().backward()
    _plant(model, "head", grad_input="high")
    with _fault(model, plan, 1, "layer head: grad_input"):
        model(torch.randn(4, 32)).sum().backward()


def _update(model: nn.Module, num_passes: int = 1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model(torch.randn(24, 32))  # an evaluation before is none of it
    _step(model, num_passes)
    optimizer.step()


def test_a_loop_that_knows_of_no_verification_is_stopped_before_its_first_update() -> None:
    model = _model()
    linear.convert(model, INT8)
    _bypass(model[4])
    before = model[4].weight.clone()
    for _ in range(2):  # whoever catches it is told again
        with pytest.raises(linear.PrecisionNotAppliedError, match=r"layer 4: .* was to run .* ran 0 times"):
            _update(model)
    assert torch.equal(model[4].weight, before)


@pytest.mark.parametrize("gemm", ["output", "grad_weight"])
def test_it_names_the_gemm_that_fell_back(gemm: str) -> None:
    model = _model()
    linear.convert(model, INT8)
    _plant(model, "2", **{gemm: "high"})
    with pytest.raises(linear.PrecisionNotAppliedError, match=f"layer 2: {gemm} was to run") as raised:
        _update(model, num_passes=3)
    assert str(raised.value).count("layer ") == 1


def test_it_verifies_once_and_can_be_switched_off() -> None:
    from lptune.linear.verify import _watched

    gc.collect()  # models of earlier tests may wait for the collector with their watchers
    for precision in (INT8, dataclasses.replace(INT8, verify=False)):
        model = _model()
        before = len(_watched)
        linear.convert(model, precision)
        assert len(_watched) == before + precision.verify
        if not precision.verify:
            _plant(model, "4", output="high")
        _update(model, num_passes=2)
        assert len(_watched) == before


def test_a_layer_is_verified_when_it_first_takes_part() -> None:
    model = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])
    linear.convert(model, INT8)
    _plant(model, "1", grad_weight="high")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0](torch.randn(8, 32)).sum().backward()
    optimizer.step()
    model[1](torch.randn(8, 32)).sum().backward()
    with pytest.raises(linear.PrecisionNotAppliedError, match="layer 1: grad_weight was to run"):
        optimizer.step()


def test_making_optimizer_state_before_the_first_forward_is_no_fall_back() -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = _model()
    linear.convert(model, INT8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    get_optimizer_state_dict(model, optimizer)  # steps with zero gradients
    _bypass(model[2])
    _step(model, 1)
    with pytest.raises(linear.PrecisionNotAppliedError, match="layer 2: output"):
        optimizer.step()


@pytest.mark.parametrize("wrapped", ["checkpointed", "compiled", "taken out of its container"])
def test_a_layer_is_verified_whatever_holds_it_since(wrapped: str) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model: nn.Module = _model()
    linear.convert(nn.ModuleList([model]) if wrapped.startswith("taken") else model, INT8)
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    if wrapped == "checkpointed":
        model = nn.Sequential(*(checkpoint_wrapper(layer) for layer in layers[:2]))
    elif wrapped == "compiled":
        model = nn.Sequential(*(torch.compile(layer, backend="eager") for layer in layers[:2]))
    for layer in layers:
        _bypass(layer)
    with pytest.raises(linear.PrecisionNotAppliedError, match="output was to run in low precision, ran 0 t"):
        _update(model)


def test_what_a_copy_of_the_model_runs_does_not_hide_a_fall_back_of_the_original() -> None:
    model = _model()
    plan = linear.convert(model, INT8)
    copied = copy.deepcopy(model)
    _bypass(model[2])
    with linear.verify_step(copied, plan, 1):  # the plan is the copy's, too
        _step(copied, 1)
    with pytest.raises(linear.PrecisionNotAppliedError, match="layer 2: output was to run"):
        _update(model)


def test_a_layer_that_became_plain_is_named() -> None:
    model = _model()
    plan = linear.convert(model, INT8)
    _bypass(model[4])
    with _fault(model, plan, 2, "layer 4: output"):
        _step(model)


def test_a_fall_back_in_one_of_two_passes_is_named() -> None:
    model = _model()
    plan = linear.convert(model, INT8)

    with _fault(model, plan, 2, "layer 0: output"):
        _step(model, 1)
        linear.unconvert(model)
        _step(model, 1)


def test_a_recomputation_in_one_of_two_passes_is_named() -> None:
    model = _model()
    plan = linear.convert(model, INT8)

    with _fault(model, plan, 2, r"layer 0: recomputation of output .* ran 1 times"):
        checkpoint(model, torch.randn(8, 32, requires_grad=True), use_reentrant=False).sum().backward()
        _step(model, 1)


def test_another_model_does_not_hide_a_fall_back() -> None:
    policy, reference = _model(), _model()
    plan = linear.convert(policy, INT8)
    linear.convert(reference, INT8)
    _plant(policy, "0", output="high")

    with _fault(policy, plan, 1, "layer 0: output"):
        reference(torch.randn(24, 32))
        _step(policy, 1)


def test_a_model_freed_while_a_gemm_is_counted_hides_no_count() -> None:
    # The garbage collector may run in any line, and it ends the recording of a model that never trained.
    with contextlib.ExitStack() as of_a_freed_model:
        of_a_freed_model.enter_context(record_gemms())

        class Handle:
            def __getitem__(self, _: int) -> int:
                of_a_freed_model.close()
                return 7

        with record_gemms() as executed:
            note(Handle(), 0)  # type: ignore[arg-type]
            note(Handle(), 1)  # type: ignore[arg-type]
    assert executed == {(7, 0): 1, (7, 1): 1}


def test_frozen_layers_need_no_grad_weight() -> None:
    model = _model()
    plan = linear.convert(model, INT8)
    model[2].weight.requires_grad_(False)
    with linear.verify_step(model, plan, 2) as verified:
        _step(model)
    assert verified.num_gemms == (3 * 3 - 1) * 2
    assert verified.low_precision_flops_fraction == 1.0  # of the FLOPs that the step has


def test_the_fraction_counts_what_stayed_high() -> None:
    model = _model()
    plan = linear.convert(model, dataclasses.replace(INT8, grad_weight="high"), skip=["4"])
    with linear.verify_step(model, plan, 2) as verified:
        _step(model)
    # The first layer's grad_input is no need of training: nothing trained stands before it.
    low, all_ = 32 * 48 + 2 * 48 * 32, 2 * 32 * 48 + 3 * (48 * 32 + 32 * 16)
    assert verified.low_precision_flops_fraction == pytest.approx(low / all_)


def test_it_leaves_other_hooks_of_an_optimizer_alone() -> None:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    model, called = _model(), list[str]()
    linear.convert(model, INT8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: called.append("own"))
    handle = register_optimizer_step_pre_hook(lambda *_: called.append("global"))
    try:
        _step(model, 1)
        optimizer.step()
    finally:
        handle.remove()
    assert sorted(called) == ["global", "own"]


def test_a_model_that_fails_does_not_stop_the_updates_of_another() -> None:
    broken, sound = _model(), _model()
    for model in (broken, sound):
        linear.convert(model, INT8)
    _plant(broken, "2", output="high")
    _step(broken, 1)
    _update(sound)


def test_inputs_that_need_a_gradient_in_some_calls_only_are_no_fall_back() -> None:
    layer = nn.Linear(32, 32)
    linear.convert(layer, INT8)
    h = torch.zeros(8, 32)
    for _ in range(3):  # a recurrent layer: the first state needs no gradient
        h = layer(h).tanh()
    h.sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()


def test_a_number_of_passes_that_does_not_divide_is_no_contradiction() -> None:
    model = _model()
    plan = linear.convert(model, INT8)
    with _fault(model, plan, 2, "equally often in each of 2 passes, and ran 3"):
        _step(model, 3)
