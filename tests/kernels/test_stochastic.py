"""The quantizers that round stochastically give, on every backend of a CPU, the bits of lptune.numerics."""

import itertools

import pytest
import torch
from torch import Tensor

from lptune import kernels, numerics
from lptune.numerics import FORMATS
from tests.helpers.definitions import SALTS, expected_stochastic, hard_matrix

pytestmark = pytest.mark.usefixtures("cpu_quantizers")


def _bits(each: Tensor) -> Tensor:
    return each.contiguous().view(torch.uint8)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("fmt", list(FORMATS))
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_the_bits_are_those_of_the_definition(dim: int, fmt: str, power_of_two: bool) -> None:
    key, form = numerics.random_key(0, 1, "a"), FORMATS[fmt]
    for dtype, micro_batch in itertools.product((torch.bfloat16, torch.float32), (0, 3, 2**32 // 2310)):
        x, handle = hard_matrix(dtype), kernels.layer_handle(-1)
        handle[kernels.KEY], handle[kernels.MICRO_BATCH] = key, micro_batch
        by_row = torch.linspace(0.1, 2, 33)[:, None]
        for multiplier in (None, {1: torch.linspace(0.1, 2, 70)[None], 0: by_row, 2: None}[dim]):
            folded = x if multiplier is None else x.float() * multiplier
            first = micro_batch * x.numel()  # from 0 on; and across 2**32, the last element of 32 bits
            want = expected_stochastic(folded, form, power_of_two, dim, key ^ SALTS[dim], first)
            given = {"power_of_two": power_of_two}
            ours: list[tuple[Tensor, Tensor]] = []
            if dim == 1:
                ours = [
                    kernels.quantize_rows_stochastic(x, fmt, handle, multiplier_1K=multiplier, **given),
                    kernels.quantize_rows_stochastic(
                        x.t().contiguous().t(), fmt, handle, multiplier_1K=multiplier, **given
                    ),
                ]
            for transposed in (False, True) if dim != 1 else ():
                keys = given | {"transposed": transposed}
                if dim == 0:
                    each: tuple[Tensor, Tensor] = kernels.quantize_columns_stochastic(
                        x, fmt, handle, multiplier_M1=multiplier, **keys
                    )
                else:
                    each = kernels.quantize_tensor_stochastic(x, fmt, handle, **keys)
                assert (each[0].t() if transposed else each[0]).is_contiguous()
                ours.append(each)
            if dim == 2:
                plain, by_columns = kernels.quantize_tensor_stochastic_both_ways(x, fmt, handle, **given)
                ours += [plain, (by_columns, plain.scale_11)]
                assert plain.q_MK.is_contiguous()
                assert by_columns.t().is_contiguous()
            for q, scale in ours:
                assert torch.equal(_bits(q), _bits(want[0]))
                assert torch.equal(scale, want[1])


@pytest.mark.parametrize("first", [0, 1000, 2**32 - 100, 2**40])
def test_weight_rows_are_updated_by_the_bits_of_their_elements_or_kept(first: int) -> None:
    w, key = hard_matrix(), numerics.random_key(0, 1, "w")
    want = expected_stochastic(w, FORMATS["int8"], False, 1, key, first)
    before = kernels.quantize_rows(torch.randn(33, 70), "int8")
    given = {"q_before": before.q_MK, "scale_before": before.scale_M1}
    for ours in (
        kernels.quantize_weight_rows(w, key, first),
        kernels.quantize_weight_rows(w, key, first, **given, found_inf=torch.zeros(())),
    ):
        assert torch.equal(ours.q_MK, want[0])
        assert torch.equal(ours.scale_M1, want[1])
    kept = kernels.quantize_weight_rows(w, key, first, **given, found_inf=torch.ones(()))
    assert torch.equal(kept.q_MK, before.q_MK)
    assert torch.equal(kept.scale_M1, before.scale_M1)
    part = kernels.quantize_weight_rows(w[10:], key, first + 10 * 70)
    assert torch.equal(part.q_MK, want[0][10:])


@pytest.mark.parametrize("first", [0, 2**32 - 100, 2**40])
def test_bfloat16_has_the_bits_of_the_definition_and_keeps_what_it_can_hold(first: int) -> None:
    x, key = hard_matrix(), numerics.random_key(0, 1, "w")
    index = torch.arange(first, first + x.numel()).view(x.shape)
    expected = numerics.stochastic_round_to_bfloat16(x, numerics.uniform(key, index))
    assert torch.equal(_bits(kernels.round_to_bfloat16(x, key, first)), _bits(expected))
    part = kernels.round_to_bfloat16(x[10:], key, first + 10 * 70)
    assert torch.equal(_bits(part), _bits(expected[10:]))
    special = torch.tensor([[0.0, -0.0, torch.inf, -torch.inf, 1.0, -3.0e38, 1e-40]]).bfloat16()
    assert torch.equal(_bits(kernels.round_to_bfloat16(special.float(), key, first)), _bits(special))
    odd = torch.tensor([[0x7F800001, -1]], dtype=torch.int32).view(torch.float32)  # NaN, of all payloads
    assert kernels.round_to_bfloat16(odd, key, first).isnan().all()


def test_the_ops_fit_the_contract_of_torch() -> None:
    x, handle = torch.randn(20, 36), kernels.layer_handle(-1)
    handle[kernels.KEY] = 5
    ops = torch.ops.lptune
    for transposed in (False, True):
        for dim in (0, 1, 2):
            torch.library.opcheck(
                ops.quantize_stochastic.default, (x, None, "e4m3", False, dim, handle, transposed)
            )
    torch.library.opcheck(ops.quantize_tensor_stochastic_both_ways.default, (x, "int8", handle))
    scale = torch.rand(20, 1)
    for found_inf in (torch.zeros(()), torch.ones(())):
        arguments = (x, 5, 0, x.to(torch.int8), scale, found_inf)
        torch.library.opcheck(ops.quantize_weight_rows.default, arguments)
    torch.library.opcheck(ops.round_to_bfloat16.default, (x, 5, 0))
    torch.library.opcheck(ops.block_amaxes.default, (x, 16, 3))
    torch.library.opcheck(
        ops.quantize_by_amax.default, (x, scale[:1], "int8", False, None, 0, torch.bfloat16)
    )
    torch.library.opcheck(ops.quantize_delayed_both_ways.default, (x, "e4m3", kernels.layer_handle(-1), "x"))
