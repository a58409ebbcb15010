"""Ternary weights as ops."""

import pytest
import torch

from lptune import numerics
from lptune.kernels import quantize_ternary, unpack_ternary


@pytest.mark.parametrize("transposed", [False, True])
def test_they_are_well_formed_ops_with_the_codes_of_the_definition_in_either_layout(transposed: bool) -> None:
    w_NK = torch.randn(32, 48, generator=torch.Generator().manual_seed(0))
    codes = numerics.quantize_ternary(w_NK)
    wide_NB = torch.zeros(32, 20, dtype=torch.uint8)
    wide_NB[:, 8:] = numerics.pack_ternary(codes.q_MK, 1)  # rows of a buffer with something before them
    quantized = quantize_ternary(w_NK, transposed=transposed)
    for found in (quantized.q_MK, unpack_ternary(wide_NB[:, 8:], transposed=transposed)):
        assert torch.equal(found, codes.q_MK)
        assert found.stride() == ((1, 32) if transposed else (48, 1))
    assert torch.equal(quantized.scale_11, codes.scale_11)
    for op, argument in (("quantize_ternary", w_NK), ("unpack_ternary", wide_NB[:, 8:])):
        torch.library.opcheck(getattr(torch.ops.lptune, op).default, (argument, transposed))
