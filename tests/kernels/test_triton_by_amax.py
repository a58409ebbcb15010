"""The Triton quantizers by known amaxes give the bits of `lptune.numerics`."""

import itertools
import math

import pytest
import torch

from lptune import numerics
from lptune.numerics import FORMATS
from tests.helpers.definitions import (
    BLOCKS,
    assert_same,
    expected_by_amax,
    rows_with_all_magnitudes,
    some_amaxes,
)
from tests.helpers.triton_device import DEVICE, INTERPRETED, poisoned_outputs, some_interpreted

from lptune.kernels.triton import by_amax, launch, quantize  # isort: skip  # only once there is a device

pytestmark = [
    pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning"),
    *([] if INTERPRETED else [pytest.mark.gpu]),
]
assert poisoned_outputs

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
CASES = list(itertools.product(BLOCKS, FORMATS, (False, True), (None, BFLOAT16, FLOAT16)))


@pytest.mark.parametrize(
    ("block_and_first_row", "fmt", "power_of_two", "rounded_to"),
    some_interpreted(
        CASES,
        [
            *((block, fmt, fmt == "e5m2", BFLOAT16) for block in BLOCKS[:3] for fmt in FORMATS),
            (BLOCKS[3], "int8", True, None),
            (BLOCKS[0], "e4m3", False, FLOAT16),
        ],
    ),
)
def test_by_known_amaxes_the_bits_are_those_of_the_definition(
    block_and_first_row: tuple[int | None, int], fmt: str, power_of_two: bool, rounded_to: torch.dtype | None
) -> None:
    (block, first_row), x = block_and_first_row, rows_with_all_magnitudes(fmt)
    if fmt == "int8" and rounded_to is not None:  # rounding makes no infinity: INT8 does not specify inf * 0
        largest = torch.finfo(rounded_to).max
        x = x.clamp(-largest, largest)
    amax = some_amaxes(block, first_row, *x.shape)
    rounded = x if rounded_to is None else x.to(rounded_to)
    q, scale = expected_by_amax(rounded, amax, FORMATS[fmt], power_of_two, block, first_row)
    for given in (x, x.t().contiguous().t()):
        on_device = given.to(DEVICE), amax.to(DEVICE)
        ours = by_amax.quantize_by_amax(*on_device, fmt, power_of_two, block, first_row, rounded_to)
        assert ours[0].is_contiguous()
        assert_same(ours[0].cpu(), q)
        assert_same(ours[1].cpu(), scale)


def test_few_programs_write_the_scales_of_many_blocks() -> None:
    # A rank may have a few rows of a large matrix, and has the scales of all of it.
    x, amax = torch.randn(16, 48), torch.rand(300, 3)
    q, scale = expected_by_amax(x, amax, FORMATS["e4m3"], False, 16, 48)
    ours = by_amax.quantize_by_amax(x.to(DEVICE), amax.to(DEVICE), "e4m3", False, 16, 48, None)
    assert amax.numel() > 3 * by_amax._SCALES_AT_ONCE  # more than three programs write at once
    assert_same(ours[0].cpu(), q)
    assert_same(ours[1].cpu(), scale)


@pytest.mark.parametrize("config", quantize.TILE_CONFIGS)
def test_blocks_that_no_tile_divides_get_their_own_scales(
    config: quantize.TileConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "tuned", lambda key, configs, run, device: config)
    x = torch.randn(150, 210, generator=torch.Generator().manual_seed(0))
    for block in (48, 100, 128):
        amax = torch.rand(-(-(150 + 70) // block), -(-210 // block)) * 3
        ours, _ = by_amax.quantize_by_amax(x.to(DEVICE), amax.to(DEVICE), "int8", False, block, 70, None)
        assert_same(ours.cpu(), expected_by_amax(x, amax, FORMATS["int8"], False, block, 70)[0])


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 1), (1, 700)])
def test_matrices_of_any_size(shape: tuple[int, int]) -> None:
    x, one = torch.randn(shape), torch.ones(1, 1)
    ours = by_amax.quantize_by_amax(x.to(DEVICE), one.to(DEVICE), "e4m3", False, None, 0, None)
    assert_same(ours[0].cpu(), expected_by_amax(x, one, FORMATS["e4m3"], False, None, 0)[0])
    nothing = torch.zeros((), device=DEVICE)
    q, scale, _ = by_amax.quantize_delayed(x.to(DEVICE), nothing, None, "e4m3", False, True)
    expected = numerics.quantize_tensor(x, FORMATS["e4m3"])
    assert_same(q.cpu(), expected.q_MK)
    assert scale.item() == expected.scale_11.item()


@pytest.mark.parametrize(
    ("fmt", "past", "dtype"),
    some_interpreted(
        list(itertools.product(FORMATS, (0.0, 1.5), (BFLOAT16, FLOAT16, FLOAT32))),
        [("e4m3", 0.0, BFLOAT16), ("e4m3", 1.5, BFLOAT16), ("e5m2", 1.5, FLOAT32), ("int8", 1.5, FLOAT16)],
    ),
)
def test_delayed_scaling_quantizes_by_the_past_and_measures_the_present(
    fmt: str, past: float, dtype: torch.dtype
) -> None:
    form = FORMATS[fmt]
    # Several programs, each of several tiles; the amax is in the last one.
    x = (torch.randn(700, 70, generator=torch.Generator().manual_seed(0)) * 2).to(dtype)
    x[-1, -1] = -20
    amax = x.float().abs().max()
    scale, inverse = numerics.scale_from_amax(torch.tensor(past) if past else amax, form)
    expected = numerics.round_to(x.float() * inverse, form)
    on_device, history = x.to(DEVICE), torch.tensor(past, device=DEVICE)
    for before, replace, transposed, twice in (
        (None, False, False, False),
        (0.25, False, True, False),
        (30.0, False, False, True),
        (30.0, True, True, False),
    ):
        current = None if before is None else torch.tensor(before, device=DEVICE)
        q, own, again = by_amax.quantize_delayed(on_device, history, current, fmt, replace, transposed, twice)
        assert_same(q.cpu(), expected)
        assert own.shape == (1, 1)
        assert own.item() == scale.item()
        assert (q.t() if transposed else q).is_contiguous()
        if twice:
            assert_same(again.cpu(), expected)
            assert again.t().is_contiguous()
        if current is not None:
            assert current.item() == (amax.item() if replace else max(before or 0, amax.item()))


@pytest.mark.parametrize("past", [0.0, 1.5])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_delayed_scaling_of_what_is_not_finite_has_no_scale_and_is_measured(bad: float, past: float) -> None:
    x, current = torch.ones(40, 70), torch.ones((), device=DEVICE)
    x[20, 50] = bad
    history = torch.tensor(past, device=DEVICE)
    _, scale, _ = by_amax.quantize_delayed(x.to(DEVICE), history, current, "e4m3", False, False)
    assert scale.isnan().all()
    assert current.isnan() if math.isnan(bad) else current.isinf()


@pytest.mark.parametrize(("block", "above"), [(16, 12), (20, 0), (128, 5)])
def test_the_amax_of_each_block_is_that_of_its_elements(block: int, above: int) -> None:
    x = torch.randn(45, 70, generator=torch.Generator().manual_seed(0))
    x[40, 60], x[20:, :] = -50, x[20:, :] * 1e-3
    for given in (x, x.t().contiguous().t()):
        ours = by_amax.block_amaxes(given.to(DEVICE), block, above)
        for i, j in itertools.product(*map(range, ours.shape)):
            part = x[max(i * block - above, 0) : (i + 1) * block - above, j * block : (j + 1) * block]
            assert ours[i, j] == part.abs().max()
    x[3, 3] = math.nan
    assert by_amax.block_amaxes(x.to(DEVICE), block, above).isnan().sum() == 1


def test_a_program_writes_to_its_own_block_alone() -> None:
    # Programs of neighbouring blocks run in any order: a byte that both write would be either's.
    x = torch.randn(64, 210, device=DEVICE)
    q = torch.full(x.shape, 0x55, dtype=torch.int8, device=DEVICE)
    by_amax.known_amax_kernel[(1, 1)](
        x,
        torch.full((2, 5), 4.0, device=DEVICE),
        None,
        torch.empty(2, 5, device=DEVICE),
        None,
        q,
        None,
        *x.shape,
        *x.stride(),
        *q.stride(),
        *q.stride(),
        0,
        5,
        10,
        SIDE=48,
        DELAYED=False,
        TWICE=False,
        ROUNDED_TO="",
        FORMAT="int8",
        MAX=127.0,
        POWER_OF_TWO=False,
        HARDWARE_FLOAT8=False,
        BLOCK_M=64,
        BLOCK_K=64,
        SCALES=4,
    )
    assert (q[:, 48:] == 0x55).all()
    assert (q[:, :48] != 0x55).float().mean() > 0.9
