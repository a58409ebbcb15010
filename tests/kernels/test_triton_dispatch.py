"""The ops `lptune::*` and whole layers on the Triton backend: same bits as on the reference.

In the interpreter a CPU is given the GPU's backends and its K-major layouts, so that the strides are those
that a GPU would see.
"""

import dataclasses
import importlib
import itertools
import os
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from lptune import kernels, linear, numerics
from lptune.config import PrecisionConfig
from lptune.kernels import GEMMS, backend, layer_handle, record_gemms, scaled_mm
from tests.helpers.triton_device import DEVICE, INTERPRETED, poisoned_outputs, same_bits, some_interpreted
from tests.proofs import noise

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
assert poisoned_outputs


@pytest.fixture(autouse=True)
def run_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sends every operation to one backend: to Triton, until the test says otherwise."""

    def choose(name: str) -> None:
        for choices in backend.BACKENDS.values():
            monkeypatch.setitem(choices, DEVICE.type, (name,))
        backend.choose_backend.cache_clear()

    if INTERPRETED:
        for family in (linear.kinds.rowwise, linear.kinds.tensorwise, linear.kinds.blockwise):
            monkeypatch.setattr(family, "k_major", lambda device: True)
    choose("triton")
    yield choose
    backend.choose_backend.cache_clear()


def _matrix(m: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m * k)).to(dtype).to(DEVICE)


def test_the_quantizers_have_the_strides_and_dtypes_that_compiled_graphs_expect() -> None:
    x, row, column = _matrix(20, 36), torch.rand(1, 36, device=DEVICE), torch.rand(20, 1, device=DEVICE)
    ops, keyed = torch.ops.lptune, layer_handle(-1)
    keyed[kernels.KEY] = 5
    step = int(os.environ.get("ONE_CASE_IN", "1"))  # an op in the interpreter takes half a second
    for transposed in (False, True):
        calls = (
            (ops.quantize_rows, (x, "int8", row, False, transposed)),
            (ops.quantize_rows, (x, "int8", None, False, transposed, torch.bfloat16, True)),
            (ops.rotate, (x, torch.float32)),
            (ops.quantize_packed_rows, (x, 23, "e4m3", transposed, torch.float32)),
            (ops.quantize_columns, (x, "e4m3", column, True, transposed)),
            (ops.quantize_rows_and_columns, (x, "int8", row, False, transposed)),
            (ops.quantize_tensor, (x, "e5m2", False, transposed)),
            (ops.quantize_tensor_both_ways, (x, "e5m2")),
            (ops.quantize_blocks, (x, (1, 128), "e4m3", False, transposed)),
            (ops.quantize_by_amax, (x, torch.rand(2, 3, device=DEVICE), "e4m3", transposed, 16, 4)),
            (ops.quantize_blocks, (x, (32, 1), "e4m3", True, transposed)),
            (ops.quantize_row_and_column_blocks, (x, 128, "e4m3", False, transposed)),
            (ops.quantize_row_and_column_blocks, (x, 32, "e4m3", True, transposed)),
            (ops.quantize_by_amax, (x, row[:, :1], "e4m3", False, None, 0, torch.bfloat16)),
            (ops.block_amaxes, (x, 16, 3)),
            (ops.quantize_delayed, (x, "e4m3", layer_handle(-1), "x", transposed)),
            (ops.quantize_delayed_both_ways, (x, "e4m3", layer_handle(-1), "x")),
            *(
                (ops.quantize_stochastic, (x, None, "int8", False, dim, keyed, transposed))
                for dim in range(3)
            ),
            (ops.quantize_tensor_stochastic_both_ways, (x, "e5m2", keyed)),
            (ops.quantize_weight_rows, (x.float(), 5, 0)),
            (ops.round_to_bfloat16, (x.float().contiguous(), 5, 0)),
        )
        for call in calls[transposed % step :: step]:
            torch.library.opcheck(call[0].default, call[1], test_utils=("test_schema", "test_faketensor"))


def test_packed_rows_have_the_bits_of_the_reference() -> None:
    x = _matrix(7, 36, torch.float32)
    for rows, num_rows in ((x, 9), (x[:0], 2), (x.t()[:, :4], 36)):
        buffer = kernels.quantize_packed_rows(rows, num_rows, "int8", rounded_to=torch.bfloat16)
        expected = numerics.quantize_rows(rows.cpu().bfloat16())
        assert same_bits(buffer, kernels.pack_rows(expected, num_rows))


def test_a_contraction_beyond_int32_is_split_and_its_parts_scaled_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    k, generator = 1000, torch.Generator().manual_seed(0)
    # The real limit is a thousand steps of the interpreter away (tests/kernels/test_scaled_mm.py has it).
    monkeypatch.setattr(importlib.import_module("lptune.kernels.scaled_mm"), "_LONGEST_CONTRACTION", 384)
    a = torch.randint(-127, 128, (5, k), dtype=torch.int8, generator=generator)
    b = torch.randint(-127, 128, (k, 3), dtype=torch.int8, generator=generator)
    scale = torch.rand(5, 1, generator=generator)
    with record_gemms() as executed:
        out = scaled_mm(a.to(DEVICE), b.to(DEVICE), scale.to(DEVICE), None, torch.float32, layer_handle(3), 2)
    # 127 * 127 * 1000 < 2**24: every partial sum is exact in float32.
    assert same_bits(out, (a.double() @ b.double()).float() * scale)
    assert executed == {(3, 2): 1}


def _layer_on(name: str, precision: PrecisionConfig, run_on: Callable[[str], None]) -> dict[str, Tensor]:
    """What one layer gives on a backend, forward and backward."""
    run_on(name)
    generator = torch.Generator().manual_seed(0)
    x, g = torch.randn(40, 160, generator=generator), torch.randn(40, 80, generator=generator) * 1e-3
    # float32: the interpreter does not round to bfloat16.
    model = nn.Sequential(nn.Linear(160, 80, bias=False))
    with torch.no_grad():
        model[0].weight.normal_(std=0.1, generator=generator)
    # A device without such a GEMM must be asked for the reference by name.
    precision = dataclasses.replace(precision, emulate=name == "reference")
    plan = linear.convert(model.to(DEVICE), precision)
    x = x.to(DEVICE).requires_grad_()
    linear.StochasticRounding(model, plan, seed=0).start(0, 1)
    with linear.DelayedScaling(plan, DEVICE).step(), record_gemms() as executed:
        out = model(x)
        out.backward(g.to(DEVICE))
    assert sum(executed.values()) == len(GEMMS)
    assert x.grad is not None
    assert model[0].weight.grad is not None
    return {"output": out.detach(), "grad_input": x.grad, "grad_weight": model[0].weight.grad}


@pytest.mark.parametrize(
    ("grad_input", "grad_weight"),
    some_interpreted(
        list(itertools.product(("folded", "requantized"), ("column", "folded"))),
        [("folded", "column"), ("requantized", "folded")],  # each GEMM's operands have one origin
    ),
)
def test_an_int8_layer_equals_the_reference_bitwise(
    grad_input: str, grad_weight: str, run_on: Callable[[str], None]
) -> None:
    precision = PrecisionConfig(
        kind="int8_rowcol",
        grad_input=grad_input,  # type: ignore[arg-type]
        grad_weight=grad_weight,  # type: ignore[arg-type]
    )
    ours, reference = (_layer_on(name, precision, run_on) for name in ("triton", "reference"))
    for name in ours:
        assert same_bits(ours[name], reference[name]), name


@pytest.mark.parametrize(
    ("kind", "stochastic"),
    [("int8_rowcol", True), ("int8_tensorwise", True), ("int8_rotated", False), ("int8_rotated", True)],
)
def test_another_int8_layer_equals_the_reference_bitwise(
    kind: str, stochastic: bool, run_on: Callable[[str], None]
) -> None:
    precision = PrecisionConfig(kind=kind, stochastic_rounding=stochastic)  # type: ignore[arg-type]
    ours, reference = (_layer_on(name, precision, run_on) for name in ("triton", "reference"))
    for name in ours:
        assert same_bits(ours[name], reference[name]), name


@pytest.mark.skipif(
    not INTERPRETED and torch.cuda.get_device_capability() < (8, 9), reason="no float8 before Ada"
)
@pytest.mark.parametrize(
    "kind", ["float8_tensorwise", "float8_delayed", "float8_rowwise", "float8_blockwise", "mxfp8"]
)
def test_a_float8_layer_has_the_same_operands_and_differs_by_the_sum_alone(
    kind: str, run_on: Callable[[str], None]
) -> None:
    precision = PrecisionConfig(kind=kind)  # type: ignore[arg-type]
    ours, reference = (_layer_on(name, precision, run_on) for name in ("triton", "reference"))
    for name in ours:
        # A different operand is worth 2**-5. Equal ones leave the rounding of two sums of up to 160 products,
        # each step of which costs less than 2**-24 of the sum so far; in Hopper's tensor core each of a
        # chunk's 4 * 33 additions costs less than 2**-13 of its largest addend (test_triton_gemm.py).
        limit = 160 * 2.0**-23 if INTERPRETED else 4 * 33 * 2.0**-13
        error = noise.relative_error(ours[name].cpu(), reference[name].cpu())
        assert error < limit, f"{name}: {error} is not below {limit}"
