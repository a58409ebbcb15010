"""KTO (arXiv:2402.01306): learns from single answers, each of which is labelled desirable or undesirable.

    r(y)   log(π(y) / ρ(y)), the log-ratio of answer y: π is the model, ρ the model before training
    z      the log-ratio of an unrelated answer, on average: how far the model has moved from ρ in general

    desirable answer      loss  w_D * (1 - σ(β (r - z)))       gain above z is rewarded, with a bound
    undesirable answer    loss  w_U * (1 - σ(β (z - r)))       β: `kto.beta`; w_D, w_U: `kto.…_weight`

z = max(0, mean of r over mismatched documents), which are prompts with answers to other prompts. No gradient
goes through it. The paper, TRL and lptune compute it with the weights of the current step, from the prompts
and answers that the step trains on. Two things differ:

    one z for    paper: a micro-batch; TRL: a micro-batch of all ranks; lptune: the whole step. So the loss
                 depends neither on the number of ranks nor on the micro-batch size, and z has less noise.
    rotation     paper, TRL: of the answers of a micro-batch; lptune: of those of a packed row, which are the
                 same in all epochs, so that log ρ is computed once (lptune/data/mismatched.py).

z costs one forward more in each step, as in TRL, without a backward.

The gradient of the loss is that of r, times w β σ(x) (1 - σ(x)) in size, where x is the argument of σ. So
answers that are far on the right side of z count little, and so do those that are far on the wrong side.

All numbers are float32, z is added up in float64. Shapes: B rows, S tokens of a row, A answers of a batch, N
documents of the data, M sums.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from lptune.config import KtoLossConfig
from lptune.data import Batch, Rows
from lptune.distributed import World
from lptune.models import Backbone, DocumentBounds, log_probabilities
from lptune.training.answers import answers_in

SUMS = (
    "loss", "num_desirable", "num_undesirable",
    "reward_desirable", "reward_undesirable", "log_p_desirable", "log_p_undesirable",
)  # fmt: skip
"""What `kto_loss` adds up over answers: the loss; the answers of each label, and over these β r and log π."""


@torch.no_grad()
def unrelated_ratio(model: Backbone, batches: Iterable[Batch], reference_N2: Tensor, world: World) -> Tensor:
    """z: the mean log-ratio of mismatched documents, at least 0. Float32, 0-dimensional, on the device; the
    same on all ranks. A collective; the host does not wait for the device.

    batches: this rank's share of the mismatched documents. reference_N2: of their data (`reference_log_p`).
    """
    totals_2 = torch.zeros(2, dtype=torch.float64, device=world.device)  # of the ratios, of the answers
    for batch in batches:
        batch = batch.to(world.device)
        documents = DocumentBounds.of(batch)
        log_p_BS = model(batch.tokens_BS, documents, batch.labels_BS, loss=log_probabilities)
        log_p_A, numbers_A = answers_in(log_p_BS, batch)
        ratio_A = (log_p_A - reference_N2[numbers_A, 1].to(world.device)).double()
        totals_2 += torch.stack([ratio_A.sum(), ratio_A.new_tensor(len(ratio_A))])
    if world.rank % world.ranks_per_row:  # these ranks have the same documents as the first of them
        totals_2.zero_()
    world.sum_(totals_2)
    return (totals_2[0] / totals_2[1]).clamp(min=0).float()


def kto_loss(
    log_p_BS: Tensor, batch: Batch, rows: Rows, reference_N2: Tensor, z: Tensor, cfg: KtoLossConfig
) -> tuple[Tensor, Tensor]:
    """The loss, summed over the answers of `batch`, and SUMS (M,), which have no gradient.

    log_p_BS: as the objective `log_probabilities` gives them. rows: the data of `batch`, with the labels.
    reference_N2: of these rows (`reference_log_p`). z: of the step.
    """
    log_p_A, numbers_A = answers_in(log_p_BS, batch)
    ratio_A = log_p_A - reference_N2[numbers_A, 0].to(log_p_A.device)
    desirable_A = torch.from_numpy(rows.documents.is_desirable_N[numbers_A.numpy()]).to(log_p_A.device)
    weight_A = torch.where(desirable_A, cfg.desirable_weight, cfg.undesirable_weight)
    # 1 - σ(x) is σ(-x), which is exact where σ(x) is close to 1.
    loss = (weight_A * torch.sigmoid(cfg.beta * torch.where(desirable_A, z - ratio_A, ratio_A - z))).sum()
    which_2A = torch.stack([desirable_A, ~desirable_A]).float()
    sums = [which_2A.sum(1), which_2A @ (cfg.beta * ratio_A), which_2A @ log_p_A]
    return loss, torch.cat([loss[None], *sums]).detach()


def kto_metrics(sums_M: Tensor, z: Tensor, world: World, prefix: str = "") -> dict[str, float]:
    """The means of SUMS over answers for a record, the margin between the mean rewards, and z as `kl`; with
    `prefix` before each name. What has no answer is left out. A collective.

    sums_M: over the answers of this rank.
    """
    sums = dict(zip(SUMS, world.sums(sums_M), strict=True))
    counts = {label: sums.pop(f"num_{label}") for label in ("desirable", "undesirable")}
    found = {"loss": sums.pop("loss") / sum(counts.values()), "kl": z.item()}
    for name, each in sums.items():
        if count := counts[name.rpartition("_")[2]]:
            found[name] = each / count
    if all(counts.values()):
        found["margin"] = found["reward_desirable"] - found["reward_undesirable"]
    return {f"{prefix}{name}": each for name, each in found.items()}
