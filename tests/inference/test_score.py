"""Scores of continuations, against transformers in float64, and what they do not depend on."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from lptune import distributed
from lptune.base.errors import UserError
from lptune.config import PrecisionConfig
from lptune.distributed import World
from lptune.inference import LoadedModel, Pair, Scored, load_model, score
from tests.helpers.ranks import run_ranks

MAX_LENGTH = 24


@pytest.fixture(scope="module")
def loaded(checkpoint: Path, world: World) -> LoadedModel:
    return load_model(str(checkpoint), PrecisionConfig(), "float32", world, num_tokens=8)


def make_pairs() -> list[Pair]:
    """Contexts of 1 to 40 tokens, some of them too long; continuations of 1 to 5; four share a context."""
    draw = random.Random(0)

    def ids(*numbers: int) -> list[int]:
        return [draw.randrange(1000) for _ in range(draw.choice(numbers))]

    pairs = [Pair(ids(1, 7, 22, 40), ids(1, 2, 5)) for _ in range(9)]
    context = ids(6)
    return [*pairs, *(Pair(context, [last]) for last in (3, 5, 7, 3)), Pair(context[:-2], [*context[-2:], 9])]


def test_scores_are_those_of_transformers_and_long_contexts_lose_their_beginning(
    checkpoint: Path, loaded: LoadedModel, world: World
) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64).eval()
    pairs = make_pairs()
    greedy = []  # of each context: what the model would write, so that some answers are greedy ones
    for context, _ in pairs[:3]:
        with torch.no_grad():
            greedy.append(int(model(torch.tensor([context[-MAX_LENGTH:]])).logits[0, -1].argmax()))
    pairs += [Pair(context, [token]) for (context, _), token in zip(pairs[:3], greedy, strict=True)]
    found = score(loaded.model, pairs, world, batch_size=4, max_length=MAX_LENGTH)
    for (context, continuation), ours in zip(pairs, found, strict=True):
        row = torch.tensor([[*context, *continuation][-(MAX_LENGTH + 1) :]])
        with torch.no_grad():
            log_p_SV = model(row[:, :-1]).logits[0].log_softmax(-1)[-len(continuation) :]
        targets = torch.tensor(continuation)
        wanted = float(log_p_SV.gather(1, targets[:, None]).sum())
        # A logit of float32 is right to about 1e-6, and a log-probability of a tiny model is about -7.
        assert ours.log_probability == pytest.approx(wanted, rel=1e-5)
        assert ours.is_greedy == bool((log_p_SV.argmax(-1) == targets).all())
    assert [each.is_greedy for each in found[-3:]] == [True] * 3


def test_continuations_that_share_a_row_cost_one_forward(
    loaded: LoadedModel, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = []
    extend = loaded.model.model.extend

    def counted(tokens_BS: torch.Tensor, *others: Any) -> torch.Tensor:
        rows.append(len(tokens_BS))
        return extend(tokens_BS, *others)

    monkeypatch.setattr(loaded.model.model, "extend", counted)
    pairs = make_pairs()[9:]  # five continuations of one row
    found = score(loaded.model, pairs, world, batch_size=8, max_length=MAX_LENGTH)
    assert rows == [1]
    assert found[0] == found[3]
    assert len({each.log_probability for each in found}) == 4


def on_a_rank(rank: int, size: int, folder: Path) -> list[Scored]:
    with distributed.session("cpu") as world:
        loaded = load_model(
            str(folder), PrecisionConfig(kind="int8_tensorwise"), "float32", world, num_tokens=8
        )
        return score(loaded.model, make_pairs(), world, batch_size=2, max_length=MAX_LENGTH)


def other_pairs(rank: int, size: int, folder: Path) -> str:
    with distributed.session("cpu") as world:
        loaded = load_model(str(folder), PrecisionConfig(), "float32", world, num_tokens=8)
        with pytest.raises(UserError) as raised:
            score(loaded.model, [Pair([1], [2 + rank])], world, batch_size=1, max_length=MAX_LENGTH)
        return str(raised.value)


def test_ranks_with_other_pairs_are_told_the_key_of_tasks(checkpoint: Path) -> None:
    assert all(line.startswith("harness.tasks: ") for line in run_ranks(2, other_pairs, checkpoint))


def test_three_ranks_get_the_bits_of_one_rank(checkpoint: Path) -> None:
    # int8_tensorwise: one scale for a batch, so other batches would give other scores.
    (one,) = run_ranks(1, on_a_rank, checkpoint)
    assert run_ranks(3, on_a_rank, checkpoint) == [one] * 3
