"""Stochastic rounding: unbiased, between the neighbours, and made of bits that anybody can compute again."""

import itertools
import math

import pytest
import torch

from lptune.numerics import (
    FORMATS,
    Format,
    random_key,
    stochastic_round_to,
    stochastic_round_to_bfloat16,
    uniform,
)
from tests.helpers import numerics_oracle as oracle

every_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=list(FORMATS))
KEY = random_key(0, 0, "model.layers.0.mlp.up_proj.weight")
LARGEST = 1 - 2.0**-24  # of uniform
GOLDEN_KEY = 7594438533057014933
GOLDEN_BITS = [14571646, 14187847, 2389112, 11586345, 9696711, 10183174]


def _cells(fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    table = torch.tensor(oracle.numbers(fmt), dtype=torch.float32)
    return table[:-1], table[1:]


@every_format
def test_every_number_of_the_format_stays_whatever_the_bits(fmt: Format) -> None:
    numbers = torch.tensor(oracle.numbers(fmt), dtype=torch.float32)
    for random in (0.0, 0.5, LARGEST):
        rounded = stochastic_round_to(numbers, fmt, torch.full_like(numbers, random))
        assert torch.equal(rounded.float(), numbers), random


@every_format
def test_in_every_cell_the_result_is_a_neighbour_and_up_exactly_from_the_distance_on(fmt: Format) -> None:
    # P(up) = P(random < distance), and random takes every multiple of 2**-24 once: the two values of random
    # beside the distance decide the probability to 2**-24.
    low, high = _cells(fmt)
    for fraction in (2.0**-10, 0.25, 0.5, 0.75, 1 - 2.0**-10):
        values = low + fraction * (high - low)
        assert torch.equal((values - low) / (high - low), torch.full_like(values, fraction))  # exact
        for random, expected in ((0.0, high), (fraction - 2.0**-24, high), (fraction, low), (LARGEST, low)):
            rounded = stochastic_round_to(values, fmt, torch.full_like(values, random))
            assert torch.equal(rounded.float(), expected), (fraction, random)


@every_format
def test_rounding_is_unbiased_in_every_cell(fmt: Format) -> None:
    # 255 (or so) cells at three places each, n bits for each: |mean - p| < 4 * sqrt(p * (1 - p) / n), as one
    # test of one cell; and all cells together, where n is that of all.
    n = 4096
    low, high = _cells(fmt)
    names = itertools.count()
    for p in (0.1, 0.5, 0.93):
        values = low + p * (high - low)
        index = torch.arange(n * len(low)).view(n, -1)
        random = uniform(random_key(1, next(names), "bias"), index)
        rounded = stochastic_round_to(values.expand(n, -1), fmt, random).double()
        up = (rounded - low) / (high - low).double()
        assert ((up == 0) | (up == 1)).all()
        exact = ((values - low) / (high - low)).double()  # p up to the rounding of `values`
        sigma = (exact * (1 - exact) / n).sqrt()
        z = (up.mean(0) - exact) / sigma
        # 4 sigma for the mean over all cells, and for the sum of squares, chi-square with len(low) degrees;
        # of len(low) single cells the worst is past 5 sigma once in 7,000 draws.
        assert abs(z.sum()) < 4 * math.sqrt(len(z))
        assert abs(z.square().sum() - len(z)) < 4 * math.sqrt(2 * len(z))
        assert z.abs().max() < 5


def test_bfloat16_is_rounded_to_a_neighbour_and_up_exactly_from_the_distance_on() -> None:
    low = torch.tensor([1.0, 3.0e-39, 1.75, 65280.0]).bfloat16().float()
    high = (low.view(torch.int32) + 0x10000).view(torch.float32)
    for fraction in (2.0**-16, 0.25, 0.5, 1 - 2.0**-16):
        values = low + fraction * (high - low)  # exact
        for random, expected in ((0.0, high), (fraction - 2.0**-24, high), (fraction, low), (LARGEST, low)):
            for sign in (1, -1):
                rounded = stochastic_round_to_bfloat16(sign * values, torch.full_like(values, random))
                assert torch.equal(rounded.float(), sign * expected), (fraction, random)


def test_saturation_and_nan_are_those_of_round_to_nearest() -> None:
    for fmt in FORMATS.values():
        beyond = torch.tensor([fmt.max, fmt.max * 1.04, 3e38, math.inf])
        for random in (0.0, LARGEST):
            bits = torch.full_like(beyond, random)
            assert (stochastic_round_to(beyond, fmt, bits).double() == fmt.max).all()
            assert (stochastic_round_to(-beyond, fmt, bits).double() == -fmt.max).all()
        if fmt.mantissa_bits is not None:
            assert stochastic_round_to(torch.tensor([math.nan]), fmt, torch.zeros(1)).float().isnan().all()


def test_the_key_depends_on_each_of_seed_step_and_name() -> None:
    arguments = itertools.product((0, 1, 12), (0, 1, 2, 21), ("w", "w1", "1/w", "v"))
    keys = [random_key(*each) for each in arguments]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**63 for key in keys)


def test_the_bits_are_pinned() -> None:
    # A run that is resumed by a later version must see the same bits: these change only with a note.
    assert random_key(0, 1, "weight") == GOLDEN_KEY
    index = torch.tensor([0, 1, 2, 2**31, 2**32, 2**40 + 7])
    assert (uniform(GOLDEN_KEY, index) * 2**24).long().tolist() == GOLDEN_BITS


def test_the_bits_of_a_shard_are_those_of_the_whole() -> None:
    m, k = 24, 40
    index = torch.arange(m * k).view(m, k)
    whole = uniform(KEY, index)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(0)) * 50
    rounded = stochastic_round_to(x, FORMATS["int8"], whole)
    order = torch.randperm(m, generator=torch.Generator().manual_seed(1))
    for part in (slice(0, 7), slice(7, 24), (slice(None), slice(3, 30, 2)), order):
        assert torch.equal(uniform(KEY, index[part]), whole[part])
        assert torch.equal(
            stochastic_round_to(x[part], FORMATS["int8"], uniform(KEY, index[part])), rounded[part]
        )
    assert torch.equal(uniform(KEY, index.t()), whole.t())
    assert torch.equal(uniform(torch.tensor(KEY), index), whole)


def test_compiled_bits_equal_eager_ones() -> None:
    # The hash multiplies beyond 63 bits: what counts is that the low 32 are right everywhere.
    index = torch.arange(5000) * 1_000_003
    key = torch.tensor(KEY)
    assert torch.equal(torch.compile(uniform, dynamic=False)(key, index), uniform(key, index))


# How elements and keys neighbour each other in use: along a row, down a column of 4096, across 2**32, and the
# same element in successive steps.
N = 1 << 18
STREAMS = {
    "elements": lambda: uniform(KEY, torch.arange(N)),
    "column": lambda: uniform(KEY, torch.arange(N) * 4096),
    "beyond_32_bits": lambda: uniform(KEY, torch.arange(N) + (2**32 - N // 2)),
    "multiples_of_2**32": lambda: uniform(KEY, torch.arange(N) << 32),
    "steps": lambda: torch.cat(
        [uniform(random_key(0, step, "w"), torch.arange(8)) for step in range(N // 64)]
    ),
    "raw_keys": lambda: uniform(torch.arange(N), torch.zeros(N, dtype=torch.int64)),
}


@pytest.mark.parametrize("stream", STREAMS)
def test_bits_are_uniform(stream: str) -> None:
    random = STREAMS[stream]()
    n = len(random)
    assert float(random.min()) >= 0
    assert float(random.max()) < 1
    assert torch.equal(random * 2**24, (random * 2**24).round())
    assert abs(float(random.double().mean()) - 0.5) < 4 * math.sqrt(1 / 12 / n)
    # Chi-square over 256 bins of the upper bits, and over the lowest 8 of the 24: mean 255, variance 510.
    bits = (random * 2**24).long()
    for byte in (bits >> 16, bits & 255):
        counts = torch.bincount(byte, minlength=256).double()
        chi_square = float(((counts - n / 256).square() / (n / 256)).sum())
        assert abs(chi_square - 255) < 4 * math.sqrt(2 * 255)


@pytest.mark.parametrize("stream", STREAMS)
def test_neighbours_are_uncorrelated(stream: str) -> None:
    # The correlation of n independent pairs has mean 0 and standard deviation 1 / sqrt(n).
    centred = (STREAMS[stream]().double() - 0.5) * math.sqrt(12)
    for lag in (1, 2, 3, 7, 8, 32, 64, 256, 1024, 4096):
        pairs = centred[lag:] * centred[:-lag]
        assert abs(float(pairs.mean())) < 4 / math.sqrt(len(pairs)), lag


def test_streams_of_neighbouring_steps_names_and_seeds_are_uncorrelated() -> None:
    index = torch.arange(N)
    base = uniform(random_key(0, 0, "w0"), index).double() - 0.5
    for key in (random_key(0, 1, "w0"), random_key(1, 0, "w0"), random_key(0, 0, "w1")):
        other = uniform(key, index).double() - 0.5
        for lag in (0, 1):
            pairs = 12 * base[lag:] * other[: N - lag]
            assert abs(float(pairs.mean())) < 4 / math.sqrt(len(pairs))
