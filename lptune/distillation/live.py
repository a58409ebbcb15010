"""The teacher as a frozen model that runs on the ranks of the student.

    hidden_BSH = teacher.hidden_states(tokens_BS, documents)                without a gradient
    loss_BS = student(tokens_BS, documents, labels_BS, distillation(hidden_BSH, teacher, cfg.distillation))

The logits of a teacher take B x S x V numbers: with 128,256 words, 2 GB for 8,192 tokens in bf16. They never
exist together. The teacher gives its last hidden states, 1/60 of that, and the objective applies the
teacher's head to a chunk of them where the student's head works on the same chunk (models/chunks.py). FSDP
keeps the weights of the root module (embeddings, norm, head) gathered between forward and backward, so the
head can run there without another gather.
"""

from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import torch
from torch import Tensor

from lptune import checkpoint, data, distributed, linear, models, training
from lptune.base.files import read_json
from lptune.config import DistillationConfig, DistillConfig, PrecisionConfig
from lptune.distillation.files import digest_of
from lptune.distributed import World


def config_digest(folder: Path) -> str:
    """Identifies the content of config.json in a model's folder."""
    return digest_of(read_json(folder / "config.json"))[:16]


class LiveTeacher:
    """A frozen model, sharded over the ranks like the student."""

    started_on: date | None = None
    """The day that chat templates print, if the teacher decides it."""
    model: models.Backbone | None = None
    """The model, after `load`."""
    low: linear.LowPrecision | None = None
    """What verifies its first passes, after `load`."""

    def __init__(self, cfg: DistillConfig, world: World) -> None:
        """Reads the headers of the weights. Raises UserError as `checkpoint.read_base` does."""
        assert cfg.teacher.path is not None
        self._cfg, self._world = cfg, world
        self._base = checkpoint.read_base(cfg.teacher.path, world.print, key="teacher.path")

    @property
    def digest(self) -> str:
        """A digest that identifies the teacher's weights."""
        return checkpoint.weights_digest(self._base.folder)[:16]

    @property
    def config_digest(self) -> str:
        """A digest of config.json, which decides what the weights compute."""
        return config_digest(self._base.folder)

    def check_tokens(self, tokenizer: data.Tokenizer, vocab_size: int) -> None:
        """Raises UserError unless the teacher reads and predicts the same tokens as the student."""
        data.check_same_tokens(tokenizer, vocab_size, self._base.folder, self._base.config.vocab_size)

    def check_rows(self, rows: data.Rows, chat_template: str | None) -> None:
        """Nothing to check: the model can read any rows."""

    def on_meta(self) -> models.Backbone:
        """The model before it is cut and sharded, for `training.check_memory`."""
        model = self._base.build_on_meta()
        _freeze(model, self._cfg, self._world)
        return model

    def load(self) -> None:
        """Builds, shards and fills the model. A collective."""
        self.model = self._base.build_on_meta()
        plan = build_teacher(self.model, self._cfg, self._world)
        distributed.materialize(self.model, self._world, self._cfg)
        total = checkpoint.num_elements_here(self.model)
        with self._world.phase("loading the teacher's weights", total=total) as advance:
            checkpoint.load_hf(self.model, self._base.index, self._world, advance=advance)
        verify = self._cfg.precision.verify
        self.low = linear.LowPrecision(self.model, plan, world=self._world, verify=verify)

    @torch.no_grad()
    def hidden_states(self, batch: data.Batch) -> Tensor:
        """The last hidden states (B, S, H) of `batch`, which may be on the CPU."""
        assert self.model is not None, "load comes first"
        batch = batch.to(self._world.device)
        return self.model.hidden_states(batch.tokens_BS, models.DocumentBounds.of(batch))

    def objective(self, batch: data.Batch) -> models.Objective:
        """The loss of the section `distillation` for each token of `batch`."""
        hidden_BSH = self.hidden_states(batch)
        assert self.model is not None
        return distillation(hidden_BSH, self.model, self._cfg.distillation)


def build_teacher(teacher: models.Backbone, cfg: DistillConfig, world: World) -> linear.Plan:
    """Freezes, cuts and shards `teacher`, which is on meta, like the student. Returns its precision plan.

    With teacher.precision=int8_weight_only, weights of linear layers are stored and gathered in INT8, the
    others in the compute dtype. Raises UserError if the mesh does not divide the model.
    """
    plan = _freeze(teacher, cfg, world)
    distributed.parallelize(teacher, world, replace(cfg, activation_checkpointing="none"))
    return plan


def _freeze(teacher: models.Backbone, cfg: DistillConfig, world: World) -> linear.Plan:
    teacher.to(getattr(torch, cfg.compute_dtype)).requires_grad_(False).train(False)
    precision = PrecisionConfig(kind=cfg.teacher.precision, verify=cfg.precision.verify)
    return linear.convert(teacher, precision, device=world.device)


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


def planned_step(cfg: DistillConfig) -> training.PlannedStep:
    """The student, with the teacher beside it unless its words are read from logits.folder."""
    return _Distillation(frozen="teacher.path" if cfg.runs_teacher else None)


@dataclass(frozen=True)
class _Distillation(training.PlannedStep):
    def build_frozen(self, frozen: models.Backbone, cfg: DistillConfig, world: World) -> None:
        build_teacher(frozen, cfg, world)

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
            return distillation(hidden_BSH, frozen, cfg.distillation)
        log_p_BSk = torch.zeros(*tokens_BS.shape, cfg.logits.top_k, device=tokens_BS.device)
        rest_BS = torch.zeros(tokens_BS.shape, device=tokens_BS.device)
        return top_k_distillation(log_p_BSk, log_p_BSk.int(), rest_BS, cfg.distillation)
