"""What a recipe says of its step, for a dry run (`lptune plan`) and for `lptune advise`.

A recipe offers a function beside `main`, which is called without ranks, data or weights:

    def planned_step(cfg: FinetuneConfig) -> training.PlannedStep:
        return training.PlannedStep("summed_cross_entropy")

Without it, the step of a recipe is planned as PlannedStep(). None says that nothing is trained.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lptune import models
from lptune.distributed import World, parallelize


@dataclass(frozen=True)
class PlannedStep:
    """Forward and backward of one model, whose loss is a function of one objective."""

    objective: str = "summed_cross_entropy"
    """Its name in `lptune.models`."""
    frozen: str | None = None
    """Key of the config that names a second model, which runs in the step without being trained,
    "teacher.path"; None: there is none. A step that has one is a subclass whose `loss` runs it."""

    def build_frozen(self, frozen: models.Backbone, cfg: Any, world: World) -> None:
        """Freezes, cuts and shards the second model, which is on meta, as the recipe does: here in
        `compute_dtype` and high precision. A recipe that builds it in another way says so in its subclass.
        """
        frozen.to(getattr(torch, cfg.compute_dtype)).requires_grad_(False).train(False)
        parallelize(frozen, world, replace(cfg, activation_checkpointing="none"))

    def loss(
        self, frozen: models.Backbone | None, tokens_BS: Tensor, documents: models.DocumentBounds, cfg: Any
    ) -> models.Objective:
        """The objective of a micro-batch, whose passes of the second model run here. frozen: the second
        model; None where it is left out.
        """
        objective: models.Objective = getattr(models, self.objective)
        return objective
