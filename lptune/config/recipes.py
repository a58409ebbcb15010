"""The config of each recipe that trains: the keys of every run (schema.py) and those of the recipe.

`EvaluatedConfig` has the keys of recipes that evaluate on held-out rows while they train. The configs of
recipes that train nothing are in inference.py.
"""

from dataclasses import dataclass, field

from lptune.base.errors import UserError
from lptune.config.checks import at_least, check_path, mesh_axes, one_of, positive
from lptune.config.schema import RunConfig
from lptune.config.sources import metric_names


@dataclass(frozen=True, kw_only=True)
class EvaluatedConfig(RunConfig):
    """The keys of a run that evaluates on held-out rows."""

    eval_every_steps: int = 100
    """Steps between two evaluations on the held-out rows, also before the first and after the last step; 0:
    never."""
    early_stop_after: int = 0
    """End the run after this many evaluations in a row without an eval_loss below the best so far; 0: never.
    The export is then the best checkpoint that checkpoint.keep_best kept, or else the last one."""
    num_samples: int = 0
    """Number of held-out prompts that are answered greedily and printed, before and after training. The
    prompt of raw text is its beginning. Of preferences and labels, the good answers are the references."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("eval_every_steps", self.eval_every_steps, 0)
        at_least("early_stop_after", self.early_stop_after, 0)
        at_least("num_samples", self.num_samples, 0)
        if self.num_samples and not self.has_held_out_rows:
            raise UserError(
                "num_samples: needs held-out rows; set data.eval_fraction or data.eval_source, or "
                "num_samples=0"
            )
        if self.early_stop_after and not (self.has_held_out_rows and self.eval_every_steps):
            raise UserError(
                "early_stop_after: needs evaluations; set data.eval_fraction or data.eval_source, and "
                "eval_every_steps, or early_stop_after=0"
            )
        if self.early_stop_after and self.export.average_checkpoints > 1:
            raise UserError(
                "early_stop_after and export.average_checkpoints exclude each other: a run that ends early "
                "may leave fewer checkpoints; set one of them"
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

    path: str | None = None
    """Folder of a Hugging Face checkpoint with the student's tokenizer; any width and depth. distill with
    logits.folder does not run it, and only checks that the numbers there are of these weights, if the folder
    exists."""
    precision: str = "int8_weight_only"
    """How its weights are stored and gathered: int8_weight_only (one byte for each weight) | none (the
    compute dtype). It computes in the compute dtype."""

    def __post_init__(self) -> None:
        if self.path is not None:
            check_path("teacher.path", self.path)
        one_of("teacher.precision", self.precision, ("int8_weight_only", "none"))


@dataclass(frozen=True, kw_only=True)
class LogitsConfig:
    """The teacher's most probable words for each target token, computed once (precompute_logits) and read
    from disk in training (distill), where no teacher runs."""

    folder: str | None = None
    """Folder that precompute_logits writes and distill reads. Not given: distill runs the teacher."""
    top_k: int = 64
    """Number of words for each target token. distill may use fewer than are stored."""
    dtype: str = "float16"
    """float16 | float32: dtype of the stored log-probabilities."""
    max_file_mib: float = 128.0
    """Size of a file, and of the memory that a rank needs to make it."""

    def __post_init__(self) -> None:
        if self.folder is not None:
            check_path("logits.folder", self.folder)
        at_least("logits.top_k", self.top_k, 1)
        one_of("logits.dtype", self.dtype, ("float16", "float32"))
        positive("logits.max_file_mib", self.max_file_mib)


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

    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    logits: LogitsConfig = field(default_factory=LogitsConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.runs_teacher and self.teacher.path is None:
            raise UserError(
                "teacher.path: is required; set it in the file or as an argument teacher.path=… (distill can "
                "read logits.folder instead, which precompute_logits wrote)"
            )

    @property
    def runs_teacher(self) -> bool:
        """Whether the recipe runs the model in teacher.path; if not, it reads logits.folder."""
        return self.logits.folder is None

    @property
    def model_paths(self) -> dict[str, str]:
        """Also the teacher's, if it runs."""
        if not self.runs_teacher:
            return super().model_paths
        assert self.teacher.path is not None
        return super().model_paths | {"teacher.path": self.teacher.path}


@dataclass(frozen=True, kw_only=True)
class PrecomputeConfig(DistillConfig):
    """All keys of the recipe precompute_logits: those of distill, so that one file serves both. Keys that
    only training uses have no effect."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.logits.folder is None:
            raise UserError(
                "logits.folder: is required; set it in the file or as an argument logits.folder=…"
            )

    @property
    def runs_teacher(self) -> bool:
        """True: the recipe runs the teacher and writes logits.folder."""
        return True

    def check_ranks(self, num_ranks: int) -> None:
        """The mesh alone: the recipe has no global batch."""
        mesh_axes(self.parallel, num_ranks)


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(EvaluatedConfig):
    """All keys of the recipe full_finetune."""


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(EvaluatedConfig):
    """All keys of the recipe continued_pretrain."""

    PREPARE = "prepare_texts"
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
                "the run; set one of them to null"
            )
        self.schedule.check_fits(-(-self.num_tokens // self.tokens_per_step))

    @property
    def given_num_steps(self) -> int | None:
        """The number of steps, if num_tokens or num_steps decides it; None: num_epochs does."""
        return self.num_steps if self.num_tokens is None else -(-self.num_tokens // self.tokens_per_step)

    @property
    def source_names(self) -> tuple[str, ...]:
        """A name for each entry of data.source, for the keys of metrics.jsonl."""
        return metric_names(self.data.sources)

    @property
    def held_out_names(self) -> tuple[str, ...]:
        """A name for each source of the held-out rows: data.eval_source if that is set, else data.source."""
        return metric_names(self.data.eval_sources or self.data.sources)


@dataclass(frozen=True, kw_only=True)
class PreferenceLossConfig:
    """How the two answers of a preference are compared. lptune/training/preference.py has the formulas."""

    loss: str = "dpo"
    """dpo (arXiv:2305.18290) | ipo (arXiv:2310.12036) | simpo (arXiv:2405.14734) | orpo (arXiv:2403.07691).
    simpo and orpo need no reference."""
    beta: float | None = None
    """The factor of the rewards: β of dpo and simpo, τ of ipo; the weight λ of orpo's second term. Default:
    0.1, and 2.0 for simpo."""
    label_smoothing: float = 0.0
    """dpo, simpo: the assumed share of preferences whose answers are swapped, ε (cDPO)."""
    target_margin: float | None = None
    """simpo: the margin γ by which the reward of the chosen answer is to be larger. Default: 0.5."""
    average_log_p: bool | None = None
    """dpo, ipo: divide the log-probability of an answer by its number of tokens, as simpo and orpo do.
    Default: true for ipo (so in its authors' experiments and in TRL), false for dpo."""

    def __post_init__(self) -> None:
        one_of("preference.loss", self.loss, ("dpo", "ipo", "simpo", "orpo"))
        if self.beta is not None:
            positive("preference.beta", self.beta)
        if not 0 <= self.label_smoothing < 0.5:
            raise UserError(
                f"preference.label_smoothing: must be at least 0 and below 0.5, found {self.label_smoothing}"
            )
        if self.target_margin is not None:
            at_least("preference.target_margin", self.target_margin, 0)
        for key, is_given, losses in (
            ("label_smoothing", self.label_smoothing > 0, ("dpo", "simpo")),
            ("target_margin", self.target_margin is not None, ("simpo",)),
            ("average_log_p", self.average_log_p is not None, ("dpo", "ipo")),
        ):
            if is_given and self.loss not in losses:
                raise UserError(
                    f"preference.{key}: belongs to {' and '.join(losses)}, and preference.loss is "
                    f"{self.loss}; leave it out"
                )

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the model with the model before training."""
        return self.loss in ("dpo", "ipo")

    @property
    def beta_or_default(self) -> float:
        """`beta`, or the default of the loss."""
        return self.beta if self.beta is not None else 2.0 if self.loss == "simpo" else 0.1

    @property
    def averages_log_p(self) -> bool:
        """`average_log_p`, or the default of the loss."""
        return self.loss != "dpo" if self.average_log_p is None else self.average_log_p

    @property
    def margin_or_default(self) -> float:
        """`target_margin`, or the default of simpo."""
        return 0.5 if self.target_margin is None else self.target_margin


@dataclass(frozen=True, kw_only=True)
class WholeAnswersConfig(EvaluatedConfig):
    """The keys of a run whose loss is a function of the log-probabilities of whole answers."""

    WHY_ANSWERS = "the loss is a function of answers"
    """Not a key: why the prompt cannot be learned, for the message."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data.train_on_prompt:
            raise UserError(f"data.train_on_prompt: {self.WHY_ANSWERS}; set it to false")


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig(WholeAnswersConfig):
    """All keys of the recipe full_dpo."""

    PREPARE = "prepare_preferences"
    WHY_ANSWERS = "a preference compares two answers, and both have the same prompt"
    preference: PreferenceLossConfig = field(default_factory=PreferenceLossConfig)


@dataclass(frozen=True, kw_only=True)
class KtoLossConfig:
    """How the answers of each label are rewarded. lptune/training/kto.py has the formulas."""

    beta: float = 0.1
    """The factor of the rewards, β. A smaller value lets the model move further from the one before
    training."""
    desirable_weight: float = 1.0
    """The weight of desirable answers in the loss."""
    undesirable_weight: float = 1.0
    """The weight of undesirable answers in the loss. With unequal numbers of both, raise the weight of the
    rarer label: desirable_weight * (number of desirable answers) should be 1 to 4/3 times
    undesirable_weight * (number of undesirable answers) (the paper's equation 8)."""

    def __post_init__(self) -> None:
        positive("kto.beta", self.beta)
        at_least("kto.desirable_weight", self.desirable_weight, 0)
        at_least("kto.undesirable_weight", self.undesirable_weight, 0)
        if not (self.desirable_weight or self.undesirable_weight):
            raise UserError(
                "kto.desirable_weight and kto.undesirable_weight: both are 0, so there is nothing to learn; "
                "raise one of them"
            )


@dataclass(frozen=True, kw_only=True)
class KtoConfig(WholeAnswersConfig):
    """All keys of the recipe full_kto."""

    PREPARE = "prepare_labelled"
    WHY_ANSWERS = "a label is that of an answer, not of its prompt"
    kto: KtoLossConfig = field(default_factory=KtoLossConfig)
