"""NVFP4's ops; torch's GEMM for it, held to the rules of ScaledBlas.cpp by a stand-in that computes it."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lptune import numerics
from lptune.kernels import KEY, backend, choose_backend, layer_handle, nvfp4_mm, quantize_nvfp4, record_gemms
from lptune.numerics import dequantize_nvfp4

NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def _operands(m: int, k: int, n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.arange(1, m + 1)[:, None]  # of all sizes
    return torch.randn(m, k, generator=generator) * rows, torch.randn(n, k, generator=generator)


@pytest.mark.parametrize("by", ["reference", "torch"])
@pytest.mark.parametrize("shape", [(9, 64, 48), (200, 144, 160), (130, 16, 128), (33, 40, 16), (0, 16, 16)])
def test_the_product_is_that_of_the_dequantized_operands(
    shape: tuple[int, int, int], by: str, request: pytest.FixtureRequest
) -> None:
    if by == "torch":  # with packed numbers and tiles of scales
        request.getfixturevalue("on_torch")
    a_MK, b_NK = _operands(*shape)
    a, b = quantize_nvfp4(a_MK, 1), quantize_nvfp4(b_NK, 1, square=True)
    scales = (a.scale, b.scale.t(), a.tensor_scale_11, b.tensor_scale_11)
    with record_gemms() as executed:
        found = nvfp4_mm(a.q_MK, b.q_MK.t(), *scales, torch.float32, layer_handle(3), 0)
    assert dict(executed) == {(3, 0): 1}
    a64, b64 = (dequantize_nvfp4(each, torch.float32).double() for each in (a, b))
    # A sum of exact products in any order, and the scales' roundings here and in `dequantize_nvfp4`.
    allowed = (shape[1] + 6) * 2**-24 * (a64.abs() @ b64.abs().t())
    assert ((found.double() - a64 @ b64.t()).abs() <= allowed).all()


@pytest.mark.parametrize("dim", [0, 1])
def test_an_operand_is_transposed_rotated_and_rounded_at_random_in_this_order(dim: int) -> None:
    x_MK, handle = _operands(37, 48, 1)[0], layer_handle(-1)
    handle[KEY] = 5
    along = x_MK if dim == 1 else x_MK.t()
    found = quantize_nvfp4(x_MK, dim, rotated=True)
    for ours, theirs in zip(found, numerics.quantize_nvfp4(numerics.rotate_nvfp4(along)), strict=True):
        assert torch.equal(ours.float(), theirs.float())
    nearest, random = quantize_nvfp4(x_MK, dim), quantize_nvfp4(x_MK, dim, layer=handle)
    assert torch.equal(nearest.scale.float(), random.scale.float())
    assert 0.1 < (nearest.q_MK.float() != random.q_MK.float()).float().mean() < 0.5
    assert torch.equal(random.q_MK.float(), quantize_nvfp4(x_MK, dim, layer=handle).q_MK.float())
    handle[KEY] = 0
    with pytest.raises(RuntimeError, match=r"no random key: call low\.micro_batch"):
        quantize_nvfp4(x_MK, dim, layer=handle)


@pytest.mark.parametrize("k", [32, 37])
def test_the_ops_are_what_torch_asks_of_them(k: int) -> None:
    x_MK, handle = torch.randn(21, k), layer_handle(-1)
    handle[KEY] = 5
    for dim, keys in ((1, {}), (0, {"square": True}), (0, {"rotated": True, "layer": handle})):
        torch.library.opcheck(torch.ops.lptune.quantize_nvfp4.default, (x_MK, dim), keys)
    a = quantize_nvfp4(x_MK, 1)
    operands = (a.q_MK, a.q_MK.t(), a.scale, a.scale.t(), a.tensor_scale_11, a.tensor_scale_11)
    tests = ("test_faketensor", "test_autograd_registration")  # test_schema multiplies float8
    args = (*operands, torch.bfloat16, handle, 0)
    torch.library.opcheck(torch.ops.lptune.nvfp4_mm.default, args, test_utils=tests)
    with pytest.raises(ValueError, match="nvfp4_mm needs b, scale_a and scale_b of"):
        nvfp4_mm(a.q_MK, a.q_MK.t(), a.scale[1:], *operands[3:], torch.bfloat16, handle, 0)


def test_it_is_native_on_blackwell_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability in ((8, 9), (9, 0), (10, 0), (10, 3), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        choose_backend.cache_clear()
        assert choose_backend("fp4_gemm", "cuda") == ("torch" if capability >= (10, 0) else "reference")
    choose_backend.cache_clear()


def _decoded(packed: Tensor) -> Tensor:
    assert packed.dtype == torch.float4_e2m1fn_x2
    codes = packed.view(torch.uint8).long()
    return torch.stack([NUMBERS[codes & 15], NUMBERS[codes >> 4]], -1).flatten(1)


def _untiled(scale: Tensor, rows: int, blocks: int) -> Tensor:
    """Where cuBLAS's documentation says the scale of (row, block) is."""
    assert scale.dtype == torch.float8_e4m3fn
    assert scale.is_contiguous()
    across = -(-blocks // 4)
    assert scale.numel() == -(-rows // 128) * across * 512
    r, c = torch.arange(rows)[:, None], torch.arange(blocks)[None]
    return scale.double()[((r // 128) * across + c // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4]


def _scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: list[Tensor],
    recipe_a: list[F.ScalingType],
    scale_b: list[Tensor],
    recipe_b: list[F.ScalingType],
    swizzle_a: list[F.SwizzleType],
    swizzle_b: list[F.SwizzleType],
    *,
    output_dtype: torch.dtype,
) -> Tensor:
    """F.scaled_mm of two matrices in NVFP4."""
    assert recipe_a == recipe_b == [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
    assert swizzle_a == swizzle_b == [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
    (m, half), n = a.shape, b.shape[1]
    assert a.stride() == (half, 1)
    assert b.stride() == (1, half), "b must be column-major"
    assert half % 16 == n % 16 == 0
    assert all(each[1].dtype == torch.float32 and each[1].numel() == 1 for each in (scale_a, scale_b))
    values = [
        _decoded(q) * _untiled(scale, rows, half // 8).repeat_interleave(16, 1)
        for q, scale, rows in ((a, scale_a[0], m), (b.t(), scale_b[0], n))
    ]
    return (values[0] @ values[1].t() * (scale_a[1] * scale_b[1]).double()).to(output_dtype)


@pytest.fixture
def on_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sends the GEMM to torch's call, and this to the stand-in."""
    choose_backend.cache_clear()
    monkeypatch.setitem(backend.BACKENDS["fp4_gemm"], "cpu", ("torch", "reference"))
    monkeypatch.setattr(backend, "_works", lambda name, *_: name in ("torch", "reference"))
    monkeypatch.setattr(F, "scaled_mm", _scaled_mm)
    yield
    choose_backend.cache_clear()
