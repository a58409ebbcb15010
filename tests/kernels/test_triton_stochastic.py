"""The Triton quantizers that round stochastically give the bits of `lptune.numerics`."""

import itertools

import pytest
import torch

from lptune import numerics
from lptune.numerics import FORMATS
from tests.helpers.definitions import expected_stochastic, hard_matrix
from tests.helpers.triton_device import (
    DEVICE,
    INTERPRETED,
    poisoned_outputs,
    same_bits,
    some_interpreted,
)

from lptune.kernels.triton import by_row, stochastic  # isort: skip  # only once there is a device

pytestmark = [
    pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning"),
    *([] if INTERPRETED else [pytest.mark.gpu]),
]
assert poisoned_outputs

KEY = numerics.random_key(0, 1, "a")
FIRST = (0, 2**32 - 100, 2**40)
"""Indices of the first element: on the way of the second, the index passes 2**32."""


@pytest.mark.parametrize(
    ("dim", "fmt", "power_of_two", "first"),
    some_interpreted(
        list(itertools.product((0, 1, 2), FORMATS, (False, True), FIRST)),
        [(dim, fmt, fmt == "e5m2", FIRST[dim]) for dim in (0, 1, 2) for fmt in FORMATS],
    ),
)
def test_the_bits_are_those_of_the_definition(dim: int, fmt: str, power_of_two: bool, first: int) -> None:
    x, form = hard_matrix(), FORMATS[fmt]
    vector = {1: torch.linspace(0.1, 2, 70)[None], 0: torch.linspace(0.1, 2, 33)[:, None], 2: None}[dim]
    for multiplier, transposed, twice in ((None, False, False), (vector, True, False), (vector, False, True)):
        if twice and dim != 2:
            continue  # no gradient is stored twice but those with one scale
        folded = x if multiplier is None else x * multiplier
        q, scale = expected_stochastic(folded, form, power_of_two, dim, KEY, first)
        on_device = x.to(DEVICE), None if multiplier is None else multiplier.to(DEVICE)
        ours = stochastic.quantize_stochastic(
            *on_device, fmt, power_of_two, dim, KEY, first, transposed, twice
        )
        assert same_bits(ours[0], q)
        assert same_bits(ours[1], scale)
        assert (ours[0].t() if transposed else ours[0]).is_contiguous()
        if twice:
            assert same_bits(ours[2], q)
            assert ours[2].t().is_contiguous()


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("fmt", ["int8", "e4m3"])
def test_rows_are_read_once_or_in_parts_and_kept_where_an_update_is_skipped(
    held: bool, fmt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not held:
        monkeypatch.setattr(by_row, "LONGEST_HELD_ROW", 64)
    x = torch.cat([hard_matrix()[2:7], torch.randn(5, 4200)], 1)
    multiplier = torch.rand(1, x.shape[1])
    q, scale = expected_stochastic(x * multiplier, FORMATS[fmt], False, 1, KEY, 2**32 - 100)
    before = torch.full(x.shape, 3, dtype=torch.int8), torch.full((5, 1), 0.5)
    given = [each.to(DEVICE) for each in (x, multiplier)]
    kept = tuple(each.to(DEVICE) for each in before)
    for found_inf in (None, 0.0, 1.0):
        found = None if found_inf is None else torch.tensor(found_inf, device=DEVICE)
        ours = stochastic.quantize_rows_stochastic(
            *given, fmt, False, KEY, 2**32 - 100, None if found is None else kept, found
        )
        wanted = (before[0].view(FORMATS[fmt].dtype), before[1]) if found_inf == 1 else (q, scale)
        assert same_bits(ours[0], wanted[0])
        assert same_bits(ours[1], wanted[1])


@pytest.mark.parametrize("first", FIRST)
def test_bfloat16_has_the_bits_of_the_definition(first: int) -> None:
    x = hard_matrix()
    index = torch.arange(first, first + x.numel()).view(x.shape)
    expected = numerics.stochastic_round_to_bfloat16(x, numerics.uniform(KEY, index))
    assert same_bits(stochastic.round_to_bfloat16(x.to(DEVICE), KEY, first), expected)
    assert stochastic.round_to_bfloat16(x[:0].to(DEVICE), KEY, first).shape == (0, 70)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 1), (1, 700), (700, 1)])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_matrices_of_any_size_and_strides(shape: tuple[int, int], dim: int) -> None:
    x = torch.randn(shape)
    q, scale = expected_stochastic(x, FORMATS["int8"], False, dim, 7, 0)
    for given in (x, x.t().contiguous().t()):
        ours = stochastic.quantize_stochastic(given.to(DEVICE), None, "int8", False, dim, 7, 0, False)
        assert same_bits(ours[0], q)
        assert same_bits(ours[1], scale)
