"""A rank whose device multiplies wrongly is named before it trains."""

import socket
from unittest import mock

import pytest
import torch

from lptune import distributed
from lptune.base.errors import UserError
from lptune.distributed import same_products
from tests.helpers.ranks import Ranks


def _said(rank: int, num_ranks: int, wrong: list[int]) -> str:
    multiply = torch._int_mm

    def with_a_flipped_bit(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = multiply(a, b)
        product[5, 7] ^= 1 << rank
        return product

    with distributed.session("cpu") as world:
        if rank in wrong:
            with mock.patch.object(torch, "_int_mm", with_a_flipped_bit), pytest.raises(UserError) as told:
                distributed.check_products(world)
            return str(told.value)
        try:
            distributed.check_products(world)
        except UserError as error:
            return str(error)
        return ""


@pytest.mark.parametrize(
    ("num_ranks", "wrong", "named"),
    [(3, [], []), (3, [2], [2]), (2, [1], [0, 1]), pytest.param(4, [0, 3], [0, 3], marks=pytest.mark.slow)],
)
def test_ranks_with_other_bits_than_most_are_named_on_all(
    num_ranks: int, wrong: list[int], named: list[int], ranks: Ranks
) -> None:
    told = set(ranks.run(_said, num_ranks, wrong))
    assert len(told) == 1
    (text,) = told
    who = ", ".join(f"{rank} ({socket.gethostname()})" for rank in named)
    assert text.startswith(f"rank{'s' * (len(named) > 1)} {who}: an exact product" if named else "")
    assert bool(text) == bool(named)


def test_a_slow_gpu_is_named_and_the_spread_of_sound_ones_is_not() -> None:
    usual = [("a", 1, ms) for ms in (1.0, 1.1, 0.9, 1.15)]
    assert list(same_products.slow(usual)) == []
    assert list(same_products.slow([("a", 1, 0.0)] * 3)) == []  # CPUs, which are not timed
    (line,) = same_products.slow([*usual, ("b", 1, 2.1)])
    assert line.startswith("note: rank 4 (b): a GPU multiplies 1.9 times as long as the median")


def test_the_product_is_exact_and_a_wrong_bit_anywhere_is_another_digest() -> None:
    place = torch.arange(128, dtype=torch.int64)
    values = (place[:, None] * 1871 % 255 + place * 40504 % 255) % 255 - 127
    assert (values.min(), values.max()) == (-127, 127)
    product = values @ values.t()
    weights = (2 * place[:, None] + 1) * (2 * place + 1)
    digest = int((product * weights).sum()) % 2**32
    found, milliseconds = same_products.product(torch.device("cpu"))
    assert (found % 2**32, milliseconds) == (digest, 0.0)
    changed = (weights[..., None] << torch.arange(32)) % 2**32  # of each bit of each element
    assert changed.all()
