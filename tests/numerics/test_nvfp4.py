"""NVFP4 against its definition and torchao's, its rounding at random, its rotation, and its edges."""

import math

import pytest
import torch
from torch import Tensor

from lptune.numerics import dequantize_nvfp4, quantize_nvfp4, rotate_nvfp4, scaled_by_block
from lptune.numerics.nvfp4 import round_to_e2m1

NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def _matrix(m: int, k: int, seed: int = 0) -> Tensor:
    """Rows and columns of all sizes."""
    generator = torch.Generator().manual_seed(seed)
    x, sizes = torch.randn(m, k, generator=generator), torch.randn(m + k, generator=generator).exp()
    return x * sizes[:m, None] * sizes[m:]


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("shape", [(48, 64), (5, 16), (33, 40), (1, 1)])
def test_each_element_is_the_nearest_number_under_scales_of_its_block_and_tensor(
    shape: tuple[int, int], square: bool
) -> None:
    x_MK, ((m, k), rows) = _matrix(*shape).bfloat16(), (shape, 16 if square else 1)
    q_MK, scale, whole = quantize_nvfp4(x_MK, square=square)
    assert (q_MK.shape, scale.shape) == ((m, -(-k // 16) * 16), (m, -(-k // 16)))
    assert whole.item() == pytest.approx(x_MK.abs().max().item() / (6 * 448), rel=2**-23)
    assert not q_MK[:, k:].float().any()
    for i, j in ((i, j) for i in range(0, m, rows) for j in range(0, k, 16)):
        block = x_MK[i : i + rows, j : j + 16].double()
        scales = scale[i : i + rows, j // 16].double()
        exact = block.abs().max() / 6 / whole.double()
        # To nearest: half a step of 3 bits, and 2^-10 below the normal numbers.
        assert ((scales - exact).abs() <= (exact * 2**-4 * (1 + 1e-6)).clamp(min=2**-10)).all()
        scaled = (block / (scales[0] * whole)).clamp(-6, 6)
        q = q_MK[i : i + rows, j : j + 16][:, : block.shape[1]].double()
        assert torch.isin(q.abs().float(), NUMBERS).all()
        nearest = (scaled.abs()[..., None] - NUMBERS.double()).abs().amin(-1)
        assert ((q - scaled).abs() <= nearest + 1e-6).all()


def test_ties_go_to_even_and_what_is_larger_saturates() -> None:
    ties = (NUMBERS[1:] + NUMBERS[:-1]) / 2
    expected = torch.tensor([0.0, 1, 1, 2, 2, 4, 4])
    assert torch.equal(round_to_e2m1(ties).float(), expected)
    assert torch.equal(round_to_e2m1(-ties).float(), -expected)
    above, below = (torch.nextafter(ties, torch.tensor(side)) for side in (math.inf, -math.inf))
    assert torch.equal(round_to_e2m1(above).float(), NUMBERS[1:])
    assert torch.equal(round_to_e2m1(below).float(), NUMBERS[:-1])
    assert round_to_e2m1(torch.tensor([6.5, -100.0, math.inf])).tolist() == [6, -6, 6]


def test_square_blocks_give_the_transposed_matrix_the_same_values() -> None:
    w_NK = _matrix(48, 80)
    there, back = (
        dequantize_nvfp4(quantize_nvfp4(each, square=True), torch.float32) for each in (w_NK, w_NK.t())
    )
    assert torch.equal(there, back.t())


def test_stochastic_rounding_has_the_mean_of_each_element_that_does_not_saturate() -> None:
    x_MK, num_draws, generator = _matrix(16, 32), 4000, torch.Generator().manual_seed(1)
    _, scale, whole = quantize_nvfp4(x_MK)
    steps = scaled_by_block(torch.ones_like(x_MK), scale) * whole
    scaled = (x_MK / steps).double()
    kept = scaled.clamp(-6, 6)
    assert 0 < (scaled != kept).sum() < 32  # an amax whose scale was rounded down
    total, seen = torch.zeros_like(kept), torch.zeros_like(kept)
    for _ in range(num_draws):
        random = torch.rand(16, 32, generator=generator)
        q = quantize_nvfp4(x_MK, random_MK=random).q_MK.double()
        total += q
        seen = torch.maximum(seen, (q - kept).abs())
    above = torch.searchsorted(NUMBERS.double(), kept.abs(), right=True).clamp(max=7)
    step = (NUMBERS[above] - NUMBERS[above - 1]).double()
    assert (seen < step * (1 + 1e-6)).all()  # a neighbour
    fraction = (kept.abs() - NUMBERS[above - 1].double()) / step
    deviation = step * (fraction * (1 - fraction)).clamp(min=0).sqrt()
    assert ((total / num_draws - kept).abs() <= 5 * deviation / num_draws**0.5 + 1e-6).all()


def test_the_rotation_is_orthogonal_and_leaves_the_product_as_it_was() -> None:
    matrix = rotate_nvfp4(torch.eye(16))
    assert torch.equal(matrix @ matrix.t(), torch.eye(16))
    assert torch.equal(matrix.abs(), torch.full((16, 16), 0.25))
    assert not torch.equal(matrix, matrix.t())
    a, b = _matrix(24, 72), _matrix(40, 72, seed=1)
    exact = a.double() @ b.double().t()
    rotated = rotate_nvfp4(a).double() @ rotate_nvfp4(b).double().t()
    # Four additions and an exact quarter: each rotated row is off by at most 4 * 2^-24 of its blocks' norms.
    allowed = 2 * 4 * 2**-24 * a.double().norm(dim=1)[:, None] * b.double().norm(dim=1) * 4
    assert ((rotated - exact).abs() <= allowed).all()
    assert rotate_nvfp4(torch.ones(1, 16)).abs().max() < 4


def test_zeros_tiny_blocks_and_what_is_not_finite() -> None:
    zeros = quantize_nvfp4(torch.zeros(3, 20))
    assert dequantize_nvfp4(zeros, torch.float32).tolist() == [[0.0] * 32] * 3
    x_MK = torch.ones(1, 48)
    x_MK[0, 16:32], x_MK[0, 32:] = 2.0**-18, 2.0**-20
    found = dequantize_nvfp4(quantize_nvfp4(x_MK), torch.float32)
    assert (found[0, :16] == 1).all()
    assert (found[0, 16:32] > 2.0**-20).all()
    assert (found[0, 32:] == 0).all()
    for size in (1e-30, 1e-36, 3e38):
        tiny = (_matrix(4, 32).clamp(-1, 1) * size).float()
        off = (dequantize_nvfp4(quantize_nvfp4(tiny), torch.float32) - tiny).double().norm()
        assert off < 0.15 * tiny.double().norm()
    for value in (math.nan, math.inf, -math.inf):
        x_MK[0, 5] = value
        assert dequantize_nvfp4(quantize_nvfp4(x_MK), torch.float32).isnan().all()


def test_torchao_has_the_same_scales_and_numbers() -> None:
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor", reason="a peer in tests alone")
    x_MK = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    whole = nvfp4.per_tensor_amax_to_scale(x_MK.abs().max())
    scale, packed = nvfp4.nvfp4_quantize(x_MK, 16, whole)
    ours = quantize_nvfp4(x_MK)
    numbers = torch.cat([NUMBERS, -NUMBERS])
    theirs = torch.stack([numbers[(packed & 15).long()], numbers[(packed >> 4).long()]], -1).flatten(1)
    assert torch.equal(ours.scale, scale.view_as(ours.scale))
    assert torch.equal(ours.q_MK.float(), theirs)
    assert ours.tensor_scale_11.item() == pytest.approx(whole.item(), rel=2**-23)
