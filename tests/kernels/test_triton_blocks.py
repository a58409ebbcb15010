"""Block-scaled quantizers and GEMM in Triton against `lptune.numerics`."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lptune import numerics
from lptune.numerics import FORMATS
from tests.helpers.triton_device import DEVICE, INTERPRETED, poisoned_outputs, same_bits, some_interpreted

from lptune.kernels.triton import block_mm, blocks, launch  # isort: skip  # only once there is a device

pytestmark = [
    # NumPy, in the interpreter, speaks up where a GPU computes inf and NaN in silence.
    pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning"),
    *([] if INTERPRETED else [pytest.mark.gpu]),
]
assert poisoned_outputs

BLOCKS = [(1, 128), (128, 1), (128, 128), (1, 32), (32, 1)]
SHAPES = [(1, 1), (40, 300), (130, 70)]
CASES = [("e4m3", False), ("e5m2", True), ("int8", False)]
needs_float8 = pytest.mark.skipif(
    not INTERPRETED and torch.cuda.get_device_capability() < (8, 9), reason="no float8 before Ada"
)


def _matrix(m: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m * k)).to(dtype)


def _agree(ours: tuple[Tensor, Tensor], reference: tuple[Tensor, Tensor], block: tuple[int, int]) -> None:
    """The same scales; the same values wherever the scale is a number (elsewhere they are unspecified)."""
    (q, scale), (q_reference, scale_reference) = ours, reference
    scale32 = scale.cpu().float()
    assert torch.equal(scale32.isnan(), scale_reference.float().isnan())
    if scale.dtype == torch.float32:
        scale, scale_reference = scale.nan_to_num(1.0), scale_reference.nan_to_num(1.0)
    assert same_bits(scale, scale_reference)
    known = ~numerics.expand_blocks(scale32, block, tuple(q.shape)).isnan()
    assert q.dtype == q_reference.dtype
    assert torch.equal(q.cpu().view(torch.uint8)[known], q_reference.view(torch.uint8)[known])


@pytest.mark.parametrize(
    ("shape", "block", "fmt", "e8m0"),
    some_interpreted(
        [(shape, block, *case) for shape, block, case in itertools.product(SHAPES, BLOCKS, CASES)],
        # Every two of shape, block and format meet.
        [
            (SHAPES[(i + j) % 3], block, *case)
            for (i, block), (j, case) in itertools.product(enumerate(BLOCKS), enumerate(CASES))
        ],
    ),
)
def test_every_shape_gives_the_reference_bits(
    shape: tuple[int, int], block: tuple[int, int], fmt: str, e8m0: bool
) -> None:
    x = _matrix(*shape)
    expected = numerics.quantize_blocks(x, block, FORMATS[fmt], power_of_two=e8m0)
    if e8m0:
        expected = expected._replace(scale=numerics.to_e8m0(expected.scale))
    for transposed in (False, True):
        ours = blocks.quantize_blocks(x.to(DEVICE), block, fmt, e8m0, transposed)
        assert (ours[0].t() if transposed else ours[0]).is_contiguous()
        _agree(ours, expected, block)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [128, 32])
@pytest.mark.parametrize("fmt", ["e4m3", "int8"])
def test_rows_and_columns_come_out_of_one_reading(shape: tuple[int, int], size: int, fmt: str) -> None:
    x = _matrix(*shape)
    x[0, 0] = 1e4
    for transposed in (False, True):
        row_q, row_scale, column_q, column_scale = blocks.quantize_row_and_column_blocks(
            x.to(DEVICE), size, fmt, False, transposed
        )
        assert row_q.is_contiguous()
        assert (column_q.t() if transposed else column_q).is_contiguous()
        form = FORMATS[fmt]
        _agree((row_q, row_scale), numerics.quantize_blocks(x, (1, size), form), (1, size))
        _agree((column_q, column_scale), numerics.quantize_blocks(x, (size, 1), form), (size, 1))


@pytest.mark.parametrize("block", BLOCKS)
def test_zero_blocks_outliers_and_what_is_not_finite(block: tuple[int, int]) -> None:
    x = _matrix(170, 290, torch.float32)
    x[:128, :128] = 0  # a whole block of any form, with no scale
    x[129, 5] = 1e6
    x[130, 140] = math.nan
    x[131, 150] = -math.inf
    x[132] *= 1e-37
    x[133] *= 1e-44
    for matrix in (x, x.t(), x[::2, 1:]):
        on_device = x.to(DEVICE).as_strided(matrix.shape, matrix.stride(), matrix.storage_offset())
        ours = blocks.quantize_blocks(on_device, block, "e4m3", False, False)
        _agree(ours, numerics.quantize_blocks(matrix, block, FORMATS["e4m3"]), block)
    if min(block) == 1:
        both = blocks.quantize_row_and_column_blocks(x.to(DEVICE), max(block), "e4m3", False, True)
        ours = both[:2] if block[0] == 1 else both[2:]
        _agree(ours, numerics.quantize_blocks(x, block, FORMATS["e4m3"]), block)


@pytest.mark.parametrize("dim", [0, 1])
def test_mx_blocks_have_e8m0_scales(dim: int) -> None:
    x = _matrix(70, 100, torch.float32)
    x[:64, :64] = 0
    x[65, 3] = math.nan
    x[66, 70] = 1e30
    block = (1, 32) if dim == 1 else (32, 1)
    both = blocks.quantize_row_and_column_blocks(x.to(DEVICE), 32, "e4m3", True, True)
    for ours in (
        blocks.quantize_blocks(x.to(DEVICE), block, "e4m3", True, False),
        both[:2] if dim == 1 else both[2:],
    ):
        assert ours[1].dtype == torch.float8_e8m0fnu
        _agree(ours, numerics.quantize_mx(x, dim), block)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_an_empty_matrix_stays_empty(shape: tuple[int, int]) -> None:
    x = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
    q, scale = blocks.quantize_blocks(x, (1, 128), "e4m3", False, False)
    assert blocks.quantize_row_and_column_blocks(x, 128, "e4m3", False, True)[2].shape == x.shape
    expected = numerics.quantize_blocks(x.cpu(), (1, 128), FORMATS["e4m3"])
    assert q.shape == expected.q_MK.shape
    assert scale.shape == expected.scale.shape


def _operands(
    m: int, k: int, n: int, kind: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, Tensor, Tensor]:
    """(a, b, scale_a, scale_b, block) as the layers pass them, and the dequantized matrices in float64."""
    x, w = _matrix(m, k, torch.float32), _matrix(n, k, torch.float32)
    x *= torch.logspace(-3, 3, k)  # so that the scales matter
    fmt = FORMATS["e4m3"]
    if kind == "mx":
        a, b = numerics.quantize_mx(x, 1), numerics.quantize_mx(w, 1)
        a64 = numerics.dequantize_blocks(a, (1, 32)).double()
        b64 = numerics.dequantize_blocks(b, (1, 32)).double()
        return a.q_MK, b.q_MK.t(), a.scale, b.scale.t(), 32, a64, b64.t()
    block = (128, 128) if kind == "square" else (1, 128)
    a, b = numerics.quantize_blocks(x, (1, 128), fmt), numerics.quantize_blocks(w, block, fmt)
    a64 = a.q_MK.double() * numerics.expand_blocks(a.scale, (1, 128), (m, k)).double()
    b64 = b.q_MK.double() * numerics.expand_blocks(b.scale, block, (n, k)).double()
    return a.q_MK, b.q_MK.t(), a.scale, b.scale.t(), 128, a64, b64.t()


def _run(operands: tuple[Any, ...], **kwargs: Any) -> Tensor:
    if kwargs.get("tma") and not launch.has_tma(DEVICE):
        pytest.skip("this device has no TMA")
    a, b, scale_a, scale_b, block = operands[:5]
    tensors = (x.to(DEVICE) for x in (a, b, scale_a, scale_b))
    return block_mm.block_scaled_mm(*tensors, block, torch.float32, **kwargs).cpu()


def _within_bound(out: Tensor, operands: tuple[Any, ...]) -> bool:
    """A float32 sum of K products, and two roundings for each block's scales: see test_triton_gemm.py."""
    a64, b64 = operands[5:]
    k = a64.shape[1]
    in_tensor_core = 0.0 if INTERPRETED else 4 * 33 * 2.0**-13
    bound = a64.abs() @ b64.abs() * ((k + 4) * 2.0**-24 + in_tensor_core)
    return bool(((out.double() - a64 @ b64).abs() <= bound).all())


@needs_float8
@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 5, 7), (150, 272, 140), (20, 300, 270)])
@pytest.mark.parametrize("kind", ["square", "vector", "mx"])
@pytest.mark.parametrize("tma", [True, False])
def test_the_gemm_lies_within_the_rounding_of_a_float32_sum(
    shape: tuple[int, int, int], kind: str, tma: bool
) -> None:
    operands = _operands(*shape, kind)
    assert _within_bound(_run(operands, tma=tma), operands)


@needs_float8
@pytest.mark.parametrize("kind", ["square", "vector", "mx"])
def test_every_configuration_is_right_and_a_gpu_gives_the_same_bits_with_each(kind: str) -> None:
    operands = _operands(*((140, 272, 150) if INTERPRETED else (1000, 4112, 2064)), kind)
    major = 9 if INTERPRETED else launch.capability(DEVICE)[0]
    name = kind if kind != "mx" else "native" if major == 10 else "vector"
    results = [_run(operands, config=config) for config in block_mm.block_mm_configs(name, major)]
    assert all(_within_bound(result, operands) for result in results)
    # In the interpreter a tile's product is a BLAS call, whose order of summation depends on its size.
    assert INTERPRETED or all(same_bits(result, results[0]) for result in results)


@needs_float8
def test_layouts_that_are_not_k_major_and_strided_scales_give_the_same() -> None:
    operands = _operands(65, 256, 130, "vector")
    a, b, scale_a, scale_b = (x.to(DEVICE) for x in operands[:4])
    expected = block_mm.block_scaled_mm(a, b, scale_a, scale_b, 128, torch.float32)
    a, b = a.t().contiguous().t(), b.contiguous()
    scale_a, scale_b = scale_a.t().contiguous().t(), scale_b.contiguous()
    assert same_bits(block_mm.block_scaled_mm(a, b, scale_a, scale_b, 128, torch.float32), expected)


@needs_float8
def test_a_nan_scale_reaches_its_row_and_no_other() -> None:
    for kind in ("vector", "mx"):
        operands = list(_operands(40, 256, 30, kind))
        operands[2] = operands[2].clone()
        if kind == "mx":
            operands[2].view(torch.uint8)[3, 1] = 255
        else:
            operands[2][3, 1] = torch.nan
        nan = _run(tuple(operands)).isnan()
        assert nan[3].all()
        assert nan.sum() == 30
