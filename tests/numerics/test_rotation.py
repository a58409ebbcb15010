"""The rotation by Hadamard blocks: orthogonal, its own inverse, of any size, and it spreads an outlier."""

import math

import pytest
import torch
from torch import Tensor

from lptune import numerics
from lptune.numerics import rotate, rotation_runs
from tests.proofs import noise

SIZES = [1, 2, 3, 37, 64, 128, 129, 300, 640]


def _hadamard(size: int) -> Tensor:
    """The block-diagonal H in float64, by Sylvester's doubling."""
    blocks = []
    for _, block, count in rotation_runs(size):
        matrix = torch.ones(1, 1, dtype=torch.float64)
        while len(matrix) < block:
            matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
        blocks += [matrix / math.sqrt(block)] * count
    return torch.block_diag(*blocks)


@pytest.mark.parametrize("size", SIZES)
def test_it_multiplies_by_an_orthogonal_matrix_that_is_its_own_inverse(size: int) -> None:
    h_KK = _hadamard(size)
    assert h_KK.shape == (size, size)
    assert torch.allclose(h_KK @ h_KK, torch.eye(size, dtype=torch.float64), atol=1e-14)
    x_MK = torch.randn(5, size, generator=torch.Generator().manual_seed(size))
    # Seven additions and one product round by 2**-24 of at most the sum of magnitudes; so does the factor.
    bound_MK = 9 * 2.0**-24 * (x_MK.double().abs() @ h_KK.abs())
    assert ((rotate(x_MK).double() - x_MK.double() @ h_KK).abs() <= bound_MK).all()
    assert torch.allclose(rotate(rotate(x_MK)), x_MK, atol=1e-5)


def test_a_size_is_cut_into_blocks_of_128_and_the_powers_of_two_of_the_rest() -> None:
    assert rotation_runs(300) == [(0, 128, 2), (256, 32, 1), (288, 8, 1), (296, 4, 1)]
    assert rotation_runs(129) == [(0, 128, 1), (128, 1, 1)]
    for shape in ((0, 6), (6, 0)):
        assert rotate(torch.ones(shape)).shape == shape


def test_zeros_stay_zeros_and_what_is_not_finite_stays_in_its_block() -> None:
    x = torch.zeros(3, 256)
    x[1] = torch.randn(256, generator=torch.Generator().manual_seed(0))
    x[2, 130] = math.inf
    rotated = rotate(x)
    assert (rotated[0] == 0).all()
    assert rotated[1].isfinite().all()
    assert (rotated[2, :128] == 0).all()
    assert not rotated[2, 128:].isfinite().any()
    assert rotate(x.fill_(math.nan)).isnan().all()


def test_an_outlier_channel_costs_the_others_a_fraction_of_what_it_did() -> None:
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    x[:, 7] *= 1000

    def error_of_the_others(seen: Tensor) -> float:
        return noise.relative_error(seen[:, 8:], x[:, 8:])

    plain = numerics.dequantize(numerics.quantize_rows(x))
    rotated = rotate(numerics.dequantize(numerics.quantize_rows(rotate(x))))
    # A step of 1000 / 127 rounds all others to 0; of the rotated row it is 1 / sqrt(128) of that.
    assert error_of_the_others(plain) > 0.7
    assert error_of_the_others(rotated) < 0.25
