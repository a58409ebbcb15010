"""The words of the vocabulary to which the logits of a head belong.

A head returns one logit for each word of the vocabulary. A head that was cut by words returns the logits of
some words, and other ranks have the rest. An objective (loss.py) needs only three operations on the parts:
the maximum over all parts, the sum over all parts, and the columns of given words. `Words` has these
operations. A head that was cut has an attribute `words`, an instance of a subclass, whose methods include all
parts.

Shapes: t tokens of a chunk, k words of a token, v words of a part.
"""

from torch import Tensor, nn


class Words:
    """All words of a vocabulary, in one part. `largest`, `sum` and `gather` return their argument."""

    is_all = True
    """Whether the logits are of the whole vocabulary."""
    first = 0
    """The word of the first column of the logits."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        """The number of words of all parts together."""
        self.width = vocab_size
        """The largest number of logits per token in any part."""

    def largest(self, x: Tensor) -> Tensor:
        """The elementwise maximum over all parts. It has no gradient."""
        return x

    def sum(self, x: Tensor) -> Tensor:
        """The elementwise sum over all parts. Every part gets the same result and computes the same from it,
        so the gradient of each summand equals the gradient of the sum.
        """
        return x

    def gather(self, logits: Tensor) -> Tensor:
        """The logits (…, V) of the whole vocabulary, from the logits (…, v) of each part."""
        return logits

    def columns(self, words_tk: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
        """Returns (the column of each of `words_tk` in the logits of this part, whether this part has it).

        Both are (t, k). Words of other parts, and entries that are no word (a label of -100), have 0 and
        False. num_columns: the number of columns of this part's logits.
        """
        here_tk = (words_tk >= self.first) & (words_tk < self.first + num_columns)
        return (words_tk - self.first).masked_fill(~here_tk, 0), here_tk


def words_of(head: nn.Module, vocab_size: int) -> Words:
    """The words whose logits `head` returns: its attribute `words`, or else the whole vocabulary."""
    found: Words | None = getattr(head, "words", None)
    return Words(vocab_size) if found is None else found
