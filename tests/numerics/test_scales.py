"""Scales of every shape: what they are, what they cover, and what happens at the edges of float32."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lptune import numerics
from lptune.numerics import E4M3, FORMATS, INT8, Format, scale_from_amax

every_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=list(FORMATS))
Quantize = Callable[..., tuple[torch.Tensor, torch.Tensor]]

# What a scale covers -> its quantizer and block; dequantizing goes through the block for all of them.
SHAPES: dict[str, tuple[Quantize, Callable[[int, int], tuple[int, int]]]] = {
    "rows": (numerics.quantize_rows, lambda m, k: (1, k)),
    "columns": (numerics.quantize_columns, lambda m, k: (m, 1)),
    "tensor": (numerics.quantize_tensor, lambda m, k: (m, k)),
    "1x8": (lambda x, fmt, **keys: numerics.quantize_blocks(x, (1, 8), fmt, **keys), lambda m, k: (1, 8)),
    "8x1": (lambda x, fmt, **keys: numerics.quantize_blocks(x, (8, 1), fmt, **keys), lambda m, k: (8, 1)),
    "4x8": (lambda x, fmt, **keys: numerics.quantize_blocks(x, (4, 8), fmt, **keys), lambda m, k: (4, 8)),
}
every_shape = pytest.mark.parametrize("shape", SHAPES)
every_power_of_two = pytest.mark.parametrize("power_of_two", [False, True], ids=["ratio", "power_of_two"])


def _randn(m: int, k: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m + k)).to(dtype)


def _expanded(scale: torch.Tensor, block: tuple[int, int], x: torch.Tensor) -> torch.Tensor:
    """The scale of each element of x, float64."""
    return numerics.expand_blocks(scale, block, (x.shape[0], x.shape[1])).double()


def _assert_within_half_a_step(q: torch.Tensor, scale_MK: torch.Tensor, x: torch.Tensor, fmt: Format) -> None:
    zero = scale_MK == 0
    assert (x[zero] == 0).all()
    # Half the cell in which x / scale lies, and float32's roundings: of max / amax, of the product with it,
    # and of scale, which is not quite 1 / inverse; 2**-24 of the product each, and their second order. A
    # product carried over the edge of its cell still rounds to that edge, since edges are numbers.
    ratio = torch.where(zero, 0.0, x.double() / scale_MK)
    bound = fmt.spacing(ratio) / 2 + 4 * 2.0**-24 * ratio.abs()
    assert ((q.double() - ratio).abs() <= bound).all()


# ---- the scale itself


def _edge_amaxes(fmt: Format) -> torch.Tensor:
    """float32 around max * 2**k for all k: where the next power of two changes."""
    exponents = torch.arange(-125, 118 if fmt.max < 1000 else 112)
    exact = torch.ldexp(torch.full(exponents.shape, fmt.max, dtype=torch.float64), exponents).float()
    infinity = torch.full_like(exact, math.inf)
    return torch.cat((exact, exact.nextafter(infinity), exact.nextafter(-infinity), exact * 1.37))


@every_format
def test_a_power_of_two_scale_is_the_smallest_that_does_not_saturate(fmt: Format) -> None:
    amax = _edge_amaxes(fmt)
    scale, inverse = scale_from_amax(amax, fmt, power_of_two=True)
    mantissa, exponent = torch.frexp(scale.double())
    assert (mantissa == 0.5).all()  # a power of two
    # amax = m * 2**e with m in [0.5, 1), and so is max: the quotient's exponent, one more where amax's m is
    # larger, exactly. frexp's exponent of 2**n is n + 1.
    (m_amax, e_amax), (m_max, e_max) = (torch.frexp(v.double()) for v in (amax, torch.tensor(fmt.max)))
    assert torch.equal(exponent - 1, e_amax - e_max + (m_amax > m_max).int())
    assert (amax.double() <= scale.double() * fmt.max).all()
    assert (amax.double() > scale.double() / 2 * fmt.max).all()
    assert torch.equal(scale.double() * inverse.double(), torch.ones(len(amax), dtype=torch.float64))


@every_format
def test_a_scale_is_amax_over_max_rounded_once_and_so_is_its_inverse(fmt: Format) -> None:
    amax = _edge_amaxes(fmt)
    scale, inverse = scale_from_amax(amax, fmt)
    for ours, exact in ((scale, amax.double() / fmt.max), (inverse, fmt.max / amax.double())):
        # Rounded once: the exact value lies within half the distance to either float32 neighbour.
        for direction in (math.inf, -math.inf):
            neighbour = ours.nextafter(torch.full_like(ours, direction)).double()
            assert ((exact - ours.double()).abs() <= (neighbour - ours.double()).abs() / 2).all()


@every_power_of_two
@every_format
def test_scales_stop_at_the_smallest_normal_number(fmt: Format, power_of_two: bool) -> None:
    smallest = 2.0**-126
    amax = torch.tensor([2.0**-149, 1e-40, 2.0**-127, 2.0**-126, fmt.max * 2.0**-127])
    scale, inverse = scale_from_amax(amax, fmt, power_of_two)
    assert (scale == smallest).all()
    assert (inverse == 2.0**126).all()


@every_power_of_two
def test_zero_and_what_is_not_finite_have_scales_of_their_own(power_of_two: bool) -> None:
    scale, inverse = scale_from_amax(torch.tensor([0.0, math.inf, math.nan, 3.4e38]), INT8, power_of_two)
    assert scale[0] == 0
    assert scale[1:3].isnan().all()
    assert (inverse[:3] == 0).all()
    assert scale[3].isfinite()
    assert inverse[3] > 0


# ---- every shape of scale


@every_power_of_two
@every_shape
@every_format
def test_every_element_lies_within_half_its_cell(fmt: Format, shape: str, power_of_two: bool) -> None:
    quantize, block_of = SHAPES[shape]
    # Sizes that divide the blocks, that do not, and that are smaller than one.
    for (m, k), dtype in itertools.product(
        ((8, 16), (13, 21), (3, 5), (1, 1)), (torch.float32, torch.bfloat16, torch.float16)
    ):
        x = _randn(m, k, dtype)
        q, scale = quantize(x, fmt, power_of_two=power_of_two)
        block = block_of(m, k)
        assert q.dtype == fmt.dtype
        assert q.is_contiguous()
        assert scale.dtype == torch.float32
        assert scale.shape == (-(-m // block[0]), -(-k // block[1]))
        _assert_within_half_a_step(q, _expanded(scale, block, x), x, fmt)


@every_shape
@every_format
def test_blocks_quantize_independently(fmt: Format, shape: str) -> None:
    # One call on the matrix equals one call of quantize_tensor on each block.
    quantize, block_of = SHAPES[shape]
    x = _randn(13, 21)
    rows, columns = block_of(13, 21)
    q, scale = quantize(x, fmt)
    for i, j in itertools.product(range(scale.shape[0]), range(scale.shape[1])):
        part = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
        alone = numerics.quantize_tensor(x[part], fmt)
        assert torch.equal(q[part].double(), alone.q_MK.double())
        assert scale[i, j] == alone.scale_11


@every_power_of_two
@every_shape
@every_format
def test_zeros_an_outlier_nan_and_inf_stay_within_their_own_block(
    fmt: Format, shape: str, power_of_two: bool
) -> None:
    quantize, block_of = SHAPES[shape]
    x = _randn(16, 24)
    rows, columns = block = block_of(16, 24)
    inside = torch.zeros(16, 24, dtype=torch.bool)  # the block of element (9, 13)
    top, left = 9 // rows * rows, 13 // columns * columns
    inside[top : top + rows, left : left + columns] = True
    inputs = {"zero": x.masked_fill(inside, 0)}
    for name, value in (("outlier", 1e4), ("nan", math.nan), ("inf", math.inf), ("-inf", -math.inf)):
        inputs[name] = x.clone()
        inputs[name][9, 13] = value

    q_before, scale_before = quantize(x, fmt, power_of_two=power_of_two)
    results = {}
    for name, changed in inputs.items():
        q, scale = quantize(changed, fmt, power_of_two=power_of_two)
        results[name] = (q.double(), _expanded(scale, block, x))
        assert torch.equal(q.double()[~inside], q_before.double()[~inside])
        assert torch.equal(results[name][1][~inside], _expanded(scale_before, block, x)[~inside])
    q, scale_MK = results["zero"]
    assert (q[inside] == 0).all()
    assert (scale_MK[inside] == 0).all()
    _assert_within_half_a_step(*results["outlier"], inputs["outlier"], fmt)
    for name in ("nan", "inf", "-inf"):
        assert results[name][1][inside].isnan().all()


@every_shape
@every_format
def test_strides_do_not_matter(fmt: Format, shape: str) -> None:
    quantize, _ = SHAPES[shape]
    wide = _randn(40, 48)
    for x in (wide.t(), wide[::2], wide[:, 3:35], wide.t()[::3, ::2], wide[5:6].expand(16, -1)):
        assert not x.is_contiguous()
        for a, b in zip(quantize(x, fmt), quantize(x.contiguous(), fmt), strict=True):
            assert torch.equal(a.double(), b.double())


@pytest.mark.parametrize("shape", ["rows", "columns", "tensor"])
def test_compiled_quantization_equals_eager_bitwise(shape: str) -> None:
    quantize, _ = SHAPES[shape]
    x = _randn(48, 80, torch.bfloat16)
    for a, b in zip(torch.compile(quantize, dynamic=False)(x, INT8), quantize(x, INT8), strict=True):
        assert torch.equal(a, b)


@every_shape
@every_format
def test_small_gradients_keep_the_bits_of_large_ones_down_to_the_smallest_scale(
    fmt: Format, shape: str
) -> None:
    quantize, block_of = SHAPES[shape]
    x = _randn(16, 24)
    for magnitude in (2.0**-60, 2.0**-100):  # a power of two changes no quotient
        assert torch.equal(quantize(x * magnitude, fmt)[0].double(), quantize(x, fmt)[0].double())
    tiny = x * 2.0**-130  # below the smallest scale, half of it
    q, scale = quantize(tiny, fmt)
    assert (scale == 2.0**-126).all()
    _assert_within_half_a_step(q, _expanded(scale, block_of(16, 24), tiny), tiny, fmt)


@pytest.mark.parametrize("size", [(0, 8), (8, 0), (0, 0)])
@every_shape
def test_nothing_quantizes_to_nothing(shape: str, size: tuple[int, int]) -> None:
    quantize, block_of = SHAPES[shape]
    q, scale = quantize(torch.zeros(size), E4M3)
    assert q.shape == size
    rows, columns = block_of(*size)
    # One scale per row even where a row is empty; it is 0, as for a row of zeros.
    assert (scale == 0).all()
    if shape in ("1x8", "8x1", "4x8"):
        assert scale.shape == (-(-size[0] // rows), -(-size[1] // columns))
        assert numerics.dequantize_blocks(numerics.QuantizedBlocks(q, scale), (rows, columns)).shape == size
    else:
        assert (q.float() * scale).shape == size


@every_shape
@every_format
def test_what_a_power_of_two_has_quantized_is_not_rounded_again(fmt: Format, shape: str) -> None:
    quantize, block_of = SHAPES[shape]
    x, size = _randn(13, 21), (13, 21)
    q, scale = quantize(x, fmt, power_of_two=True)
    once = numerics.dequantize_blocks(numerics.QuantizedBlocks(q, scale), block_of(*size))
    for other, other_block_of in SHAPES.values():
        q2, scale2 = other(once, fmt, power_of_two=True)
        twice = numerics.dequantize_blocks(numerics.QuantizedBlocks(q2, scale2), other_block_of(*size))
        larger = _expanded(scale2, other_block_of(*size), x) > _expanded(scale, block_of(*size), x)
        exact = ~larger
        if fmt.mantissa_bits is not None:  # down to the smallest normal number under the larger scale
            normal = _expanded(scale2, other_block_of(*size), x) * 2.0**fmt.min_exponent
            exact |= once.abs() >= normal
        assert exact.any()
        assert torch.equal(twice[exact], once[exact])


# ---- MX blocks


@pytest.mark.parametrize("fmt", [numerics.E4M3, numerics.E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dim", [0, 1])
def test_mx_blocks_are_blocks_of_32_with_the_scales_bits_moved(dim: int, fmt: Format) -> None:
    for size in ((64, 96), (40, 33), (1, 1)):
        x = _randn(*size, torch.bfloat16)
        block = (1, 32) if dim == 1 else (32, 1)
        mx = numerics.quantize_mx(x, dim, fmt)
        blocks = numerics.quantize_blocks(x, block, fmt, power_of_two=True)
        assert mx.scale.dtype == torch.float8_e8m0fnu
        assert torch.equal(mx.scale.float(), blocks.scale)
        assert torch.equal(numerics.dequantize_blocks(mx, block), numerics.dequantize_blocks(blocks, block))


def test_mx_blocks_at_the_edges() -> None:
    x = _randn(4, 128)
    x[0, :32] = 0
    x[1, 32] = math.nan
    x[2, 64:96] *= 2.0**-130  # subnormal: below the smallest scale of float32, not of E8M0
    x[3, 96] = math.inf
    mx = numerics.quantize_mx(x, 1)
    back = numerics.dequantize_blocks(mx, (1, 32))
    assert (back[0, :32] == 0).all()
    assert back[1, 32:64].isnan().all()
    assert back[3, 96:].isnan().all()
    assert int(back.isnan().sum()) == 64
    assert (
        (back[2, 64:96] - x[2, 64:96]).abs() <= 2.0**-126 * E4M3.spacing(x[2, 64:96] * 2.0**126) / 2
    ).all()


# ---- any matrix at all

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(FINITE, min_size=3, max_size=3), min_size=1, max_size=4),
    fmt=st.sampled_from(list(FORMATS.values())),
    shape=st.sampled_from(list(SHAPES)),
    power_of_two=st.booleans(),
)
def test_any_finite_matrix_is_within_half_a_cell_and_odd_symmetric(
    rows: list[list[float]], fmt: Format, shape: str, power_of_two: bool
) -> None:
    x = torch.tensor(rows)
    quantize, block_of = SHAPES[shape]
    q, scale = quantize(x, fmt, power_of_two=power_of_two)
    block = block_of(*x.shape)
    assert scale.isfinite().all()
    assert (q.double().abs() <= fmt.max).all()
    scale_MK = _expanded(scale, block, x)
    ratio = torch.where(scale_MK == 0, 0.0, x.double() / scale_MK)
    # At the smallest scale x * inverse may be a subnormal whose rounding is absolute, far below any cell.
    assert ((q.double() - ratio).abs() <= fmt.spacing(ratio) / 2 + 2.0**-22 * ratio.abs()).all()
    negated, same_scale = quantize(-x, fmt, power_of_two=power_of_two)
    assert torch.equal(negated.double(), -q.double())
    assert torch.equal(scale, same_scale)


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(FINITE | st.sampled_from([math.inf, -math.inf]), min_size=1, max_size=8),
    scale=st.floats(min_value=2.0**-126, max_value=2.0**120, width=32),
    fmt=st.sampled_from(list(FORMATS.values())),
)
def test_a_scale_chosen_before_saturates_and_never_wraps(
    values: list[float], scale: float, fmt: Format
) -> None:
    x, s = torch.tensor(values), torch.tensor(scale)
    q = numerics.round_to(x * (1 / s.double()).float(), fmt).double()
    ratio = x.double() / s.double()
    expected = ratio.clamp(-fmt.max, fmt.max)
    assert ((q - expected).abs() <= fmt.spacing(expected) / 2 + 2.0**-22 * expected.abs()).all()
    assert (q[ratio.abs() > fmt.max].abs() == fmt.max).all()
