"""Objectives: map the logits of a chunk of tokens to one number per token, or to the sum of these numbers.

    loss = model(tokens_BS, documents, labels_BS)                                # summed_cross_entropy
    log_p_BS = model(tokens_BS, documents, labels_BS, loss=log_probabilities)
    kl_BS = model(tokens_BS, documents, labels_BS, loss=Divergence(teacher_logits_BSV))
    kl_BS = model(tokens_BS, documents, labels_BS, loss=TopKDivergence(teacher_log_p_BSK, words_BSK))

An objective gets `Logits` (chunks.py) and computes numbers for each token through it, so that float32 logits
exist for one block of rows only. Tensor parallelism may cut the head by words; each part then has the logits
of its own words. The objectives here work with such parts, by these formulas:

    largest = the maximum of a token's logits x, over all parts
    S       = the sum of exp(x - largest) over the words of all parts
    log p   = (x - largest) - log(S)

Ranks exchange two small tensors, the maxima and the sums, in forward, and again if backward recomputes a
chunk. Gradients need no exchange, because all parts compute the same from the sums. With the whole
vocabulary, the maximum and the sum over parts are no-ops (words.py), and the cross-entropy uses torch's
formula instead.

A token with the label -100 has the value 0, and the gradient of its logits is 0.

Shapes: T tokens, t tokens of a chunk, k words of a token, V vocabulary, v words of a part.
"""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lptune.base.errors import UserError
from lptune.base.text import with_addresses
from lptune.models.chunks import Logits

IGNORE_INDEX = -100
"""The label of a token that the loss ignores."""


class Objective(Protocol):
    """The protocol of an objective. Any class with these members is an Objective.

    If the vocabulary is cut, `values` sees the logits of one part of the words, and asks `Logits.words` for
    maxima and sums over all parts. A class whose `values` does so sets `serves_parts = True`. A decoder with
    a cut vocabulary refuses any other objective.

    A class whose `result` is a number sets `is_number = True`. Then the head takes three GEMMs for each token
    instead of four if there are several chunks (one_pass.py).
    """

    @property
    def targets(self) -> tuple[Tensor, ...]:
        """Tensors (B, S, …) that the objective needs for each token, in addition to the label."""

    def values(self, logits: Logits, labels_t: Tensor, *targets: Any, **_: Any) -> Tensor:
        """One float32 number for each token of a chunk (t,), differentiable in `logits`.

        labels_t: int64; numbers of tokens with IGNORE_INDEX are ignored. targets: `self.targets` of these
        tokens.
        """

    def result(self, values_t: Tensor, labels_t: Tensor) -> Tensor:
        """The value of the objective: values_t itself, or its sum. values_t is 0 for ignored tokens."""


def check_serves_parts(loss: Objective) -> None:
    """Raises UserError unless the class that defines `values` says that it serves a part of the words: on
    such a part an objective made for the whole vocabulary would be wrong without a sign of it.
    """
    if isinstance(loss, WeightedSum):
        for each in loss.objectives:
            check_serves_parts(each)
    owner = _owner(loss, "values")
    if not vars(owner).get("serves_parts", False):
        raise UserError(
            f"{owner.__name__} would see a part of the vocabulary, which tensor parallelism cut; take maxima "
            f"and sums over words by `logits.words` ({with_addresses('docs/models.md')}) and set "
            "serves_parts = True in it, or train with parallel.tensor=1"
        )


def is_number(loss: Objective) -> bool:
    """Whether the class that defines `result` says that the result is a number."""
    return bool(vars(_owner(loss, "result")).get("is_number", False))


def _owner(loss: Objective, method: str) -> type:
    """The class of which `loss` has `method`."""
    return next(cls for cls in type(loss).__mro__ if method in vars(cls))


class LogProbabilities:
    """The log-probability of each token's label, for preference losses and perplexities.

    Same as torch.log_softmax(logits.float(), -1).gather(-1, labels_t[:, None])[:, 0].
    """

    targets: tuple[Tensor, ...] = ()
    serves_parts = True

    def values(self, logits: Logits, labels_t: Tensor) -> Tensor:
        if logits.words.is_all:
            return -logits.for_each_token(_cross_entropy, labels_t)
        return _log_probabilities(logits, labels_t[:, None])[:, 0]

    def result(self, values_t: Tensor, labels_t: Tensor) -> Tensor:
        return values_t


class SummedCrossEntropy(LogProbabilities):
    """Same as F.cross_entropy(logits.float(), labels_t, ignore_index=-100, reduction="sum")."""

    is_number = True

    def result(self, values_t: Tensor, labels_t: Tensor) -> Tensor:
        # nll_loss adds in the same order as F.cross_entropy. The label 0 selects the only column.
        return F.nll_loss(
            values_t[:, None], labels_t.clamp(max=0), ignore_index=IGNORE_INDEX, reduction="sum"
        )


log_probabilities = LogProbabilities()
summed_cross_entropy = SummedCrossEntropy()


class Divergence:
    """The divergence between the probabilities of teacher and student over the whole vocabulary, in nats.

        (1 - reverse) * KL(p || q) + reverse * KL(q || p)

    p (the teacher) and q (the student) are softmax(logits / temperature). With reverse = 0 and
    temperature = 1, same as F.kl_div(log_softmax(student), log_softmax(teacher), reduction="none",
    log_target=True).sum(-1). Forward KL makes the student cover all that the teacher would say; reverse KL
    makes it leave out what the teacher would not say (MiniLLM, arXiv:2306.08543). A temperature
    above 1 shows the student more of the teacher's improbable words (Hinton et al., arXiv:1503.02531).

    teacher_BSX: the teacher's logits (B, S, V), of all words on every rank. They take as much memory as the
    student's logits would without chunks. With `logits_of`, teacher_BSX has X numbers per token instead, such
    as the teacher's last hidden states, and `logits_of` maps them chunk by chunk, (t, X) -> (t, v), to the
    logits of the words that the student's head has on this rank. The teacher gets no gradient. With
    reverse > 0 its logits must be finite.
    """

    serves_parts = True

    def __init__(
        self,
        teacher_BSX: Tensor,
        logits_of: Callable[[Tensor], Tensor] | None = None,
        *,
        reverse: float = 0.0,
        temperature: float = 1.0,
    ) -> None:
        self.targets = (teacher_BSX.detach(),)
        self._logits_of = logits_of
        self._reverse, self._temperature = reverse, temperature

    def values(self, logits: Logits, labels_t: Tensor, teacher_tX: Tensor) -> Tensor:
        words = logits.words
        if self._logits_of is None:
            teacher_tv = teacher_tX[:, words.first : words.first + logits.width]
        else:
            with torch.no_grad():
                teacher_tv = self._logits_of(teacher_tX)
        with torch.no_grad():
            largest_t2 = words.largest(logits.for_each_token(_largest_of_both, teacher_tv))
        sums_of = functools.partial(
            _divergence_sums, temperature=self._temperature, with_reverse=self._reverse > 0
        )
        sums_t = words.sum(logits.for_each_token(sums_of, teacher_tv, largest_t2)).unbind(1)
        log_q_over_p_t = sums_t[1].log() - sums_t[0].log()  # of the normalizers, teacher's over student's
        forward_t = sums_t[2] / sums_t[1] - log_q_over_p_t
        if self._reverse == 0:
            return forward_t
        reverse_t = sums_t[3] / sums_t[0] + log_q_over_p_t
        return (1 - self._reverse) * forward_t + self._reverse * reverse_t

    def result(self, values_t: Tensor, labels_t: Tensor) -> Tensor:
        return values_t


class TopKDivergence:
    """The divergence between teacher and student over k words, with all other words as one event, in nats.

    Let p be the teacher's and q the student's probabilities of the k words, and r = 1 - sum of p_i and
    s = 1 - sum of q_i the probabilities of the other words. KL(teacher || student) of these k + 1 events is

        sum over the k words of p_i * (log p_i - log q_i)  +  r * (log r - log s)

    By the chain rule of relative entropy (Cover and Thomas, Elements of Information Theory, theorem 2.5.3),
    the KL over all words is this value plus r * KL(teacher || student, given that the word is none of the k).
    So this value is never negative and never above the full KL. It is 0 only if the student agrees on the k
    words, and hence on the sum of the others. It approaches the full KL as k grows, and equals it if k = V.
    Without the second term, or with p scaled to a sum of 1, the student would learn to overrate the k words
    (arXiv:2503.16870).

    `reverse` and `temperature` mean what they mean in `Divergence`; the same holds of the reverse KL, with
    the roles exchanged. log_p_BSk: log-probabilities under the teacher's softmax(logits / temperature) over
    all words. words_BSk: integers, distinct for each token. log_rest_BS: log r, in which a small r keeps its
    digits; None: r is 1 - sum of p, or 0 if rounding makes that sum larger than 1. With reverse > 0, the
    teacher's probabilities must not be 0.
    """

    serves_parts = True

    def __init__(
        self,
        log_p_BSk: Tensor,
        words_BSk: Tensor,
        log_rest_BS: Tensor | None = None,
        *,
        reverse: float = 0.0,
        temperature: float = 1.0,
    ) -> None:
        self.targets: tuple[Tensor, ...] = (log_p_BSk.detach(), words_BSk)
        if log_rest_BS is not None:
            self.targets += (log_rest_BS.detach(),)
        self._reverse, self._temperature = reverse, temperature

    def values(
        self,
        logits: Logits,
        labels_t: Tensor,
        log_p_tk: Tensor,
        words_tk: Tensor,
        log_r_t: Tensor | None = None,
    ) -> Tensor:
        log_p_tk, words_tk = log_p_tk.float(), words_tk.long()
        p_tk = log_p_tk.exp()
        has_rest = words_tk.shape[1] < logits.words.vocab_size
        if has_rest:
            if log_r_t is None:
                log_r_t = (1.0 - p_tk.sum(1)).clamp(min=0.0).log()
            log_r_t = log_r_t.float()
            r_t = log_r_t.exp()
            log_q_tk, log_s_t = _log_probabilities_and_rest(logits, words_tk, self._temperature)
            entropy_t = -torch.xlogy(p_tk, p_tk).sum(1) - torch.xlogy(r_t, r_t)
            forward_t = -(p_tk * log_q_tk).sum(1) - r_t * log_s_t - entropy_t
        else:
            log_q_tk = _log_probabilities(logits, words_tk, self._temperature)
            forward_t = (torch.xlogy(p_tk, p_tk) - p_tk * log_q_tk).sum(1)
        if self._reverse == 0:
            return forward_t
        reverse_t = (log_q_tk.exp() * (log_q_tk - log_p_tk)).sum(1)
        if log_r_t is not None and has_rest:
            reverse_t = reverse_t + log_s_t.exp() * (log_s_t - log_r_t)
        return (1 - self._reverse) * forward_t + self._reverse * reverse_t

    def result(self, values_t: Tensor, labels_t: Tensor) -> Tensor:
        return values_t


class WeightedSum:
    """The sum of several objectives, each multiplied by its weight: numbers for each token.

    For example, distillation with labels is
    `WeightedSum((-0.5, log_probabilities), (0.5, Divergence(hidden_BSH, teacher.logits_of)))`. In a chunk,
    each objective has a gradient of its own of the size of the logits (chunks.py).
    """

    serves_parts = True  # check_serves_parts asks each of its objectives

    def __init__(self, *weighted: tuple[float, Objective]) -> None:
        self.weights = tuple(weight for weight, _ in weighted)
        self.objectives = tuple(objective for _, objective in weighted)
        self.targets = tuple(each for objective in self.objectives for each in objective.targets)

    def values(self, logits: Logits, labels_t: Tensor, *targets: Tensor) -> Tensor:
        total_t, first = labels_t.new_zeros(labels_t.shape, dtype=torch.float32), 0
        for weight, objective in zip(self.weights, self.objectives, strict=True):
            own = targets[first : first + len(objective.targets)]
            total_t = total_t + weight * objective.values(logits, labels_t, *own)
            first += len(own)
        return total_t

    def result(self, values_t: Tensor, labels_t: Tensor) -> Tensor:
        return values_t


def _log_probabilities(logits: Logits, words_tk: Tensor, temperature: float = 1.0) -> Tensor:
    """(t, k) log-probabilities of words_tk under softmax(logits / temperature). An entry that is no word (a
    label of -100) gives any number.
    """
    places = logits.words.columns(words_tk, logits.width)
    with torch.no_grad():
        largest_t = logits.words.largest(logits.for_each_token(_largest))
    sums_of = functools.partial(_sum_and_picked, temperature=temperature)
    sums = logits.words.sum(logits.for_each_token(sums_of, largest_t, *places))
    return sums[:, 1:] - sums[:, :1].log()


def _log_probabilities_and_rest(
    logits: Logits, words_tk: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """(t, k) as `_log_probabilities`, and (t,) the log of the total probability of all other words.

    The other words are summed directly. 1 - (sum of the k probabilities) would lose them in float32 if the k
    words have nearly all of the probability.
    """
    places = logits.words.columns(words_tk, logits.width)
    with torch.no_grad():
        largest_t2 = logits.words.largest(logits.for_each_token(_largest_and_rest, *places))
    sums_of = functools.partial(_sum_rest_and_picked, temperature=temperature)
    sums = logits.words.sum(logits.for_each_token(sums_of, largest_t2, *places))
    log_total_t1, log_rest_t1 = sums[:, :1].log(), sums[:, 1:2].log()
    log_rest_t1 = log_rest_t1 + (largest_t2[:, 1:] - largest_t2[:, :1]) / temperature
    return sums[:, 2:] - log_total_t1, (log_rest_t1 - log_total_t1)[:, 0]


# Functions for `Logits.for_each_token`: of the float32 logits x_tv of a block, and of further tensors.


def _cross_entropy(x_tV: Tensor, labels_t: Tensor) -> Tensor:
    return F.cross_entropy(x_tV, labels_t, ignore_index=IGNORE_INDEX, reduction="none")


def _largest(x_tv: Tensor) -> Tensor:
    return x_tv.amax(1)


def _sum_and_picked(
    x_tv: Tensor, largest_t: Tensor, columns_tk: Tensor, here_tk: Tensor, *, temperature: float
) -> Tensor:
    x_tv = x_tv - largest_t[:, None]
    if temperature != 1.0:
        x_tv = x_tv / temperature
    picked_tk = torch.where(here_tk, x_tv.gather(1, columns_tk), 0.0)
    return torch.cat([x_tv.exp().sum(1, keepdim=True), picked_tk], 1)


def _without(x_tv: Tensor, columns_tk: Tensor, here_tk: Tensor) -> Tensor:
    """x_tv with -inf in columns_tk, where here_tk is True."""
    num_columns = x_tv.shape[1]
    # Words of other parts are marked in an extra column, which is removed.
    taken_tv = x_tv.new_zeros(len(x_tv), num_columns + 1, dtype=torch.bool)
    taken_tv = taken_tv.scatter(1, torch.where(here_tk, columns_tk, num_columns), True)[:, :num_columns]
    return x_tv.masked_fill(taken_tv, -torch.inf)


def _largest_and_rest(x_tv: Tensor, columns_tk: Tensor, here_tk: Tensor) -> Tensor:
    return torch.stack([x_tv.amax(1), _without(x_tv, columns_tk, here_tk).amax(1)], 1)


def _sum_rest_and_picked(
    x_tv: Tensor, largest_t2: Tensor, columns_tk: Tensor, here_tk: Tensor, *, temperature: float
) -> Tensor:
    rest_tv = _without(x_tv, columns_tk, here_tk) - largest_t2[:, 1:]
    if temperature != 1.0:
        rest_tv = rest_tv / temperature
    sum_and_picked = _sum_and_picked(x_tv, largest_t2[:, 0], columns_tk, here_tk, temperature=temperature)
    return torch.cat([sum_and_picked[:, :1], rest_tv.exp().sum(1, keepdim=True), sum_and_picked[:, 1:]], 1)


def _largest_of_both(x_tv: Tensor, teacher_tv: Tensor) -> Tensor:
    return torch.stack([x_tv.amax(1), teacher_tv.amax(1).float()], 1)


def _divergence_sums(
    x_tv: Tensor, teacher_tv: Tensor, largest_t2: Tensor, *, temperature: float, with_reverse: bool
) -> Tensor:
    """(t, 3 or 4) sums over the words: of q, of p, of p * log(p / q), of q * log(q / p), where p and q are
    not normalized.
    """
    x_tv, y_tv = x_tv - largest_t2[:, :1], teacher_tv.float() - largest_t2[:, 1:]
    if temperature != 1.0:
        x_tv, y_tv = x_tv / temperature, y_tv / temperature
    q_tv, p_tv = x_tv.exp(), y_tv.exp()
    # A word that the teacher excludes has y = -inf and adds 0, not 0 * inf.
    difference_tv = torch.where(p_tv > 0, y_tv - x_tv, 0.0)
    sums = [q_tv.sum(1), p_tv.sum(1), (p_tv * difference_tv).sum(1)]
    if with_reverse:
        sums.append((q_tv * (x_tv - y_tv)).sum(1))
    return torch.stack(sums, 1)
