"""The Triton GEMMs against exact sums: INT8 to the bit, float8 within what float32 addition allows."""

from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from tests.helpers.triton_device import (
    DEVICE,
    INTERPRETED,
    poisoned_outputs,
    rounding_of_a_float8_sum,
    same_bits,
)

from lptune.kernels.triton import again, gemm, launch  # isort: skip  # only once there is a device

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
assert poisoned_outputs

SHAPES = [(1, 16, 16), (3, 5, 7), (150, 144, 130), (20, 300, 270)]
# The last three have more tiles than programs; two of them fewer steps than the ring has stages.
HOPPER_SHAPES = [(1, 16, 1), (7, 48, 25), (129, 1040, 70), (1000, 400, 424)]
HOPPER_SHAPES += [(4096, 3072, 8192), (4096, 272, 4112), (4096, 16, 8192)]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
on_hopper = pytest.mark.skipif(
    INTERPRETED or torch.cuda.get_device_capability()[0] != 9, reason="Gluon has no interpreter: needs Hopper"
)
needs_float8 = pytest.mark.skipif(
    not INTERPRETED and torch.cuda.get_device_capability() < (8, 9), reason="no float8 before Ada"
)


def _int8(m: int, k: int, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """a (M, K) row-major, b (K, N) column-major, as the layers pass them, and a scale per row and column."""
    generator = torch.Generator().manual_seed(m * k + n)
    a = torch.randint(-127, 128, (m, k), dtype=torch.int8, generator=generator)
    b = torch.randint(-127, 128, (n, k), dtype=torch.int8, generator=generator).t()
    # Small enough for a float16 result.
    scale_a, scale_b = torch.rand(m, 1, generator=generator), torch.rand(1, n, generator=generator)
    return a, b, scale_a * 0.01, scale_b


def _scaled(exact32: Tensor, scale_a: Tensor | None, scale_b: Tensor | None) -> Tensor:
    scaled = exact32 if scale_a is None else exact32 * scale_a
    return scaled if scale_b is None else scaled * scale_b


def _rounded(exact32: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.bfloat16 and INTERPRETED:  # which truncates
        return (exact32.view(torch.int32) & -65536).view(torch.float32).to(dtype)
    return exact32.to(dtype)


def _run(
    a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, *args: Any, **kwargs: Any
) -> Tensor:
    if kwargs.get("tma") and not launch.has_tma(DEVICE):
        pytest.skip("this device has no TMA")
    a, b, *scales = (None if x is None else x.to(DEVICE) for x in (a, b, scale_a, scale_b))
    return gemm.scaled_mm(a, b, *scales, *args, **kwargs).cpu()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tma", [True, False])
def test_int8_is_the_exact_sum_scaled_in_float32(shape: tuple[int, int, int], tma: bool) -> None:
    a, b, scale_a, scale_b = _int8(*shape)
    exact = (a.double() @ b.double()).float()
    one = torch.tensor([[0.0037]])
    # The last one is a tensor's scale on one side, a vector on the other.
    for sa, sb, dtype in (
        (scale_a, scale_b, torch.float32),
        (scale_a, None, torch.bfloat16),
        (None, scale_b * 0.01, torch.float16),
        (one, scale_b, torch.float32),
    ):
        expected = _rounded(_scaled(exact, sa, sb), dtype)
        assert same_bits(_run(a, b, sa, sb, dtype, tma=tma), expected)
    assert torch.equal(_run(a, b, None, None, torch.int32, tma=tma), (a.double() @ b.double()).int())


@pytest.mark.parametrize(
    "config", dict.fromkeys((*gemm.gemm_configs(9, True, True), *gemm.gemm_configs(8, True, False)))
)
@pytest.mark.parametrize("tma", [True, False])
def test_no_int8_configuration_changes_a_bit(config: gemm.GemmConfig, tma: bool) -> None:
    a, b, scale_a, scale_b = _int8(*((140, 144, 270) if INTERPRETED else (1000, 4112, 2064)))
    if not INTERPRETED and config not in gemm.gemm_configs(launch.capability(DEVICE)[0], True, tma):
        pytest.skip("not among this device's configurations")
    expected = _scaled((a.double() @ b.double()).float(), scale_a, scale_b)
    try:
        out = _run(a, b, scale_a, scale_b, torch.float32, config=config, tma=tma)
    except OutOfResources:  # a float32 result takes more memory
        out = _run(a, b, scale_a, scale_b, torch.bfloat16, config=config, tma=tma)
        expected = expected.bfloat16()
    assert same_bits(out, expected)


@on_hopper
@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("shape", HOPPER_SHAPES)
def test_int8_on_hopper_gives_the_same_bits(shape: tuple[int, int, int], index: int) -> None:
    config = gemm.hopper_configs(9, is_int8=True, tma=True)[index]
    a, b, scale_a, scale_b = (x.to(DEVICE) for x in _int8(*shape))
    one = torch.tensor([[0.0037]], device=DEVICE)
    for sa, sb, dtype in (
        (scale_a, scale_b, torch.bfloat16),
        (one, scale_b, torch.float32),
        (scale_a, None, torch.float16),
        (None, None, torch.int32),
    ):
        expected = gemm.scaled_mm(a, b, sa, sb, dtype, config=gemm.GemmConfig(64, 64, 4, 4, 1), tma=False)
        # Ten times: warps that read a stage too early would be right most of the time.
        for _ in range(10):
            assert same_bits(gemm.scaled_mm(a, b, sa, sb, dtype, config=config), expected)


@on_hopper
def test_a_launch_on_hopper_that_is_made_again_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    config = gemm.hopper_configs(9, is_int8=True, tma=True)[0]
    monkeypatch.setattr(launch, "tuned", lambda key, configs, run, device: config)
    a, b, scale_a, scale_b = (x.to(DEVICE) for x in _int8(1000, 400, 424))
    plain = gemm.GemmConfig(64, 64, 4, 4, 1)
    expected = gemm.scaled_mm(a, b, scale_a, scale_b, torch.bfloat16, config=plain, tma=False)
    again.forget()  # else one that another test made would be made again
    for _ in range(3):  # the first launch is remembered, with the descriptors of Gluon
        assert same_bits(gemm.scaled_mm(a, b, scale_a, scale_b, torch.bfloat16), expected)
    again.forget()


@on_hopper
@pytest.mark.parametrize("index", range(2))
@pytest.mark.parametrize("shape", HOPPER_SHAPES)
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3)])
def test_float8_on_hopper_gives_the_same_bits(
    shape: tuple[int, int, int], index: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    config = gemm.hopper_configs(9, is_int8=False, tma=True)[index]
    a, b, *scales = (x.to(DEVICE) for x in _float8(*shape, dtypes))
    plain = gemm.GemmConfig(64, 64, 4, 4, 1)
    for dtype in (torch.bfloat16, torch.float32):
        expected = gemm.scaled_mm(a, b, *scales, dtype, config=plain, tma=False)
        for _ in range(10):
            assert same_bits(gemm.scaled_mm(a, b, *scales, dtype, config=config), expected)


def test_every_tile_is_computed_when_there_are_several_groups_of_them() -> None:
    a, b, _, _ = _int8(9 * 64 + 5, 16, 70)  # ten rows of tiles: a group of eight and one of two
    out = _run(a, b, None, None, torch.float32, config=gemm.GemmConfig(64, 64, 4, 3, 1))
    assert same_bits(out, (a.double() @ b.double()).float())


@pytest.mark.parametrize("layout", ["both row-major", "both column-major", "a column-major", "misaligned"])
def test_any_layout_gives_the_same(layout: str) -> None:
    a, b, scale_a, scale_b = (x.to(DEVICE) for x in _int8(65, 96, 40))
    expected = gemm.scaled_mm(a, b, scale_a, scale_b, torch.float32)
    if layout in ("both column-major", "a column-major"):
        a = a.t().contiguous().t()
    if layout == "both row-major":
        b = b.contiguous()
    if layout == "misaligned":  # the rows do not start on 16 bytes: no descriptor describes them
        a = torch.cat([a, a[:, :5]], dim=1)[:, :96]
        assert a.stride() == (101, 1)
    assert same_bits(gemm.scaled_mm(a, b, scale_a, scale_b, torch.float32), expected)


def test_operands_at_full_scale_do_not_saturate() -> None:
    a = torch.full((70, 640), 127, dtype=torch.int8)
    out = _run(a, -a.t(), None, None, torch.float32)
    assert (out == -127 * 127 * 640).all()


@pytest.mark.parametrize("shape", [(0, 16, 16), (4, 0, 8), (4, 16, 0)])
def test_an_empty_operand_gives_zeros_or_nothing(shape: tuple[int, int, int]) -> None:
    a, b, scale_a, scale_b = _int8(*shape)
    assert same_bits(_run(a, b, scale_a, scale_b, torch.bfloat16), torch.zeros(shape[0], shape[2]).bfloat16())


def test_a_nan_scale_reaches_its_row_or_column_and_no_other() -> None:
    a, b, scale_a, scale_b = _int8(70, 64, 90)
    scale_a[69], scale_b[:, 7] = torch.nan, torch.nan
    nan = _run(a, b, scale_a, scale_b, torch.bfloat16).isnan()
    assert nan[69].all()
    assert nan[:, 7].all()
    assert nan.sum() == 70 + 90 - 1


def _float8(m: int, k: int, n: int, dtypes: tuple[torch.dtype, torch.dtype]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(m + k + n)
    a = torch.randn(m, k, generator=generator).to(dtypes[0])
    b = torch.randn(n, k, generator=generator).to(dtypes[1]).t()
    return a, b, torch.rand(m, 1, generator=generator), torch.rand(1, n, generator=generator)


def _bound(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    return rounding_of_a_float8_sum(a.double().abs() @ b.double().abs() * scale, a.shape[1])


@needs_float8
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
@pytest.mark.parametrize("tma", [True, False])
def test_float8_lies_within_the_rounding_of_a_float32_sum(
    shape: tuple[int, int, int], dtypes: tuple[torch.dtype, torch.dtype], tma: bool
) -> None:
    a, b, scale_a, scale_b = _float8(*shape, dtypes)
    scale = scale_a.double() * scale_b.double()
    exact = a.double() @ b.double() * scale
    error = (_run(a, b, scale_a, scale_b, torch.float32, tma=tma).double() - exact).abs()
    assert (error <= _bound(a, b, scale)).all()


@needs_float8
def test_every_float8_configuration_is_right_and_a_gpu_gives_the_same_bits_with_each() -> None:
    # Each adds in steps of 128, so ranks that chose different ones still agree.
    shape = (140, 144, 270) if INTERPRETED else (1000, 4112, 2064)
    a, b, scale_a, scale_b = _float8(*shape, (E4M3, E4M3))
    major = 9 if INTERPRETED else launch.capability(DEVICE)[0]
    results = [
        _run(a, b, scale_a, scale_b, torch.float32, config=config, tma=tma)
        for tma in ((True, False) if launch.has_tma(DEVICE) else (False,))
        for config in gemm.gemm_configs(major, False, tma)
    ]
    scale = scale_a.double() * scale_b.double()
    exact, bound = a.double() @ b.double() * scale, _bound(a, b, scale)
    assert all(((result.double() - exact).abs() <= bound).all() for result in results)
    # In the interpreter a tile's product is a BLAS call, whose order of summation depends on its size.
    assert INTERPRETED or all(same_bits(result, results[0]) for result in results)
