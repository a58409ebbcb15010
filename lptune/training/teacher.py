"""The teacher of a distillation: a frozen model that runs on the same ranks as the student.

    plan = build_teacher(teacher := base.build_on_meta(), cfg, world)       then materialize, and load_hf
    hidden_BSH = teacher.hidden_states(tokens_BS, documents)                without a gradient
    loss_BS = student(tokens_BS, documents, labels_BS, distillation(hidden_BSH, teacher, cfg.distillation))

The logits of a teacher take B x S x V numbers: with 128,256 words, 2 GB for 8,192 tokens in bf16. They never
exist together. The teacher gives its last hidden states, 1/60 of that, and the objective applies the
teacher's head to a chunk of them where the student's head works on the same chunk (models/chunks.py). FSDP
keeps the weights of the root module (embeddings, norm, head) gathered between forward and backward, so the
head can run there without another gather.

`top_k_distillation` is the same loss with log-probabilities that were computed before (lptune/distillation).
"""

from dataclasses import replace

import torch
from torch import Tensor

from lptune import distributed, linear, models
from lptune.config import DistillationConfig, DistillConfig, PrecisionConfig
from lptune.distributed import World


def build_teacher(teacher: models.Backbone, cfg: DistillConfig, world: World) -> linear.Plan:
    """Freezes, cuts and shards `teacher`, which is on meta, like the student. Returns its precision plan.

    With teacher.precision=int8_weight_only, weights of linear layers are stored and gathered in INT8, the
    others in the compute dtype. Raises UserError if the mesh does not divide the model.
    """
    teacher.to(getattr(torch, cfg.compute_dtype)).requires_grad_(False).train(False)
    precision = PrecisionConfig(kind=cfg.teacher.precision, verify=cfg.precision.verify)
    plan = linear.convert(teacher, precision, device=world.device)
    distributed.parallelize(teacher, world, replace(cfg, activation_checkpointing="none"))
    return plan


def distillation(hidden_BSH: Tensor, teacher: models.Backbone, cfg: DistillationConfig) -> models.Objective:
    """The loss of `DistillationConfig` for each token. hidden_BSH: the teacher's hidden states."""
    divergence = models.Divergence(
        hidden_BSH, teacher.logits_of, reverse=cfg.reverse, temperature=cfg.temperature
    )
    return _with_labels(divergence, cfg)


def top_k_distillation(
    log_p_BSk: Tensor, words_BSk: Tensor, log_rest_BS: Tensor, cfg: DistillationConfig
) -> models.Objective:
    """`distillation` over k words of each token, with all other words as one event.

    log_p_BSk, log_rest_BS: the teacher's, at the temperature of `cfg`. words_BSk: integers.
    """
    divergence = models.TopKDivergence(
        log_p_BSk, words_BSk, log_rest_BS, reverse=cfg.reverse, temperature=cfg.temperature
    )
    return _with_labels(divergence, cfg)


def _with_labels(divergence: models.Objective, cfg: DistillationConfig) -> models.Objective:
    weighted = ((1 - cfg.labels) * cfg.temperature**2, divergence)
    if cfg.labels == 0:
        return models.WeightedSum(weighted)
    return models.WeightedSum(weighted, (-cfg.labels, models.log_probabilities))
