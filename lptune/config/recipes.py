"""The config of each shipped recipe: the keys of every run (schema.py) and those of the recipe.

`EvaluatedConfig` has the keys of recipes that evaluate on held-out rows while they train.
"""

from dataclasses import dataclass, field

from lptune.config.checks import at_least, check_path, one_of, positive
from lptune.config.errors import UserError
from lptune.config.schema import RunConfig


@dataclass(frozen=True, kw_only=True)
class EvaluatedConfig(RunConfig):
    """The keys of a run that evaluates on held-out rows."""

    eval_every_steps: int = 100
    """Steps between two evaluations on the held-out rows, also before the first and after the last step; 0:
    never."""
    early_stop_after: int = 0
    """End the run after this many evaluations in a row without an eval_loss below the best so far; 0: never.
    The export is then the best checkpoint that checkpoint.keep_best kept, or else the last one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("eval_every_steps", self.eval_every_steps, 0)
        at_least("early_stop_after", self.early_stop_after, 0)
        if self.early_stop_after and not (self.has_held_out_rows and self.eval_every_steps):
            raise UserError(
                "early_stop_after: needs evaluations; set data.eval_fraction or data.eval_source, and "
                "eval_every_steps, or early_stop_after=0"
            )
        if self.checkpoint.keep_best and not (self.has_held_out_rows and self.eval_every_steps):
            raise UserError(
                "checkpoint.keep_best: needs evaluations; set data.eval_fraction or data.eval_source, and "
                "eval_every_steps, or checkpoint.keep_best=0"
            )
        if self.checkpoint.keep_best and self.checkpoint.every_steps % self.eval_every_steps:
            raise UserError(
                f"checkpoint.keep_best: uses evaluations, so checkpoint.every_steps "
                f"({self.checkpoint.every_steps}) must be a multiple of eval_every_steps "
                f"({self.eval_every_steps})"
            )

    @property
    def has_held_out_rows(self) -> bool:
        """Whether the config asks for held-out rows."""
        return bool(self.data.eval_fraction or self.data.eval_source)


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """The model whose probabilities the student learns. It is frozen and sharded over the same ranks."""

    path: str
    """Folder of a Hugging Face checkpoint with the student's tokenizer; any width and depth."""
    precision: str = "int8_weight_only"
    """How its weights are stored and gathered: int8_weight_only (one byte for each weight) | none (the
    compute dtype). It computes in the compute dtype."""

    def __post_init__(self) -> None:
        check_path("teacher.path", self.path)
        one_of("teacher.precision", self.precision, ("int8_weight_only", "none"))


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """The loss of a target token: labels * cross-entropy + (1 - labels) * temperature^2 * divergence, where
    divergence = (1 - reverse) * KL(teacher || student) + reverse * KL(student || teacher).
    """

    labels: float = 0.5
    """Share of the cross-entropy with the token in the data. 0: the teacher alone."""
    reverse: float = 0.0
    """Share of the reverse KL in the divergence. 0: forward KL alone; 1: reverse KL alone."""
    temperature: float = 1.0
    """Divides the logits of teacher and student in the divergence. Its square keeps the size of the gradient
    (arXiv:1503.02531, section 2)."""

    def __post_init__(self) -> None:
        if not 0 <= self.labels < 1:
            raise UserError(
                f"distillation.labels: must be at least 0 and below 1 (1 would not use the teacher), found "
                f"{self.labels}"
            )
        if not 0 <= self.reverse <= 1:
            raise UserError(f"distillation.reverse: must be within 0 and 1, found {self.reverse}")
        positive("distillation.temperature", self.temperature)


@dataclass(frozen=True, kw_only=True)
class DistillConfig(EvaluatedConfig):
    """All keys of the recipe distill."""

    teacher: TeacherConfig
    distillation: DistillationConfig = field(default_factory=DistillationConfig)


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(EvaluatedConfig):
    """All keys of the recipe full_finetune."""

    num_samples: int = 0
    """Number of held-out prompts that are answered greedily and printed, before and after training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("num_samples", self.num_samples, 0)
        if self.num_samples and not self.has_held_out_rows:
            raise UserError(
                "num_samples: needs held-out rows; set data.eval_fraction or data.eval_source, or "
                "num_samples=0"
            )
