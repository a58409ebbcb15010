"""Shards that are quantized by an amax on which ranks agree are the rows of the whole weight, quantized."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lptune import kernels, numerics
from lptune.linear.kind import Shard
from lptune.linear.weights import weight_amax
from lptune.linear.weights.weight_amax import first_row, max_over_ranks, shard_amaxes

N, K = 176, 208
"""Two blocks of 128 each way, the second ones smaller."""


class _Mesh:
    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks

    def size(self) -> int:
        return self.num_ranks

    def get_local_rank(self) -> int:
        return self.rank


def _weight(dtype: torch.dtype, kind: str) -> Tensor:
    w_NK = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    w_NK[5] = 0
    w_NK[130:, 140:] = 0 if kind == "zero block" else 1e-3
    if kind in ("nan", "inf"):
        w_NK[150, 20] = float(kind)
    # Halfway between two numbers of bfloat16 it must not matter whether the amax is rounded or its element.
    w_NK[0, 0] = 7 + 2.0**-6 + 2.0**-9
    return w_NK.to(dtype)


def _quantized_in_shards(
    w_NK: Tensor, num_ranks: int, fmt: str, block: int | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    shards = []
    for rank in range(num_ranks):
        mesh: Any = _Mesh(rank, num_ranks)
        rows = w_NK[first_row(N, mesh) :][: -(-N // num_ranks)]
        shards.append(Shard(rows, first_row(N, mesh), N, block, dtype))
    alone: Any = _Mesh(0, 1)
    amax = torch.stack([max_over_ranks(shard_amaxes([shard])[0], alone) for shard in shards]).amax(0)
    parts = [
        kernels.quantize_by_amax(s.rows_MK.to(dtype), amax, fmt, block=block, first_row=s.first_row)
        for s in shards
    ]
    return torch.cat([q for q, _ in parts]), parts[0][1]


@pytest.mark.parametrize("num_ranks", [1, 3, 8, 50])
@pytest.mark.parametrize(("fmt", "block"), [("int8", None), ("e4m3", None), ("e4m3", 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_in_any_number_of_shards_the_bits_are_those_of_the_whole(
    num_ranks: int, fmt: str, block: int | None, dtype: torch.dtype
) -> None:
    # 176 rows on 50 ranks: 4 each, and nothing from the 45th on.
    for kind, sign in (("ordinary", 1), ("ordinary", -1), ("zero block", 1)):
        w_NK = sign * _weight(torch.float32, kind)
        form = numerics.FORMATS[fmt]
        expected: tuple[Tensor, Tensor] = numerics.quantize_tensor(w_NK.to(dtype), form)
        if block is not None:
            expected = numerics.quantize_blocks(w_NK.to(dtype), (block, block), form)
        q_NK, scale = _quantized_in_shards(w_NK, num_ranks, fmt, block, dtype)
        assert torch.equal(q_NK.float(), expected[0].float())
        assert torch.equal(scale, expected[1])


@pytest.mark.parametrize("bad", ["nan", "inf"])
@pytest.mark.parametrize("block", [None, 128])
def test_what_is_not_finite_makes_the_scale_nan_that_covers_it(bad: str, block: int | None) -> None:
    _, scale = _quantized_in_shards(_weight(torch.float32, bad), 3, "e4m3", block, torch.bfloat16)
    assert scale.isnan().sum() == 1
    assert bool(scale.isnan()[-1, 0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_nan_also_by_an_amax_of_the_past(bad: float) -> None:
    x = torch.ones(2, 16)
    x[1, 3] = bad
    q, _ = kernels.quantize_by_amax(x, torch.ones(1, 1), "e4m3")
    assert q.float().isnan().sum() == 1
    assert bool(q.float().isnan()[1, 3])


def test_a_gather_asks_the_source_of_its_layer_while_the_layer_lives() -> None:
    class Source:
        def whole_amax(self, number: int, mine_BC: Tensor, mesh: Any) -> Tensor:
            return 2 * mine_BC

        def weight_changed(self) -> None:
            raise AssertionError

    mesh: Any = _Mesh(0, 1)
    mine = torch.ones(1, 1)
    number = kernels.LIVE.enter()
    assert weight_amax.whole_amax(number, mine, mesh).item() == 1
    kernels.LIVE[number].amax_source = Source()
    assert weight_amax.whole_amax(number, mine, mesh).item() == 2
    kernels.LIVE.leave(number)
    assert weight_amax.whole_amax(number, mine, mesh).item() == 1
    weight_amax.weight_changed(number)
