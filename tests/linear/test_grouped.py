"""Grouped linear layers (experts) in every kind that has GEMMs for groups: the three GEMMs are, bit for bit,
those of E LowPrecisionLinears, which test_linear.py compares with float64. Odd and empty groups, one counted
op for each GEMM, compiled as eager, high GEMMs against float64."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from lptune import kernels, linear
from lptune.config import PrecisionConfig
from lptune.kernels import record_gemms
from lptune.linear.grouped import LowPrecisionGroupedLinear
from lptune.models.hf.experts import GroupedLinear, ends_of_groups

KINDS = ("int8_rowcol", "int8_rotated", "float8_rowwise", "float8_rowwise_with_gw_hp")
K, N = 128, 80
SIZES = {
    "one": [37],
    "odd": [5, 1, 23, 8],
    "empty": [0, 17, 0, 0, 40, 0],
    "all in the last": [0, 0, 64],
    "128 experts": [(7 * number) % 5 for number in range(128)],
}


def layer(num_groups: int, kind: str, dtype: torch.dtype = torch.float32) -> LowPrecisionGroupedLinear:
    torch.manual_seed(0)
    model = nn.Sequential(GroupedLinear(num_groups, K, N).to(dtype))
    linear.convert(model, PrecisionConfig(kind=kind, emulate=kind.startswith("float8"), verify=False))
    assert isinstance(model[0], LowPrecisionGroupedLinear)
    return model[0]


def rows(sizes: Sequence[int], width: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(sum(sizes), width, generator=draw).to(dtype)


def ends(sizes: Sequence[int]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).int()


def gemms(
    module: LowPrecisionGroupedLinear, x: Tensor, g: Tensor, sizes: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """output, grad_input, grad_weight"""
    x = x.clone().requires_grad_()
    module.weight.grad = None
    out = module(x, ends(sizes))
    out.backward(g)
    assert x.grad is not None
    assert module.weight.grad is not None
    return out.detach(), x.grad, module.weight.grad


def exact(module: nn.Linear, x: Tensor, g: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    w = module.weight.detach().double().view(len(sizes), N, K)
    groups = list(zip(x.double().split(list(sizes)), g.double().split(list(sizes)), w, strict=True))
    return (
        torch.cat([x_e @ w_e.t() for x_e, _, w_e in groups]),
        torch.cat([g_e @ w_e for _, g_e, w_e in groups]),
        torch.cat([g_e.t() @ x_e for x_e, g_e, _ in groups]),
    )


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_each_gemm_is_that_of_a_layer_for_each_group(kind: str, sizes: list[int]) -> None:
    module, x, g = layer(len(sizes), kind), rows(sizes, K), rows(sizes, N, seed=2)
    with record_gemms() as executed:
        found = gemms(module, x, g, sizes)
    low = 2 if kind.endswith("gw_hp") else 3
    assert executed == {(module.number, gemm): 1 for gemm in range(low)}  # counted once, whatever is empty
    # Bit for bit what E LowPrecisionLinears give, which test_linear.py compares with float64.
    start = 0
    for group, size in enumerate(sizes):
        own = nn.Sequential(nn.Linear(K, N, bias=False))
        own[0].weight.data.copy_(module.weight.detach().view(len(sizes), N, K)[group])
        linear.convert(own, PrecisionConfig(kind=kind, emulate=module.spec.emulate, verify=False))
        part, weights = slice(start, start + size), slice(group * N, (group + 1) * N)
        start += size
        if not size:
            assert not found[2][weights].any()
            continue
        x_e = x[part].clone().requires_grad_()
        own(x_e).backward(g[part])
        assert torch.equal(found[0][part], own(x[part]).detach())
        assert torch.equal(found[1][part], x_e.grad)
        assert torch.equal(found[2][weights], own[0].weight.grad)


@pytest.mark.parametrize("kind", KINDS)
def test_high_gemms_are_exact(kind: str) -> None:
    sizes = [5, 0, 11]
    module, x, g = layer(len(sizes), kind), rows(sizes, K), rows(sizes, N, seed=2)
    module.spec = module.spec._replace(
        output="high", grad_input="high", grad_weight="high", gathers_low=False
    )
    for low, high in zip(gemms(module, x, g, sizes), exact(module, x, g, sizes), strict=True):
        torch.testing.assert_close(low.double(), high, rtol=1e-5, atol=1e-5)


def test_zeros_and_not_finite_values_stay_what_they_are() -> None:
    sizes = [6, 0, 10]
    module, x, g = layer(len(sizes), "int8_rowcol"), rows(sizes, K), rows(sizes, N, seed=2)
    assert not any(each.any() for each in gemms(module, x * 0, g * 0, sizes))
    x[3, 5] = torch.nan
    out, _, grad_weight = gemms(module, x, g, sizes)
    assert not out[3].isfinite().any()
    assert out[4:].isfinite().all()
    assert grad_weight[2 * N :].isfinite().all()  # another group
    assert not grad_weight[:N].isfinite().all()


def test_ops_are_declared_as_they_are() -> None:
    sizes = [3, 0, 9]
    x, g = rows(sizes, K), rows(sizes, N, seed=2)
    xq, xs = kernels.quantize_rows(x, "int8")
    wq, ws = kernels.quantize_rows(torch.randn(3 * N, K), "int8")
    gq, gs = kernels.quantize_rows(g, "int8")
    handle, where = kernels.layer_handle(-1), ends(sizes)
    ops = torch.ops.lptune
    calls = [
        (ops.grouped_mm.default, (xq, wq, xs, ws, where, torch.float32, handle, 0, True)),
        (ops.grouped_mm.default, (gq, wq, gs, None, where, torch.float32, handle, 1, False)),
        (ops.quantize_grouped_columns.default, (x, "int8", where)),
        (ops.grouped_outer.default, (gq, xq, torch.ones(3, N), None, where, torch.float32, handle)),
    ]
    for op, args in calls:
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


def test_ends_of_groups() -> None:
    assert ends_of_groups(torch.tensor([1, 1, 3]), 5).tolist() == [0, 2, 2, 3, 3]


def test_a_compiled_layer_gives_the_bits_of_an_eager_one() -> None:
    sizes = [5, 0, 11]
    module, x, g = layer(len(sizes), "int8_rotated"), rows(sizes, K), rows(sizes, N, seed=2)
    expected = gemms(module, x, g, sizes)
    compiled = torch.compile(module, fullgraph=True, dynamic=False)
    x = x.clone().requires_grad_()
    module.weight.grad = None
    out = compiled(x, ends(sizes))
    out.backward(g)
    for found, eager in zip((out.detach(), x.grad, module.weight.grad), expected, strict=True):
        assert torch.equal(found, eager)


def test_kinds_without_gemms_for_groups_leave_the_layer_high_and_say_why() -> None:
    for kind, options in (
        ("int8_tensorwise", {}),
        ("int8_rowcol", {"stochastic_rounding": True}),
        ("int8_rowcol", {"grad_input": "column"}),
    ):
        model = nn.Sequential(nn.Linear(K, K), GroupedLinear(3, K, N))
        plan = linear.convert(model, PrecisionConfig(kind=kind, **options))
        assert plan.layers[1].spec is None
        assert "group" in str(plan.layers[1].reason)
        assert type(model[1]) is GroupedLinear


def test_unconvert_gives_the_grouped_layer_back() -> None:
    model = nn.Sequential(GroupedLinear(3, K, N))
    x, where = rows([2, 3, 4], K), ends([2, 3, 4])
    before = model[0](x, where)
    linear.convert(model, "int8_rowcol")
    assert linear.unconvert(model) == 1
    assert type(model[0]) is GroupedLinear
    assert torch.equal(model[0](x, where), before)
