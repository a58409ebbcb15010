"""The words of a vocabulary that the logits of a head stand for.

A head returns a logit for each word of the vocabulary, unless it was cut by words: then it returns those of a
part of them, and other processes have the rest. An objective (loss.py) needs to know little of that: the
maximum and the sum over all words of what each part found, and the columns in which given words stand. It
asks `Words` for these. A head that was cut carries a subclass of it as its attribute `words`, whose methods
go over all parts.

Shapes: t tokens of a chunk, k words of a token, v words of a part.
"""

from torch import Tensor, nn


class Words:
    """All words of a vocabulary: nothing is elsewhere, so `largest`, `sum` and `gather` change nothing."""

    is_all = True
    """Whether the logits are those of the whole vocabulary."""
    first = 0
    """The word of the first logit."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        """Of all parts together."""
        self.width = vocab_size
        """The largest number of logits that a part has for a token."""

    def largest(self, x: Tensor) -> Tensor:
        """The elementwise maximum over all parts; without a gradient."""
        return x

    def sum(self, x: Tensor) -> Tensor:
        """The elementwise sum over all parts. Every part has the same result and goes on with it alike, so
        the gradient of the result is the gradient of each summand.
        """
        return x

    def gather(self, logits: Tensor) -> Tensor:
        """(…, v) of each part -> (…, V) of the whole vocabulary."""
        return logits

    def columns(self, words_tk: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
        """Where the logits of `words_tk` stand among this part's `num_columns`, and whether they do: 0 and
        False for words of other parts, and for what is no word, as a label of -100.
        """
        here_tk = (words_tk >= self.first) & (words_tk < self.first + num_columns)
        return (words_tk - self.first).masked_fill(~here_tk, 0), here_tk


def words_of(head: nn.Module, vocab_size: int) -> Words:
    """The words whose logits `head` returns: all of the vocabulary, unless it has an attribute `words`."""
    found: Words | None = getattr(head, "words", None)
    return Words(vocab_size) if found is None else found
