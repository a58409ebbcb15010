"""From times of parts to a ranking: the arithmetic, with times that are made up."""

import dataclasses
import math

import pytest

from lptune.tools.advise.from_times import SAME, WORTH, Advice, Candidate, advise, parts_of, predict
from lptune.tools.advise.measure import Group, Measured, Pair, Shape, Times
from lptune.tools.advise.quality import PUBLISHED, Difference, Quality

MLP = Group(
    (Shape("gate_proj", 64, 256, False), Shape("up_proj", 64, 256, False)),
    ("model.layers.0.mlp", "model.layers.1.mlp"),
)
O = Group(  # noqa: E741
    (Shape("o_proj", 64, 64, False),), ("model.layers.0.self_attn", "model.layers.1.self_attn")
)
NONE = {MLP: Times(8.0, 1.0), O: Times(2.0, 0.5)}


def measured(**low: dict[Group, Times]) -> Measured:
    """Two blocks. A pass of `none`: 24 s in blocks, 20 of them in linear layers; 6 in the head. The update of
    the one block that was built, with 0.5 s for what is no linear layer: 2 s.
    """
    return Measured(
        groups=(MLP, O),
        kinds=tuple(low),
        pairs={
            (group, kind): Pair(times, NONE[group])
            for kind, found in low.items()
            for group, times in found.items()
        },
        blocks_s=24.0,
        head_s=6.0,
        update_s=2.0,
        update_blocks=(MLP, O),
        tokens=128,
        timed_tokens=128,
        duration_s=1.0,
    )


FAST = {MLP: Times(4.0, 1.25), O: Times(1.0, 0.5)}
SLOW = {MLP: Times(10.0, 1.0), O: Times(2.5, 0.5)}
MIXED = {MLP: Times(4.0, 1.0), O: Times(7.0, 0.5)}


def by_kind(candidates: list[Candidate]) -> dict[str, Candidate]:
    return {each.kind: each for each in candidates}


def test_a_step_is_its_passes_and_one_update() -> None:
    found = by_kind(predict(measured(int8_rowcol=FAST), num_micro_batches=3))
    # 3 * (24 + 6) + 0.5 + 2 * (1 + 0.5); in int8_rowcol linear layers save 2 * (4 + 1) of a pass, and the
    # update costs 2 * 0.25 more.
    assert found["none"].step_s == pytest.approx(93.5)
    assert found["int8_rowcol"].step_s == pytest.approx(93.5 - 3 * 10 + 0.5)
    assert found["int8_rowcol"].speedup == pytest.approx(93.5 / 64)
    linear_none, linear_low = 3 * 20 + 3, 3 * 10 + 3.5
    assert found["int8_rowcol"].linear_speedup == pytest.approx(linear_none / linear_low)


def test_several_ranks_share_the_update_and_fewer_timed_tokens_are_scaled_up() -> None:
    times = dataclasses.replace(measured(int8_rowcol=FAST), tokens=512)
    found = by_kind(predict(times, num_micro_batches=1, num_ranks=4))
    assert found["none"].step_s == pytest.approx(4 * 30 + 3.5 / 4)
    assert found["int8_rowcol"].step_s == pytest.approx(4 * 20 + 4 / 4)


def test_kinds_are_ranked_by_the_time_of_a_step() -> None:
    found = predict(measured(int8_rowcol=FAST, int8_tensorwise=MIXED, int8_weight_only=SLOW), 1)
    assert [each.kind for each in found] == ["int8_rowcol", "none", "int8_tensorwise", "int8_weight_only"]


def test_the_parts_of_a_step_add_up() -> None:
    parts = parts_of(measured(int8_rowcol=FAST), num_micro_batches=2)
    assert sum(parts.values()) == pytest.approx(1)
    assert parts["linear layers"] == pytest.approx(40 / 63.5)
    assert parts["update"] == pytest.approx(3.5 / 63.5)


def test_a_group_that_was_not_timed_gains_as_much_as_the_others() -> None:
    found = by_kind(predict(measured(int8_rowcol={MLP: Times(4.0, 1.0)}), 1))
    # o: 64 * 64 weights to the MLP's 2 * 64 * 256, so 1 / 8 of its 8 s; twice as fast in 8 bits.
    assert found["int8_rowcol"].step_s == pytest.approx(found["none"].step_s - 2 * (4 + 0.5))
    assert found["int8_rowcol"].by_group == {"gate,up": 2.0}


def candidate(kind: str, speedup: float) -> Candidate:
    return Candidate(kind=kind, step_s=1 / speedup, speedup=speedup)


def choose(quality: Quality = PUBLISHED, **speedups: float) -> Advice:
    return advise([candidate("none", 1.0), *(candidate(*each) for each in speedups.items())], quality)


def test_none_is_recommended_where_no_kind_pays() -> None:
    found = choose(int8_rowcol=WORTH - 0.01, int8_tensorwise=0.8)
    assert (found.chosen.kind, found.pays) == ("none", False)
    loss = PUBLISHED.differences["int8_rowcol"]
    assert found.reason == f"the best other kind, int8_rowcol, has 1.02x of its speed and a loss of {loss}"
    assert choose(int8_rowcol=WORTH).pays


def test_of_kinds_that_are_as_fast_the_one_closest_to_bf16_is_taken() -> None:
    assert choose(int8_rowcol=1.5 * SAME + 0.001, int8_tensorwise=1.5).chosen.kind == "int8_rowcol"
    assert choose(int8_rowcol=1.5 * SAME - 0.001, int8_tensorwise=1.5).chosen.kind == "int8_tensorwise"
    # ... but not one that does not pay.
    assert choose(int8_rowcol=1.02, int8_tensorwise=1.05).chosen.kind == "int8_tensorwise"


def test_published_losses_prefer_a_kind_and_refuse_none() -> None:
    found = choose(int8_rowcol=1.25, int8_rotated=1.15)
    assert found.chosen.kind == "int8_rotated"
    assert "the fastest, int8_rowcol, has 1.25x" in found.reason
    assert choose(int8_rowcol=1.25, int8_rotated=1.02).chosen.kind == "int8_rowcol"


def test_a_kind_that_costs_this_model_too_much_is_not_recommended() -> None:
    losses = {"int8_rowcol": Difference(0.03, 0.001), "int8_rotated": Difference(0.004, 0.001)}
    quality = Quality(source="made up", differences=losses, limit=0.01)
    found = choose(quality, int8_rowcol=1.5, int8_rotated=1.2)
    assert found.chosen.kind == "int8_rotated"
    assert found.reason.endswith(
        "the fastest, int8_rowcol, has 1.50x of its speed and a loss of +3.00 ± 0.10 %"
    )
    assert not choose(quality, int8_rowcol=1.5, int8_rotated=1.0).pays
    assert not choose(quality, int8_rowcol=1.5).pays
    assert choose(dataclasses.replace(quality, limit=0.05), int8_rowcol=1.5).pays


@pytest.mark.parametrize(
    ("difference", "error", "is_allowed"),
    [
        (0.011, 0.001, True),
        (0.013, 0.001, False),
        (-0.3, 0.001, False),
        (0.3, 0.2, False),
        (0.3, math.nan, True),
        (math.inf, math.nan, False),
    ],
)
def test_the_limit_allows_for_the_noise_and_refuses_luck(
    difference: float, error: float, is_allowed: bool
) -> None:
    losses = {"int8_rowcol": Difference(difference, error)}
    assert Quality(source="made up", differences=losses, limit=0.01).allows("int8_rowcol") == is_allowed


def test_without_another_kind_there_is_a_reason() -> None:
    assert choose().reason == "no other kind runs natively here"
