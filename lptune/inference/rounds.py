"""Batches on several ranks: each answers one batch per round; then the caller exchanges the answers.

Batch number n goes to data rank n modulo the number of data ranks. So the batches, and with them the answers
and their order, are the same as with one rank, also for kinds that quantize a batch with one scale. The
exchange (`gather_answers`) is a collective: a rank waits for the others for at most one batch, not for the
rest of the job. Each rank has the whole model here, so every rank is a data rank.
"""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from lptune.checkpoint import check_same
from lptune.distributed import World
from lptune.inference.decode import Answer

T = TypeVar("T")


class Finished(NamedTuple):
    """What a rank has answered."""

    text: str
    ended_by: str
    """token | text | length. Empty if the rank was stopped before the end."""
    num_tokens: int


def in_batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of `size` items; the last one may be shorter."""
    rest = iter(items)
    while batch := list(itertools.islice(rest, size)):
        yield batch


def rounds(
    batches: Iterable[Sequence[T]], world: World, key: str = "prompts.source"
) -> Iterator[list[Sequence[T]]]:
    """Lists of one batch for each data rank. In the last list, the batches at the end may be empty. Raises
    UserError if ranks have read other items. key: of the config, where the items come from. A collective.
    """
    for found in in_batches(batches, world.data_size):
        if world.size > 1:
            check_same(key, hashlib.sha256(ascii(found).encode()).hexdigest(), world)
        yield [*found, *([()] * (world.data_size - len(found)))]


def gather_answers(answers: Sequence[Answer], world: World) -> list[list[Finished]]:
    """The answers of every rank, in the order of the ranks. A collective."""
    mine = [(answer.text, answer.ended_by, len(answer.ids)) for answer in answers]
    return [[Finished(*each) for each in of_rank] for of_rank in world.gather(mine)]
