"""The keys that decide what an update does: the optimizer, and the learning rate of each step."""

from dataclasses import dataclass
from typing import NamedTuple

from lptune.base.errors import UserError
from lptune.config.checks import at_least, one_of, positive


class OptimizerKind(NamedTuple):
    """What a resume has to know of an optimizer.kind."""

    moments: str
    """What the optimizer keeps of each weight between updates. Kinds with the same moments continue from each
    other's checkpoints.
    """
    stored: str
    """How it stores them, for messages."""
    num_bits: int
    """Of an element of them."""
    num_moments: int = 2
    """The most of them that a weight matrix has."""


OPTIMIZER_KINDS = {
    "adamw": OptimizerKind("two moments", "in float32", 32),
    "adamw_bf16": OptimizerKind("two moments", "in bfloat16", 16),
    "adamw_8bit": OptimizerKind("two moments", "in 8 bits", 8),
    "muon": OptimizerKind("momentum of matrices, two moments of the rest", "in float32", 32, 1),
    "sgd": OptimizerKind("momentum or nothing", "in float32", 32, 1),
}
"""By `optimizer.kind`."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW on float32 master weights (int8_weight_only: on the INT8 weights themselves)."""

    kind: str = "adamw"
    """adamw | adamw_bf16 | adamw_8bit: AdamW whose two moments are stored in float32, or (of matrices of
    4,096 elements or more) in bfloat16, or in 8 bits with a scale for each 128 elements of a row; muon: the
    momentum of a matrix with all singular values made about 1, and AdamW for the rest; sgd."""
    master: str = "float32"
    """float32 | none: what an update changes. none: bfloat16 weights without a float32 copy, rounded
    stochastically, with bfloat16 gradients: 4 bytes a parameter less than 8 (docs/optimizers.md)."""
    in_backward: bool = False
    """Update each parameter as soon as backward has its gradient, and free that. A step is then one
    micro-batch on each rank (docs/optimizers.md says what else changes)."""
    cpu_offload: bool = False
    """Keep the moments of AdamW in host memory. They visit the GPU for each update, a few rows at a time. On
    a CPU it only takes time."""
    lr: float = 2.0e-5
    """Peak learning rate."""
    weight_decay: float = 0.0
    """Decoupled weight decay, on matrices only (not on norms and biases)."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1.0e-8
    """Added to the square root of the second moment."""
    momentum: float = 0.0
    """sgd: decay of the sum of gradients that it follows; 0: it follows the gradient, and keeps nothing."""
    ema_decay: float = 0.0
    """Keep an exponential moving average of the weights: ema = ema_decay * ema + (1 - ema_decay) * weight
    after each update, with a smaller decay in the first ones; 0: none. 4 bytes per trained parameter. The
    export has the averages (export.ema); training and held-out losses are those of the weights."""

    def __post_init__(self) -> None:
        one_of("optimizer.kind", self.kind, tuple(OPTIMIZER_KINDS))
        one_of("optimizer.master", self.master, ("float32", "none"))
        positive("optimizer.lr", self.lr)
        at_least("optimizer.weight_decay", self.weight_decay, 0)
        positive("optimizer.eps", self.eps)
        for key in ("beta1", "beta2", "momentum", "ema_decay"):
            if not 0 <= (decay := getattr(self, key)) < 1:
                raise UserError(f"optimizer.{key}: must be at least 0 and below 1, found {decay}")
        others = ("beta1", "beta2", "eps") if self.kind == "sgd" else ("momentum",)
        for key in others:
            if getattr(self, key) != type(self).__dataclass_fields__[key].default:
                raise UserError(f"optimizer.{key}: optimizer.kind={self.kind} does not have it; leave it out")
        if self.master == "none" and (self.kind in ("muon", "sgd") or self.ema_decay):
            other = "ema_decay" if self.ema_decay else f"kind={self.kind}"
            raise UserError(f"optimizer.master: none cannot go with optimizer.{other}; leave out one of them")
        if self.cpu_offload and (self.kind in ("muon", "sgd") or self.ema_decay):
            other = "ema_decay" if self.ema_decay else f"kind={self.kind}"
            raise UserError(
                f"optimizer.cpu_offload: moves the moments of adamw, adamw_bf16 and adamw_8bit, found "
                f"optimizer.{other}; leave out one of them"
            )
        if self.ema_decay and self.kind != "adamw":
            raise UserError(
                f"optimizer.ema_decay: belongs to optimizer.kind=adamw, found optimizer.kind={self.kind}; "
                "leave it out, or average checkpoints (export.average_checkpoints)"
            )


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate over steps: linear warm-up, then the kind's decay to `min_lr_ratio`."""

    kind: str = "cosine"
    """cosine | linear | constant | wsd (warm-up, stable, decay: the rate stays at the peak until the last
    `decay_steps` steps)."""
    warmup_steps: int = 0
    """Steps in which the rate rises from 0 to the peak."""
    decay_steps: int = 0
    """Number of steps at the end of the run in which the rate decays (wsd). The first of them is still at the
    peak, so a decay has at least 2."""
    decay_shape: str = "linear"
    """linear | cosine | 1-sqrt: how the rate falls in these steps (wsd)."""
    min_lr_ratio: float = 0.0
    """Rate at which the decay ends, as a share of the peak (cosine, linear, wsd). The step after the last one
    would have it: a linear decay of 5 steps to 0.1 takes its last step at 0.28 of the peak."""

    def __post_init__(self) -> None:
        one_of("schedule.kind", self.kind, ("cosine", "linear", "constant", "wsd"))
        at_least("schedule.warmup_steps", self.warmup_steps, 0)
        at_least("schedule.decay_steps", self.decay_steps, 0)
        one_of("schedule.decay_shape", self.decay_shape, ("linear", "cosine", "1-sqrt"))
        if self.kind == "wsd" and not self.decay_steps:
            raise UserError(
                "schedule.decay_steps: wsd needs the number of steps of its decay; without a decay, use "
                "schedule.kind=constant"
            )
        if self.kind != "wsd" and (self.decay_steps or self.decay_shape != "linear"):
            key = "decay_steps" if self.decay_steps else "decay_shape"
            raise UserError(
                f"schedule.{key}: belongs to schedule.kind=wsd, found schedule.kind={self.kind}; leave it out"
            )
        if not 0 <= self.min_lr_ratio <= 1:
            raise UserError(f"schedule.min_lr_ratio: must be within 0 and 1, found {self.min_lr_ratio}")

    def check_fits(self, num_steps: int) -> None:
        """Raises UserError if warm-up and decay of wsd take more than the `num_steps` steps of the run."""
        if self.kind == "wsd" and self.warmup_steps + self.decay_steps > num_steps:
            raise UserError(
                f"schedule.decay_steps: {self.warmup_steps} steps of warm-up and {self.decay_steps} of decay "
                f"do not fit into the {num_steps} steps of the run; shorten one of them, or train longer"
            )
