"""What 8 bits cost before the first step, said in one line if it is much.

Outliers in the activations of a trained model can take some percent of its loss, and training does not show
it: the loss falls from where it began. So each rank runs its first micro-batch forward twice, in the
precision of training and in compute dtype, on the same weights. The log-probabilities are compared target by
target, whatever the recipe's own loss is: the loss of DPO begins at log 2 for any model.

One micro-batch has few targets. So the line needs a difference of more than LIMIT and of more than two
standard errors; `lptune advise --quality` measures more of them, in every kind. Nothing that the training
reads changes.
"""

import math

import torch
from torch import Tensor

from lptune.config import PRECISION_KINDS, RunConfig
from lptune.data import Batch, Loader
from lptune.distributed import World
from lptune.linear import LowPrecision
from lptune.linear.steps.shadow import ShadowPass
from lptune.models import Backbone, DocumentBounds, log_probabilities
from lptune.training.shadow import leaving_no_trace

LIMIT = 0.01
"""The share of the loss that a precision may cost before the first step."""


@torch.no_grad()
def check_first_loss(
    model: Backbone, low: LowPrecision, loader: Loader, cfg: RunConfig, world: World, step: int
) -> None:
    """Prints a line if low precision makes the first micro-batches' loss more than LIMIT worse. A collective.
    step: number of steps done; a run that continues has had its line.

    Measures nothing where no layer can run in compute dtype (int8_weight_only keeps no other weights, and
    tensor parallelism cuts the layers), for soft-capped attention on a GPU, and for a kind that is taken for
    what is served, whose cost training is to take back. model: parallelized, with weights. low: of `model`.
    """
    kind, keys = cfg.precision.kind, PRECISION_KINDS[cfg.precision.kind]
    if model.facts.attention_softcap is not None and world.device.type == "cuda":
        return  # its attention is a compiled kernel, and these passes are eager: it would store all scores
    if world.experts is not None:
        return  # a rank has only some of the experts
    if step or cfg.precision.is_none or keys.stores_low or keys.for_servers or cfg.parallel.tensor > 1:
        return
    batch = loader.micro_batches(0)[0].to(world.device)
    with leaving_no_trace(model, low, 0, world.token_rank * loader.micro_batches_per_rank):
        passes = ShadowPass(model, low.plan)
        with passes.low():
            low_BS = _losses(model, batch)
        with passes.high():
            high_BS = _losses(model, batch)
    more_BS = low_BS - high_BS
    targets = torch.tensor(float(batch.num_targets), device=world.device)
    sums = world.sums(torch.stack([low_BS.sum(), high_BS.sum(), more_BS.square().sum(), targets]))
    low_loss, high_loss, squares, num_targets = (float(each) for each in sums)
    more = low_loss - high_loss
    # Of the sum over the targets, as if they were independent.
    error = max(0.0, squares - more * more / max(1.0, num_targets)) ** 0.5
    is_worse = more > LIMIT * high_loss and more > 2 * error
    if is_worse or (math.isfinite(high_loss) and not math.isfinite(low_loss)):
        can_rotate = kind.startswith("int8") and kind != "int8_rotated"
        other = "int8_rotated bears outliers in activations; " if can_rotate else ""
        world.print(
            f"warning: precision.kind={kind}: the loss of the first micro-batch is "
            f"{low_loss / num_targets:.4f}, {100 * more / high_loss:.1f} % above that of high precision "
            f"({high_loss / num_targets:.4f}); {other}`lptune advise --quality` compares the kinds"
        )


def _losses(model: Backbone, batch: Batch) -> Tensor:
    """The cross-entropy of each target (B, S), float32; 0 where there is none."""
    documents = DocumentBounds.of(batch)
    log_p_BS: Tensor = model(batch.tokens_BS, documents, batch.labels_BS, loss=log_probabilities)
    return -log_p_BS.float()
