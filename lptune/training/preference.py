"""Preference losses: functions of the log-probabilities of two answers to one prompt; one was chosen.

    π(y)   the model's probability of answer y after its prompt: the product over the answer's tokens
    ρ(y)   the same under the reference, which is the model before training
    |y|    number of tokens of the answer
    w, l   the chosen ("winning") and the rejected ("losing") answer;  σ: the logistic function

           reward r(y)                 loss of a preference, with the margin m = r(w) - r(l)
    dpo    β log(π(y) / ρ(y))          -(1 - ε) log σ(m) - ε log σ(-m)           arXiv:2305.18290, (7)
    ipo    β log(π(y) / ρ(y)) / |y|    (m / β - 1 / (2 β))²                      arXiv:2310.12036, (17)
    simpo  β log π(y) / |y|            -(1 - ε) log σ(m - γ) - ε log σ(γ - m)    arXiv:2405.14734, (6)
    orpo   β log π(y) / |y|            -log π(w) / |w| - β log σ(o(w) - o(l))    arXiv:2403.07691, (6)

ε is `preference.label_smoothing`, for labels of which a share ε is wrong (cDPO, ericmitchell.ai/cdpo.pdf); in
the papers on dpo and simpo ε is 0. γ is `preference.target_margin`. ipo's β is the paper's τ, orpo's β the
paper's λ. o(y) is the log of the odds p / (1 - p) of p = π(y)^(1/|y|). `preference.average_log_p` adds or
removes the division by |y| in dpo and ipo: the formula of the paper on ipo lacks it, the experiments of its
authors have it, by a comment in TRL.

The reference needs no second model: log ρ(y) of all answers is computed once, before the first step
(answers.py), and kept in the run's folder (lptune/checkpoint/reference.py).

All numbers are float32. Shapes: B rows, S tokens of a row, T = B * S, D documents of a batch, P preferences
of a batch, N documents of the data, M metrics. A dimension of size 2 is (chosen, rejected).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lptune.config import PreferenceLossConfig
from lptune.data import Batch
from lptune.distributed import World
from lptune.training.answers import sum_by_document

METRICS = ("loss", "accuracy", "reward_chosen", "reward_rejected", "margin", "log_p_chosen", "log_p_rejected")
"""Means over preferences: the loss; the share with r(w) > r(l); r(w), r(l) and m; log π(w) and log π(l)."""


class Answers(NamedTuple):
    """The answers of the P preferences of a batch, on the batch's device."""

    log_p_P2: Tensor
    """log π."""
    num_tokens_P2: Tensor
    """float32."""
    reference_P2: Tensor | None
    """log ρ; None if the loss has no reference."""


def answers_of(log_p_BS: Tensor, batch: Batch, reference_N: Tensor | None) -> Answers:
    """Adds up the log-probabilities of each answer of `batch`.

    log_p_BS: of each label, 0 where there is none, as the objective `log_probabilities` gives them.
    reference_N: log ρ of the answer of each document of the data, on the CPU.
    """
    sums_D2 = sum_by_document(torch.stack([log_p_BS, (batch.labels_BS >= 0).float()], -1), batch)
    # Found on the CPU, so that the host does not wait for the device. The rejected answer comes right after.
    chosen_P = torch.nonzero((batch.numbers_D >= 0) & (batch.numbers_D % 2 == 0))[:, 0]
    places_P2 = torch.stack([chosen_P, chosen_P + 1], 1)
    found_P22 = sums_D2[places_P2.to(sums_D2.device)]
    reference_P2 = None
    if reference_N is not None:
        reference_P2 = reference_N[batch.numbers_D[places_P2]].to(log_p_BS.device)
    return Answers(found_P22[..., 0], found_P22[..., 1], reference_P2)


def preference_loss(answers: Answers, cfg: PreferenceLossConfig) -> tuple[Tensor, Tensor]:
    """The sums over the P preferences of the loss, a number, and of METRICS (M,), which have no gradient."""
    log_p_P2, num_tokens_P2, reference_P2 = answers
    beta = cfg.beta_or_default
    mean_P2 = log_p_P2 / num_tokens_P2
    if cfg.has_reference:
        assert reference_P2 is not None
        ratio_P2 = log_p_P2 - reference_P2
        reward_P2 = beta * (ratio_P2 / num_tokens_P2 if cfg.averages_log_p else ratio_P2)
    else:
        reward_P2 = beta * mean_P2
    margin_P = reward_P2[:, 0] - reward_P2[:, 1]
    if cfg.loss == "ipo":
        loss_P = (margin_P / beta - 1 / (2 * beta)).square()
    elif cfg.loss == "orpo":
        # log(1 - p) as log(-expm1(log p)), which is exact where p is close to 1.
        log_odds_P2 = mean_P2 - torch.log(-torch.expm1(mean_P2))
        loss_P = -mean_P2[:, 0] - beta * F.logsigmoid(log_odds_P2[:, 0] - log_odds_P2[:, 1])
    else:
        short_P = margin_P - (cfg.margin_or_default if cfg.loss == "simpo" else 0.0)
        loss_P = -F.logsigmoid(short_P)
        if cfg.label_smoothing:
            smoothing = cfg.label_smoothing
            loss_P = (1 - smoothing) * loss_P - smoothing * F.logsigmoid(-short_P)
    loss, is_right_P = loss_P.sum(), (margin_P > 0).float()
    others = (is_right_P, *reward_P2.unbind(1), margin_P, *log_p_P2.unbind(1))
    return loss, torch.stack([loss, *(each_P.sum() for each_P in others)]).detach()


def mean_metrics(sums_M: Tensor, num_preferences: int, world: World, prefix: str = "") -> dict[str, float]:
    """METRICS for a record, with `prefix` before each name. A collective.

    sums_M: over the preferences of this rank. num_preferences: over all ranks.
    """
    totals = world.sums(sums_M)
    return {f"{prefix}{name}": each / num_preferences for name, each in zip(METRICS, totals, strict=True)}
