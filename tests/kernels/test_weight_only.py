"""GEMMs in compute dtype with a weight in 8 bits, and one that is rounded to 4."""

import pytest
import torch

from lptune import numerics
from lptune.kernels import int4_weight_mm, layer_handle, record_gemms, weight_only_mm
from lptune.numerics import dequantize_groups, quantize_groups, quantize_rows
from tests.proofs import noise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("t", "k", "n"), [(33, 48, 80), (1, 16, 16), (0, 32, 16)])
def test_it_is_the_compute_dtypes_own_gemm_with_the_dequantized_weight(
    dtype: torch.dtype, t: int, k: int, n: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    w = quantize_rows(torch.randn(n, k, generator=generator))
    for transposed in (True, False):
        a = torch.randn(t, k if transposed else n, generator=generator).to(dtype)
        out = weight_only_mm(a, *w, transposed, layer_handle(-1), 0)
        weight = numerics.dequantize(w, dtype)
        assert torch.equal(out, a @ (weight.t() if transposed else weight))
        # Against float64: the products' sum in float32, and roundings of the weight and the result.
        truth = a.double() @ (w.q_MK.double() * w.scale_M1.double()) if not transposed else None
        if truth is not None and t:
            bound = 2.0**-8 if dtype == torch.bfloat16 else n * 2.0**-24
            assert noise.relative_error(out, truth) <= bound


def test_rows_of_any_stride_give_the_same_bits() -> None:
    # The gathered weight lies in a buffer whose rows begin with the scale.
    w = quantize_rows(torch.randn(32, 48))
    wide = torch.zeros(32, 64, dtype=torch.int8)
    wide[:, 16:] = w.q_MK
    a = torch.randn(7, 48)
    handle = layer_handle(-1)
    expected = weight_only_mm(a, *w, True, handle, 0)
    assert torch.equal(weight_only_mm(a, wide[:, 16:], w.scale_M1, True, handle, 0), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_in_4_bits_is_rounded_for_the_product_alone(dtype: torch.dtype) -> None:
    a_TK, a_TN, w_NK = (torch.randn(sizes).to(dtype) for sizes in ((9, 72), (9, 40), (40, 72)))
    before, rounded = w_NK.clone(), dequantize_groups(quantize_groups(w_NK), dtype)
    handle = layer_handle(-1)
    assert torch.equal(int4_weight_mm(a_TK, w_NK, True, handle, 0), a_TK @ rounded.t())
    assert torch.equal(int4_weight_mm(a_TN, w_NK, False, handle, 1), a_TN @ rounded)
    assert torch.equal(w_NK, before)


def test_it_is_a_well_formed_op_and_counted() -> None:
    w = quantize_rows(torch.randn(32, 48))
    handle = layer_handle(3)
    with record_gemms() as executed:
        weight_only_mm(torch.randn(5, 48), *w, True, handle, 0)
        weight_only_mm(torch.randn(5, 32), *w, False, handle, 1)
        int4_weight_mm(torch.randn(5, 48), torch.randn(32, 48), True, handle, 0)
    assert dict(executed) == {(3, 0): 2, (3, 1): 1}
    for transposed, inner in ((True, 48), (False, 32)):
        torch.library.opcheck(
            torch.ops.lptune.weight_only_mm.default, (torch.randn(5, inner), *w, transposed, handle, 0)
        )
        torch.library.opcheck(
            torch.ops.lptune.int4_weight_mm.default,
            (torch.randn(5, inner), torch.randn(32, 48), transposed, handle, 0),
        )
