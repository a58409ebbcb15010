"""The config of each shipped recipe: the keys of every run (schema.py) and those of the recipe.

`EvaluatedConfig` has the keys of recipes that evaluate on held-out rows while they train.
"""

from dataclasses import dataclass

from lptune.config.checks import at_least
from lptune.config.errors import UserError
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
