"""The config of each shipped recipe: the keys of every run (schema.py) and those of the recipe.

`EvaluatedConfig` has the keys of recipes that evaluate on held-out rows while they train.
"""

from dataclasses import dataclass, field

from lptune.config.checks import at_least, check_path, one_of, positive
from lptune.config.data_files import metric_names
from lptune.config.errors import UserError
from lptune.config.load import as_written
from lptune.config.schema import RunConfig


@dataclass(frozen=True, kw_only=True)
class EvaluatedConfig(RunConfig):
    """The keys of a run that evaluates on held-out rows."""

    eval_every_steps: int = 100
    """Steps between two evaluations on the held-out rows, also before the first and after the last step; 0:
    never."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("eval_every_steps", self.eval_every_steps, 0)
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


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(EvaluatedConfig):
    """All keys of the recipe continued_pretrain."""

    num_tokens: int | None = None
    """Number of tokens to train on, instead of num_steps or num_epochs. Every position of a packed row
    counts, padding and repeated rows too: a step has global_batch_size * data.seq_len tokens. The run ends
    with the step that reaches this number; that step is not cut."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_tokens is None:
            return
        at_least("num_tokens", self.num_tokens, 1)
        if self.num_steps is not None:
            raise UserError(
                f"num_tokens: {self.num_tokens} tokens and num_steps={self.num_steps} both set the length of "
                "the run; give one of them"
            )
        self.schedule.check_fits(-(-self.num_tokens // self.tokens_per_step))

    @property
    def given_num_steps(self) -> int | None:
        """The number of steps, if num_tokens or num_steps decides it; None: num_epochs does."""
        return self.num_steps if self.num_tokens is None else -(-self.num_tokens // self.tokens_per_step)

    @property
    def source_names(self) -> tuple[str, ...]:
        """A name for each entry of data.source, for the keys of metrics.jsonl."""
        return metric_names(self.data.sources, as_written(self)["data"]["source"])

    @property
    def held_out_names(self) -> tuple[str, ...]:
        """A name for each source of the held-out rows: data.eval_source if that is set, else data.source."""
        if self.data.eval_source is None:
            return self.source_names
        return metric_names(self.data.eval_sources, as_written(self)["data"]["eval_source"])
