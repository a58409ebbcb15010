"""Log-probabilities of whole answers: log π of a document's targets, added up.

π(y) is the model's probability of answer y after its prompt, the product over the answer's tokens; ρ(y) is
the same under the reference, which is the model before training. The reference needs no second model: log ρ
of all answers is computed once, before the first step.

All numbers are float32. Shapes: B rows, S tokens of a row, T = B * S, D documents of a batch with its
padding, A answers of a batch, N documents of the data.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from lptune.checkpoint import Base, Run
from lptune.config import RunConfig
from lptune.data import Batch, Prepared, Rows, evaluation_batches
from lptune.distributed import World
from lptune.models import Backbone, DocumentBounds, log_probabilities
from lptune.training.evaluating import evaluating


def sum_by_document(values_BSX: Tensor, batch: Batch) -> Tensor:
    """(D, X): the sum over the tokens of each document of `batch`, padding included."""
    document_T = (batch.positions_BS == 0).flatten().cumsum(0) - 1  # a document begins at position 0
    values_TX = values_BSX.flatten(0, 1)
    sums_DX = values_TX.new_zeros(len(batch.numbers_D), values_TX.shape[1])
    return sums_DX.index_add(0, document_T, values_TX)


def answers_in(log_p_BS: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """log π (A,) of the answers of `batch`, on its device, and the numbers (A,) of their documents in the
    data, on the CPU.

    log_p_BS: of each label, 0 where there is none, as the objective `log_probabilities` gives them.
    """
    log_p_D = sum_by_document(log_p_BS[..., None], batch)[:, 0]
    # Found on the CPU, so that the host does not wait for the device.
    places_A = torch.nonzero(batch.numbers_D >= 0)[:, 0]
    return log_p_D[places_A.to(log_p_D.device)], batch.numbers_D[places_A]


def reference_log_p(
    run: Run, base: Base, model: Backbone, rows: Prepared, *, mismatched: bool = False
) -> dict[str, Tensor]:
    """`answers_log_p` of the rows `train` and `held_out`, by the weights of `base`: read from the run's
    folder if an earlier launch has kept them, else computed, with the weights of `base` in `model`, and kept.
    To be called between `plan_steps` and `run.load`. A collective.
    """
    both = {"train": rows.train, "held_out": rows.evaluation}
    others = {"mismatched": rows.train.mismatched.digest} if mismatched else {}
    kept = run.reference(rows.evaluation.digest if rows.evaluation else "", **others)
    found = kept.read(rows.train, rows.evaluation, *((2,) if mismatched else ()))
    if found is None:  # of the weights before training, also where the run continues a checkpoint
        run.load_base(base, model)
        found = answers_log_p(model, both, run.cfg, run.world, mismatched=mismatched)
        kept.keep(found)
    return found


def answers_log_p(
    model: Backbone,
    rows: Mapping[str, Rows | None],
    cfg: RunConfig,
    world: World,
    *,
    mismatched: bool = False,
) -> dict[str, Tensor]:
    """log π of the answer of each document of each of `rows`: (N,), float32, on the CPU, the same on all
    ranks; with `mismatched` (N, 2), also of its mismatched answer (data/mismatched.py). A collective. None
    among `rows` is left out.
    """
    found = {name: each for name, each in rows.items() if each is not None}
    others = {name: each.mismatched for name, each in found.items()} if mismatched else {}
    count = sum(each.num_documents for each in [*found.values(), *others.values()])
    world.print(f"reference: computing the log-probabilities of {count:,} answers before training")
    log_p = {name: _answer_log_p(model, each, cfg, world) for name, each in found.items()}
    if not mismatched:
        return log_p
    other_log_p = {name: _answer_log_p(model, each, cfg, world) for name, each in others.items()}
    return {name: torch.stack([log_p[name], other_log_p[name]], 1) for name in found}


@evaluating
def _answer_log_p(model: Backbone, rows: Rows, cfg: RunConfig, world: World) -> Tensor:
    log_p_N = torch.zeros(rows.num_documents, device=world.device)
    for batch in evaluation_batches(
        rows, cfg.micro_batch_size, rank=world.data_rank, num_ranks=world.data_size
    ):
        batch = batch.to(world.device)
        documents = DocumentBounds.of(batch)
        log_p_BS = model(batch.tokens_BS, documents, batch.labels_BS, loss=log_probabilities)
        log_p_A, numbers_A = answers_in(log_p_BS, batch)
        log_p_N[numbers_A.to(world.device)] = log_p_A
    if world.rank % world.ranks_per_row:  # these ranks have the same numbers as the first of them
        log_p_N.zero_()
    world.sum_(log_p_N)  # each document was on one data rank, and 0 on the others
    return log_p_N.cpu()
