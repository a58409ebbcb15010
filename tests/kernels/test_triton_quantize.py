"""The Triton quantizers give the bits of `lptune.numerics`, whatever they are fed."""

import itertools
import math
import traceback

import pytest
import torch
from torch import Tensor

from lptune import numerics
from lptune.numerics import FORMATS
from tests.helpers.hard_rows import hard_to_round
from tests.helpers.triton_device import DEVICE, INTERPRETED, poisoned_outputs, same_bits, some_interpreted

from lptune.kernels.triton import by_amax, by_row, launch, quantize, rotate  # isort: skip  # only once there is a device

pytestmark = [
    # NumPy, in the interpreter, speaks up where a GPU computes inf and NaN in silence.
    pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning"),
    *([] if INTERPRETED else [pytest.mark.gpu]),
]
assert poisoned_outputs

SHAPES = [(1, 1), (3, 5), (70, 130)]
CASES = [(fmt, power_of_two) for fmt in FORMATS for power_of_two in (False, True)]
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
BOTH_WAYS = list(itertools.product((FLOAT32, BFLOAT16), FORMATS))


def _matrix(m: int, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m * k)).to(dtype)


def _hard_rows() -> Tensor:
    """Rows that each break something: see the comments."""
    x = _matrix(12, 72)
    x[0] = 0  # no scale
    x[1, 7] = 1e6  # one outlier
    x[2, 3] = math.nan
    x[3, 4] = math.inf
    x[4, 5] = -math.inf
    x[5] *= 1e-37  # the scale underflows: amax / 127 < 2**-126
    x[6] *= 1e-44  # subnormal input
    x[7] *= 3e37  # near the largest float32
    x[8] = torch.arange(72) - 35.5  # with an amax of 127: ties between integers
    x[8, 0] = 127.0
    x[9] = 0
    x[9, 71] = 2.0**-149  # the smallest number there is
    x[10] *= 1e-20
    x[11] = -x[11].abs()
    return x


def _agree(ours: tuple[Tensor, Tensor], reference: tuple[Tensor, Tensor]) -> None:
    """The same scales; the same values wherever the scale is a number (elsewhere they are unspecified)."""
    (q, scale), (q_reference, scale_reference) = ours, reference
    scale = scale.cpu()
    assert torch.equal(scale.isnan(), scale_reference.isnan())
    assert same_bits(scale.nan_to_num(1.0), scale_reference.nan_to_num(1.0))
    known = ~scale_reference.isnan().expand(q_reference.shape)
    assert q.dtype == q_reference.dtype
    assert torch.equal(q.cpu().view(torch.uint8)[known], q_reference.view(torch.uint8)[known])


def _check_all(x: Tensor, fmt: str, power_of_two: bool, transposed: bool) -> None:
    m, k = x.shape
    form = FORMATS[fmt]
    multiplier = torch.rand(m + k, generator=torch.Generator().manual_seed(1)) * 3
    row_multiplier, column_multiplier = multiplier[:k].view(1, k), multiplier[k:].view(m, 1)
    on_device, row_on_device = x.to(DEVICE), row_multiplier.to(DEVICE)
    x32 = x.float()

    rows = numerics.quantize_rows(x, form, power_of_two=power_of_two)
    folded_rows = numerics.quantize_rows(x32 * row_multiplier, form, power_of_two=power_of_two)
    columns = numerics.quantize_columns(x, form, power_of_two=power_of_two)
    folded_columns = numerics.quantize_columns(x32 * column_multiplier, form, power_of_two=power_of_two)

    _agree(by_row.quantize_rows(on_device, None, fmt, power_of_two, transposed), rows)
    _agree(by_row.quantize_rows(on_device, row_on_device, fmt, power_of_two, transposed), folded_rows)
    _agree(
        quantize.quantize_columns(on_device, column_multiplier.to(DEVICE), fmt, power_of_two, transposed),
        folded_columns,
    )
    both = quantize.quantize_rows_and_columns(on_device, row_on_device, fmt, power_of_two, transposed)
    _agree(both[:2], folded_rows)
    _agree(both[2:], columns)
    assert both[0].is_contiguous()
    assert (both[2].t() if transposed else both[2]).is_contiguous()
    tensor = numerics.quantize_tensor(x, form, power_of_two=power_of_two)
    once = quantize.quantize_tensor(on_device, fmt, power_of_two, transposed)
    _agree(once, tensor)
    assert (once[0].t() if transposed else once[0]).is_contiguous()
    plain, by_columns, scale = quantize.quantize_tensor_both_ways(on_device, fmt, power_of_two)
    for q in (plain, by_columns.t()):
        assert q.is_contiguous()
    _agree((plain, scale), tensor)
    _agree((by_columns, scale), tensor)


@pytest.mark.parametrize(
    ("shape", "fmt", "power_of_two"),
    some_interpreted(
        [(shape, *case) for shape, case in itertools.product(SHAPES, CASES)],
        # The one of several programs with every format; those of a part of one with two.
        [
            *((SHAPES[-1], *case) for case in CASES),
            *((shape, *case) for shape in SHAPES[:-1] for case in (CASES[0], CASES[-1])),
        ],
    ),
)
def test_every_shape_gives_the_reference_bits(shape: tuple[int, int], fmt: str, power_of_two: bool) -> None:
    _check_all(_matrix(*shape, torch.bfloat16), fmt, power_of_two, transposed=True)


@pytest.mark.parametrize(
    ("dtype", "fmt", "power_of_two"),
    [
        # Each format and each rule for scales; their product is in the test of scales of amaxes.
        *((FLOAT32, *case) for case in some_interpreted(CASES, [CASES[0], *CASES[3:5]])),
        (BFLOAT16, "int8", False),
        (FLOAT16, "e4m3", True),
    ],
)
def test_zero_rows_outliers_and_what_is_not_finite(dtype: torch.dtype, fmt: str, power_of_two: bool) -> None:
    x = _hard_rows().to(dtype)
    if INTERPRETED and dtype == torch.bfloat16:
        x[x.float().abs() < 2.0**-126] = 0  # whose subnormal numbers the interpreter reads wrongly
    _check_all(x, fmt, power_of_two, transposed=False)
    finite = x[x.float().abs().amax(dim=1) < math.inf]  # else no column has a scale
    _check_all(finite, fmt, power_of_two, transposed=True)


def test_strides_do_not_matter() -> None:
    base = _matrix(90, 61, torch.bfloat16)
    for x in (base.t(), base[::2], base[:, 3:40], base[::3, ::2], base[:1].expand(4, 61)):
        on_device = base.to(DEVICE).as_strided(x.shape, x.stride(), x.storage_offset())
        for transposed in (False, True):
            _agree(
                by_row.quantize_rows(on_device, None, "int8", False, transposed),
                numerics.quantize_rows(x),
            )
            _agree(
                quantize.quantize_columns(on_device, None, "int8", False, transposed),
                numerics.quantize_columns(x),
            )


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_an_empty_matrix_has_empty_values_and_no_scale_but_zero(shape: tuple[int, int]) -> None:
    x = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
    _agree(
        by_row.quantize_rows(x, None, "e4m3", False, False),
        numerics.quantize_rows(x.cpu(), FORMATS["e4m3"]),
    )
    _agree(quantize.quantize_columns(x, None, "int8", False, True), numerics.quantize_columns(x.cpu()))
    _agree(quantize.quantize_tensor(x, "int8", False, False), numerics.quantize_tensor(x.cpu()))


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_every_float8_number_and_every_tie_is_rounded_as_torch_does(fmt: str) -> None:
    form = FORMATS[fmt]
    numbers = torch.arange(256, dtype=torch.uint8).view(form.dtype).float()
    numbers = numbers[numbers.isfinite()].unique()
    middles = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat(
        [numbers, middles, torch.nextafter(middles, middles * 2), torch.nextafter(middles, middles / 2)]
    )
    x = torch.where(x == 0, form.max, x)[None]  # the amax is the format's own, so the scale is exactly 1
    q, scale = by_row.quantize_rows(x.to(DEVICE), None, fmt, False, False)
    assert scale.item() == 1.0
    assert same_bits(q, x.to(form.dtype))


@pytest.mark.parametrize(("fmt", "power_of_two"), CASES)
def test_scales_of_amaxes_from_the_whole_range_of_float32(fmt: str, power_of_two: bool) -> None:
    # One number per column, so that each is an amax: random bits, every exponent, sign and significand.
    bits = torch.randint(-(2**31), 2**31, (1024,), generator=torch.Generator().manual_seed(0))
    x = bits.to(torch.int32).view(torch.float32)[None]
    _agree(
        quantize.quantize_columns(x.to(DEVICE), None, fmt, power_of_two, True),
        numerics.quantize_columns(x, FORMATS[fmt], power_of_two=power_of_two),
    )


def test_rows_longer_than_a_program_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_row, "LONGEST_HELD_ROW", 64)
    x = _matrix(3, 4096 + 300, torch.bfloat16)
    multiplier = torch.rand(1, x.shape[1])
    _agree(
        by_row.quantize_rows(x.to(DEVICE), multiplier.to(DEVICE), "int8", False, False),
        numerics.quantize_rows(x.float() * multiplier),
    )


@pytest.mark.parametrize("rounded_to", [BFLOAT16, FLOAT16, FLOAT32])
@pytest.mark.parametrize("held", [True, False])
def test_rows_are_rounded_first_and_written_to_rows_of_any_distance(
    rounded_to: torch.dtype, held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not held:
        monkeypatch.setattr(by_row, "LONGEST_HELD_ROW", 64)
    fmt, power_of_two = ("e4m3", True) if rounded_to == FLOAT16 else ("int8", False)
    hard = hard_to_round(72)
    x = torch.cat([_hard_rows(), hard[:255:16], hard[255:]])
    expected = numerics.quantize_rows(x.to(rounded_to), FORMATS[fmt], power_of_two=power_of_two)
    m, k = x.shape
    buffer = torch.full((m + 1, 16 + k), 0x55, dtype=torch.uint8, device=DEVICE)
    q, header = buffer[:m, 16:].view(torch.int8), buffer[:m, :16].view(torch.float32)
    arguments = (x.to(DEVICE), None, fmt, power_of_two)
    by_row.quantize_rows(*arguments, False, rounded_to, (q, header))
    _agree((q.view(FORMATS[fmt].dtype), header[:, :1]), expected)
    assert not header[:, 1:].any()
    assert (buffer[m] == 0x55).all()
    _agree(by_row.quantize_rows(*arguments, False, rounded_to), expected)


@pytest.mark.parametrize("config", quantize.TILE_CONFIGS)
@pytest.mark.parametrize("fmt", ["int8", "e4m3"])
def test_no_configuration_leaves_or_makes_a_nan(
    config: quantize.TileConfig, fmt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Triton issue 11111: NaN bytes out of a transposed one-byte store, on the GPU, in some configurations.
    monkeypatch.setattr(launch, "tuned", lambda key, configs, run, device: config)
    shape = (130, 70) if INTERPRETED else (4096, 4096 + 48)
    x = _matrix(*shape, torch.bfloat16)
    row_q, row_scale, column_q, column_scale = quantize.quantize_rows_and_columns(
        x.to(DEVICE), None, fmt, False, True
    )
    for q in (row_q, column_q):
        assert not q.float().isnan().any()
    _agree((row_q, row_scale), numerics.quantize_rows(x, FORMATS[fmt]))
    _agree((column_q, column_scale), numerics.quantize_columns(x, FORMATS[fmt]))


@pytest.mark.parametrize("config", some_interpreted(quantize.TILE_CONFIGS, quantize.TILE_CONFIGS[:1]))
@pytest.mark.parametrize(("dtype", "fmt"), some_interpreted(BOTH_WAYS, BOTH_WAYS[-1:]))
def test_a_value_stored_in_two_layouts_is_the_same_in_both(
    config: quantize.TileConfig, dtype: torch.dtype, fmt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "tuned", lambda key, configs, run, device: config)
    # Rows of 80 bytes are stored in words, columns of 40 in bytes, of which ptxas lost a quarter.
    x = _matrix(40, 80, dtype)
    plain, by_columns, scale = quantize.quantize_tensor_both_ways(x.to(DEVICE), fmt, False)
    expected = numerics.quantize_tensor(x, FORMATS[fmt])
    _agree((plain, scale), expected)
    _agree((by_columns, scale), expected)
    nothing = torch.zeros((), device=DEVICE)
    q, _, again = by_amax.quantize_delayed(x.to(DEVICE), nothing, None, fmt, False, False, True)
    assert same_bits(q, expected.q_MK)
    assert same_bits(again, expected.q_MK)


def test_a_format_that_the_kernels_do_not_round_to_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    e3m4 = numerics.Format("e3m4", torch.float8_e4m3fn, 15.5, mantissa_bits=4, min_exponent=-2)
    monkeypatch.setitem(FORMATS, "e3m4", e3m4)
    with pytest.raises(Exception) as raised:
        by_row.quantize_rows(_matrix(3, 5).to(DEVICE), None, "e3m4", False, False)
    # The compiler's error is that of the line which calls; its cause names the assertion.
    assert "round_to knows no rounding to this format" in "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize(("shape", "dtype"), [((37, 300), FLOAT32), ((130, 66), FLOAT16), ((3, 0), FLOAT32)])
def test_a_rotation_has_the_reference_bits(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = _matrix(*shape, dtype)
    for rounded_to, to in ((None, FLOAT32), (None, BFLOAT16), (FLOAT16, FLOAT32), (BFLOAT16, FLOAT32)):
        rounded = x if rounded_to is None else x.to(rounded_to)
        for given in (x, x.t().contiguous().t()):
            ours = rotate(given.to(DEVICE), rounded_to, to)
            assert ours.is_contiguous()
            assert same_bits(ours, numerics.rotate(rounded).to(to))


@pytest.mark.parametrize("longest_held", [16384, 64])
@pytest.mark.parametrize("shape", [(3, 128), (2, 4096 + 384), (5, 300)])
def test_rotated_rows_have_the_bits_of_one_pass_after_the_other(
    shape: tuple[int, int], longest_held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_row, "LONGEST_HELD_ROW", longest_held)
    x = _matrix(*shape)
    for transposed, rounded_to in ((False, None), (False, BFLOAT16), (True, None)):
        rotated = numerics.rotate(x if rounded_to is None else x.to(rounded_to))
        options = ("int8", False, transposed, rounded_to)
        ours = by_row.quantize_rows(x.to(DEVICE), None, *options, rotated=True)
        _agree(ours, numerics.quantize_rows(rotated, FORMATS["int8"]))
