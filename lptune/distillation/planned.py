"""The step of the recipe distill, for a dry run (lptune/training/planned.py)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lptune import models, training
from lptune.config import DistillConfig
from lptune.distributed import World


def planned_step(cfg: DistillConfig) -> training.PlannedStep:
    """The student, with the teacher beside it unless its words are read from logits.folder."""
    return _Distillation(frozen="teacher.path" if cfg.runs_teacher else None)


@dataclass(frozen=True)
class _Distillation(training.PlannedStep):
    def build_frozen(self, frozen: models.Backbone, cfg: DistillConfig, world: World) -> None:
        training.build_teacher(frozen, cfg, world)

    def loss(
        self,
        frozen: models.Backbone | None,
        tokens_BS: Tensor,
        documents: models.DocumentBounds,
        cfg: DistillConfig,
    ) -> models.Objective:
        if frozen is not None:
            with torch.no_grad():
                hidden_BSH = frozen.hidden_states(tokens_BS, documents)
            return training.distillation(hidden_BSH, frozen, cfg.distillation)
        log_p_BSk = torch.zeros(*tokens_BS.shape, cfg.logits.top_k, device=tokens_BS.device)
        rest_BS = torch.zeros(tokens_BS.shape, device=tokens_BS.device)
        return training.top_k_distillation(log_p_BSk, log_p_BSk.int(), rest_BS, cfg.distillation)
