"""Every backend of every quantizer gives the bits of its twin in lptune.numerics."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lptune import kernels, numerics
from lptune.numerics import FORMATS
from tests.helpers.hard_rows import hard_to_round

pytestmark = pytest.mark.usefixtures("cpu_quantizers")

SHAPES = [(1, 1), (3, 5), (65, 33), (128, 512), (1, 700), (700, 1), (0, 4), (4, 0)]
DTYPES = [torch.bfloat16, torch.float32, torch.float16]


def _matrix(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Gaussian, with a zero row and column, an outlier and a row at the edge of float32's normal numbers."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape)))
    m, k = shape
    if m > 2 and k > 2:
        x[1], x[:, 2] = 0, 0
        x[0, 0] = 1e4
        x[2] *= 1e-37
    return x.to(dtype)


def _assert_equal(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for ours, truth in zip(actual, expected, strict=True):
        assert ours.dtype == truth.dtype
        assert torch.equal(ours.double(), truth.double())


@pytest.mark.parametrize("fmt", list(FORMATS))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_quantizers_equal_the_maths_bitwise(shape: tuple[int, int], dtype: torch.dtype, fmt: str) -> None:
    x = _matrix(shape, dtype)
    by_column = torch.rand(1, shape[1], generator=torch.Generator().manual_seed(1))
    by_row = torch.rand(shape[0], 1, generator=torch.Generator().manual_seed(2))
    form = FORMATS[fmt]
    rows, columns = numerics.quantize_rows, numerics.quantize_columns
    _assert_equal(kernels.quantize_rows(x, fmt), rows(x, form))
    _assert_equal(kernels.quantize_rows(x, fmt, multiplier_1K=by_column), rows(x.float() * by_column, form))
    _assert_equal(kernels.quantize_columns(x, fmt), columns(x, form))
    _assert_equal(kernels.quantize_columns(x, fmt, multiplier_M1=by_row), columns(x.float() * by_row, form))
    for multiplier, folded in ((None, x), (by_column, x.float() * by_column)):
        both = kernels.quantize_rows_and_columns(x, fmt, multiplier_1K=multiplier)
        _assert_equal(both[0], rows(folded, form))
        _assert_equal(both[1], columns(x, form))
    _assert_equal(kernels.quantize_tensor(x, fmt), numerics.quantize_tensor(x, form))


QUANTIZERS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "rows": kernels.quantize_rows,
    "columns": kernels.quantize_columns,
    "tensor": kernels.quantize_tensor,
    "blocks": lambda x, fmt, **keys: kernels.quantize_blocks(x, (16, 16), fmt, **keys),
    "mx": lambda x, fmt, **keys: kernels.quantize_blocks(x, (1, 32), "e4m3", e8m0=True, **keys),
    "delayed": lambda x, fmt, **keys: kernels.quantize_delayed(x, fmt, kernels.layer_handle(-1), "x", **keys),
}


@pytest.mark.parametrize("name", QUANTIZERS)
def test_transposed_changes_the_strides_and_nothing_else(name: str) -> None:
    x = _matrix((20, 36), torch.bfloat16)
    plain, by_columns = QUANTIZERS[name](x, "int8"), QUANTIZERS[name](x, "int8", transposed=True)
    _assert_equal(by_columns, plain)
    assert plain[0].is_contiguous()
    assert by_columns[0].t().is_contiguous()


@pytest.mark.parametrize("fmt", list(FORMATS))
def test_what_backward_wants_twice_comes_in_one_call(fmt: str) -> None:
    x, form = _matrix((70, 300), torch.bfloat16), FORMATS[fmt]
    plain, by_columns = kernels.quantize_tensor_both_ways(x, fmt)
    for ours in (plain, plain._replace(q_MK=by_columns)):
        _assert_equal(ours, numerics.quantize_tensor(x, form))
    assert plain.q_MK.is_contiguous()
    assert by_columns.t().is_contiguous()
    for transposed in (False, True):
        rows, columns = kernels.quantize_row_and_column_blocks(x, 128, fmt, transposed=transposed)
        mx_rows, mx_columns = kernels.quantize_row_and_column_blocks(
            x, 32, "e4m3", e8m0=True, transposed=transposed
        )
        _assert_equal(rows, numerics.quantize_blocks(x, (1, 128), form))
        _assert_equal(columns, numerics.quantize_blocks(x, (128, 1), form))
        _assert_equal(mx_rows, numerics.quantize_mx(x, 1))
        _assert_equal(mx_columns, numerics.quantize_mx(x, 0))
        for q in (rows.q_MK, mx_rows.q_MK):
            assert q.is_contiguous()
        for q in (columns.q_MK, mx_columns.q_MK):
            assert (q.t() if transposed else q).is_contiguous()


def _packed(x: Tensor, num_rows: int, fmt: str, dtype: torch.dtype, power_of_two: bool) -> Tensor:
    """The buffer of `x.to(dtype)`, from bytes of the reference in lptune.numerics."""
    q, scale = numerics.quantize_rows(x.to(dtype), FORMATS[fmt], power_of_two=power_of_two)
    unused = torch.zeros(len(x), 12, dtype=torch.uint8)
    scale_bytes = torch.empty(len(x), 1).copy_(scale).view(torch.uint8)
    rows = torch.cat([scale_bytes, unused, q.contiguous().view(torch.uint8)], 1)
    return torch.nn.functional.pad(rows, (0, 0, 0, num_rows - len(x)))


def _assert_same_buffer(actual: Tensor, expected: Tensor) -> None:
    """Byte for byte. Where the scale is NaN, q and the code of NaN are unspecified."""
    assert actual.shape == expected.shape
    is_nan = expected[:, :4].contiguous().view(torch.float32).isnan()[:, 0]
    assert torch.equal(actual[:, :4].contiguous().view(torch.float32).isnan()[:, 0], is_nan)
    assert torch.equal(actual[~is_nan], expected[~is_nan])
    assert torch.equal(actual[:, 4:16], expected[:, 4:16])


@pytest.mark.parametrize("fmt", list(FORMATS))
@pytest.mark.parametrize("rounded_to", DTYPES)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_rows_are_rounded_quantized_and_packed_as_one_after_the_other(
    fmt: str, rounded_to: torch.dtype, power_of_two: bool
) -> None:
    inputs = [
        hard_to_round(28),
        *(_matrix(shape, dtype) for shape in [(1, 4), (7, 68), (0, 4)] for dtype in DTYPES),
    ]
    for x in [*inputs, hard_to_round(20)[::3, :12]]:
        for num_rows in (len(x), len(x) + 3):
            expected = _packed(x, num_rows, fmt, rounded_to, power_of_two)
            options = {"power_of_two": power_of_two, "rounded_to": rounded_to}
            buffer = kernels.quantize_packed_rows(x, num_rows, fmt, **options)
            _assert_same_buffer(buffer, expected)
            rows = kernels.quantize_rows(x, fmt, **options)
            _assert_same_buffer(kernels.pack_rows(rows, num_rows), expected)
            q, scale = kernels.unpack_rows(buffer, len(x), FORMATS[fmt].dtype)
            finite = ~scale.isnan()[:, 0]
            _assert_equal((q[finite], scale[finite]), (rows.q_MK[finite], rows.scale_M1[finite]))


@pytest.mark.parametrize("rounded_to", DTYPES)
def test_rows_are_rounded_before_they_are_multiplied(rounded_to: torch.dtype) -> None:
    x, by_column = _matrix((65, 33), torch.float32), torch.rand(1, 33)
    for transposed in (False, True):
        actual = kernels.quantize_rows(
            x, "int8", multiplier_1K=by_column, transposed=transposed, rounded_to=rounded_to
        )
        _assert_equal(actual, numerics.quantize_rows(x.to(rounded_to).float() * by_column))


def test_every_byte_of_a_buffer_is_written() -> None:
    x = _matrix((5, 12), torch.float32)
    expected = _packed(x, 8, "int8", torch.bfloat16, False)
    # torch then fills what it allocates.
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert (torch.empty(3, dtype=torch.uint8) == 255).all()
        buffer = kernels.quantize_packed_rows(x, 8, "int8", rounded_to=torch.bfloat16)
        repacked = kernels.pack_rows(kernels.unpack_rows(buffer, 5, torch.int8), 8)
    finally:
        torch.use_deterministic_algorithms(before)
    assert torch.equal(buffer, expected)
    assert torch.equal(repacked, expected)


def test_input_strides_do_not_matter() -> None:
    x = _matrix((40, 30), torch.float32).t()[::2]
    assert not x.is_contiguous()
    for quantize in (kernels.quantize_rows, kernels.quantize_columns, kernels.quantize_tensor):
        _assert_equal(quantize(x, "int8"), quantize(x.contiguous(), "int8"))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_makes_its_scale_nan(dtype: torch.dtype, bad: float) -> None:
    x = _matrix((65, 33), dtype)
    x[5, 7] = bad
    rows, columns = kernels.quantize_rows_and_columns(x, "int8")
    assert rows.scale_M1.isnan().nonzero()[:, 0].tolist() == [5]
    assert columns.scale_1K.isnan().nonzero()[:, 1].tolist() == [7]
    assert kernels.quantize_tensor(x, "int8").scale_11.isnan().all()


def test_threads_do_not_change_the_bits() -> None:
    x = _matrix((301, 77), torch.bfloat16)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            rows, columns = kernels.quantize_rows_and_columns(x, "int8")
            packed = kernels.quantize_packed_rows(x[:, :76].float(), 301, "int8", rounded_to=torch.float16)
            rotated = kernels.quantize_rows(x, "int8", rotated=True)
            quantized = (*rows, *columns, *rotated, *kernels.quantize_tensor(x, "int8"))
            results.append((*quantized, packed, kernels.rotate(x, x.dtype)))
    finally:
        torch.set_num_threads(before)
    _assert_equal(results[0], results[1])
    _assert_equal(results[0], results[2])


@pytest.mark.parametrize("fmt", ["int8", "e4m3"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (300, 260), (129, 64), (128, 200)])
def test_what_is_rotated_and_quantized_has_the_bits_of_one_after_the_other(
    shape: tuple[int, int], dtype: torch.dtype, fmt: str
) -> None:
    x, form = _matrix(shape, dtype), FORMATS[fmt]
    for rounded_to in (None, torch.bfloat16, torch.float16):
        rounded = x if rounded_to is None else x.to(rounded_to)
        rows = numerics.quantize_rows(numerics.rotate(rounded), form)
        options = {"rounded_to": rounded_to, "rotated": True}
        _assert_equal(kernels.quantize_rows(x, fmt, **options), rows)
        if shape[1] % 4 == 0:
            packed = kernels.quantize_packed_rows(x, shape[0] + 2, fmt, **options)
            assert torch.equal(packed, kernels.pack_rows(rows, shape[0] + 2))
    for to in DTYPES:
        _assert_equal((kernels.rotate(x, to),), (numerics.rotate(x).to(to),))


def test_opcheck() -> None:
    x, vector, column = torch.randn(24, 40), torch.rand(1, 40), torch.rand(24, 1)
    ops = torch.ops.lptune
    layer = kernels.layer_handle(-1)
    for op, args in (
        (ops.quantize_rows, (x, "int8", vector, False, False)),
        (ops.quantize_rows, (x, "e4m3", None, True, True)),
        (ops.quantize_rows, (x, "int8", None, False, True, torch.bfloat16)),
        (ops.quantize_rows, (x, "int8", None, False, True, torch.bfloat16, True)),
        (ops.quantize_packed_rows, (x, 30, "int8", False, torch.bfloat16, True)),
        (ops.rotate, (x, torch.bfloat16)),
        (ops.rotate, (x, torch.float32)),
        (ops.quantize_packed_rows, (x, 24, "int8", False, torch.bfloat16)),
        (ops.quantize_packed_rows, (x, 30, "e4m3", True)),
        (ops.quantize_columns, (x, "int8", column, False, True)),
        (ops.quantize_rows_and_columns, (x, "int8", vector, False, True)),
        (ops.quantize_tensor, (x, "int8")),
        (ops.quantize_tensor, (x, "int8", False, True)),
        (ops.quantize_tensor_both_ways, (x, "int8")),
        (ops.quantize_tensor_both_ways, (x[:1], "int8")),
        (ops.quantize_blocks, (x, (16, 16), "e4m3")),
        (ops.quantize_blocks, (x, (16, 16), "e4m3", False, True)),
        (ops.quantize_row_and_column_blocks, (x, 128, "e4m3", False, True)),
        (ops.quantize_row_and_column_blocks, (x, 32, "e4m3", True)),
        (ops.quantize_blocks, (x, (32, 1), "e4m3", True)),
        (ops.quantize_blocks, (x, (1, 32), "e4m3", True, True)),
        (ops.quantize_by_amax, (x, x.abs().amax().reshape(1, 1), "int8")),
        (ops.quantize_by_amax, (x, torch.rand(3, 3), "e4m3", True, 16, 12)),
        (ops.quantize_delayed, (x, "e4m3", layer, "x")),
        (ops.quantize_delayed, (x, "e4m3", layer, "x", True)),
    ):
        tests = ("test_schema", "test_faketensor", "test_autograd_registration")
        torch.library.opcheck(op.default, args, test_utils=tests)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_makes_its_scale_nan_after_a_rotation_too(dtype: torch.dtype, bad: float) -> None:
    x = _matrix((65, 33), dtype)
    x[5, 7] = bad
    assert kernels.quantize_rows(x, "int8", rotated=True).scale_M1.isnan().nonzero()[:, 0].tolist() == [5]
