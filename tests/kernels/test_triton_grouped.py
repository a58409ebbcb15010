"""The Triton kernels of grouped layers against one group after another: INT8 and quantizers to the bit,
float8 within what float32 addition allows. Empty groups, odd sizes, poisoned outputs."""

import pytest
import torch
from torch import Tensor

from lptune.numerics import FORMATS, quantize_columns
from tests.helpers.triton_device import DEVICE, INTERPRETED, poisoned_outputs, same_bits

from lptune.kernels.triton import grouped  # isort: skip  # only once there is a device

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
assert poisoned_outputs

SIZES = {"odd": [5, 1, 70], "empty": [0, 17, 0, 0, 140, 0], "one": [33], "last": [0, 0, 9]}
K, N = 80, 48
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


def check(found: Tensor, expected: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    if dtype == torch.int8:  # `+ 0.0` in the sums: integers have no negative zero
        assert same_bits(found, expected)
    else:  # each addition of a contraction rounds; `exact` is the sum of magnitudes
        assert ((found.cpu() - expected).abs() <= 200 * 2.0**-24 * exact + 1e-6).all()


@pytest.mark.parametrize("config", grouped.CONFIGS[:: 3 if INTERPRETED else 1])
@pytest.mark.parametrize("dtype", [torch.int8, E4M3])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_each_group_multiplies_its_own_rows(
    sizes: list[int], dtype: torch.dtype, config: grouped.GroupedConfig
) -> None:
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
        check(found, torch.cat(parts), torch.cat(exact), dtype)


@pytest.mark.parametrize("config", grouped.CONFIGS[:: 3 if INTERPRETED else 1])
@pytest.mark.parametrize("dtype", [torch.int8, E4M3])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_each_group_contracts_over_its_own_rows(
    sizes: list[int], dtype: torch.dtype, config: grouped.GroupedConfig
) -> None:
    a, b = values(sum(sizes), N, dtype, 1), values(sum(sizes), K, dtype, 2)
    scale_a, scale_b = scales(len(sizes), N), scales(len(sizes), K)
    groups = list(zip(a.double().split(sizes), b.double().split(sizes), scale_a, scale_b, strict=True))
    for with_b in (True, False):
        found = grouped.grouped_outer(
            a.to(DEVICE),
            b.to(DEVICE),
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
        check(found, torch.cat(parts), torch.cat(exact), dtype)


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
        whole = x if folded is None else x * folded
        for group, (part, found) in enumerate(zip(whole.split(sizes), q.cpu().split(sizes), strict=True)):
            if len(part):
                expected = quantize_columns(part, FORMATS[fmt])
                assert same_bits(found, expected.q_MK)
                assert same_bits(scale[group], expected.scale_1K[0])
            else:
                assert not scale[group].any()


def test_a_launch_needs_no_look_at_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "tolist", lambda *_: pytest.fail("the host waited for the device"))
    where = ends([3, 4]).to(DEVICE)
    a, b = (values(7, K, torch.int8, seed).to(DEVICE) for seed in (1, 2))
    grouped.grouped_outer(a, b, scales(2, K).to(DEVICE), None, where, torch.float32)
