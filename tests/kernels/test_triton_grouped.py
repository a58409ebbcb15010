"""The Triton kernels of grouped layers against one group after another: INT8 and quantizers to the bit,
float8 within what float32 addition allows. Empty groups, odd sizes, poisoned outputs."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lptune.kernels.layout import run_rows
from lptune.numerics import FORMATS, quantize_columns, quantize_rows
from tests.helpers.triton_device import (
    DEVICE,
    INTERPRETED,
    poisoned_outputs,
    rounding_of_a_float8_sum,
    same_bits,
)

from lptune.kernels.triton import by_row, gemm, grouped  # isort: skip  # only once there is a device

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
assert poisoned_outputs

SIZES = {
    "odd": [5, 1, 70],
    "empty": [0, 17, 0, 0, 140, 0],
    "one": [33],
    "last": [0, 0, 9],
    "long": [300, 0, 129],
}
if not INTERPRETED:
    SIZES["many"] = [(number * 97) % 611 for number in range(40)]
    SIZES["uneven"] = [3000, 0, 1, 900, 0, 0]
K, N = (80, 48) if INTERPRETED else (368, 272)
E4M3 = torch.float8_e4m3fn


def ends(sizes: list[int]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).int()


def values(rows: int, columns: int, dtype: torch.dtype, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    if dtype == torch.int8:
        return torch.randint(-127, 128, (rows, columns), dtype=dtype, generator=draw)
    return torch.randn(rows, columns, generator=draw).to(dtype)


def scales(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(3)) + 0.5


def in_runs(x: Tensor, sizes: list[int]) -> Tensor:
    """On the device, each group's rows at a multiple of 128; the rest is 0, and after the last group NaN."""
    parts = [F.pad(part.view(torch.int8), (0, 0, 0, -len(part) % 128)) for part in x.split(sizes)]
    found = torch.cat(parts)
    room = run_rows(len(x), len(sizes)) - len(found)
    return F.pad(found, (0, 0, 0, room), value=127).view(x.dtype).to(DEVICE).t().contiguous().t()


def config_of(number: int, dtype: torch.dtype) -> Any:
    """One of the configurations that autotuning may choose, on a Hopper GPU also of hopper.py's kernel."""
    found = [*grouped.CONFIGS[:: 2 if INTERPRETED else 1]]
    if not INTERPRETED:
        major = torch.cuda.get_device_capability()[0]
        fast = gemm.hopper_configs(major, dtype == torch.int8, tma=True)
        found += [each for each in fast if each.block_m == 128]
    if number >= len(found):
        pytest.skip("so many configurations only on Hopper")
    return found[number]


def check(found: Tensor, expected: Tensor, exact: Tensor, dtype: torch.dtype, longest: int) -> None:
    if dtype == torch.int8:  # `+ 0.0` in the sums: integers have no negative zero
        assert same_bits(found, expected)
    else:  # the bound of test_triton_gemm.py; `exact` is the sum of magnitudes
        bound = rounding_of_a_float8_sum(exact.cpu(), longest)
        assert ((found.cpu() - expected).abs() <= bound).all()


@pytest.mark.parametrize("number", range(2 if INTERPRETED else 5))
@pytest.mark.parametrize("dtype", [torch.int8, E4M3])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_each_group_multiplies_its_own_rows(sizes: list[int], dtype: torch.dtype, number: int) -> None:
    config = config_of(number, dtype)
    a, b = values(sum(sizes), K, dtype, 1), values(len(sizes) * N, K, dtype, 2)
    scale_a, scale_b = scales(sum(sizes), 1), scales(len(sizes) * N, 1)
    groups = list(
        zip(a.double().split(sizes), scale_a.split(sizes), b.double().split(N), scale_b.split(N), strict=True)
    )
    for with_b in (True, False):
        found = grouped.grouped_mm(
            a.to(DEVICE),
            b.to(DEVICE),
            scale_a.to(DEVICE),
            scale_b.to(DEVICE) if with_b else None,
            ends(sizes).to(DEVICE),
            torch.float32,
            config,
        )
        parts = [(x @ w.t() + 0.0).float() * s * (t.t() if with_b else 1.0) for x, s, w, t in groups]
        exact = [(x.abs() @ w.abs().t()).float() * s * (t.t() if with_b else 1.0) for x, s, w, t in groups]
        check(found, torch.cat(parts), torch.cat(exact), dtype, K)


@pytest.mark.parametrize("number", range(2 if INTERPRETED else 5))
@pytest.mark.parametrize("dtype", [torch.int8, E4M3])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_each_group_contracts_over_its_own_rows(sizes: list[int], dtype: torch.dtype, number: int) -> None:
    config = config_of(number, dtype)
    a, b = values(sum(sizes), N, dtype, 1), values(sum(sizes), K, dtype, 2)
    scale_a, scale_b = scales(len(sizes), N), scales(len(sizes), K)
    groups = list(zip(a.double().split(sizes), b.double().split(sizes), scale_a, scale_b, strict=True))
    for with_b in (True, False):
        found = grouped.grouped_outer(
            in_runs(a, sizes),
            in_runs(b, sizes),
            scale_a.to(DEVICE),
            scale_b.to(DEVICE) if with_b else None,
            ends(sizes).to(DEVICE),
            torch.float32,
            config,
        )
        parts = [(g.t() @ x + 0.0).float() * s[:, None] * (t if with_b else 1.0) for g, x, s, t in groups]
        exact = [
            (g.abs().t() @ x.abs()).float() * s[:, None] * (t if with_b else 1.0) for g, x, s, t in groups
        ]
        check(found, torch.cat(parts), torch.cat(exact), dtype, max(sizes))


@pytest.mark.parametrize("fmt", ["int8", "e4m3"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_columns_are_quantized_within_a_group(sizes: list[int], fmt: str) -> None:
    x = values(sum(sizes), K, torch.float32, 1)
    x[:, 3] = 0.0
    multiplier = scales(sum(sizes), 1)
    for folded in (None, multiplier):
        q, scale = grouped.quantize_grouped_columns(
            x.to(DEVICE), fmt, ends(sizes).to(DEVICE), folded if folded is None else folded.to(DEVICE), False
        )
        whole, start = x if folded is None else x * folded, 0
        for group, part in enumerate(whole.split(sizes)):
            if len(part):
                expected = quantize_columns(part, FORMATS[fmt])
                assert same_bits(q[start : start + len(part)], expected.q_MK)
                assert same_bits(scale[group], expected.scale_1K[0])
            else:
                assert not scale[group].any()
            start += -(-len(part) // 128) * 128
            assert not q[start - -len(part) % 128 : start].view(torch.int8).any()
        assert not q[start:].view(torch.int8).any()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_rows_are_multiplied_by_what_is_their_groups(sizes: list[int]) -> None:
    x, multiplier = values(sum(sizes), K, torch.bfloat16, 1), scales(len(sizes), K)
    where = ends(sizes).to(DEVICE)
    q, scale = by_row.quantize_rows(x.to(DEVICE), multiplier.to(DEVICE), "int8", False, False, ends_E=where)
    folded = x.float() * multiplier.repeat_interleave(torch.tensor(sizes), 0)
    expected = quantize_rows(folded, FORMATS["int8"])
    assert same_bits(q, expected.q_MK)
    assert same_bits(scale, expected.scale_M1)


@pytest.mark.parametrize(("groups", "rows", "columns"), [(1, 48, 80), (3, 80, 48), (2, 17, 130)])
def test_each_matrix_is_turned(groups: int, rows: int, columns: int) -> None:
    w = values(groups * rows, columns, torch.int8, 1)
    expected = w.view(groups, rows, columns).transpose(1, 2).reshape(-1, rows)
    assert same_bits(grouped.transposed(w.to(DEVICE), groups), expected)


def test_a_launch_needs_no_look_at_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "tolist", lambda *_: pytest.fail("the host waited for the device"))
    where = ends([3, 4]).to(DEVICE)
    a, b = (values(7, K, torch.float32, seed).to(DEVICE) for seed in (1, 2))
    (a, scale), (b, _) = (grouped.quantize_grouped_columns(x, "int8", where, None, False) for x in (a, b))
    grouped.grouped_outer(a, b, scale, None, where, torch.float32)
