"""Parts of a training loop besides the model: optimizer, schedule, update, metrics."""

from lptune.training.adamw import AdamW
from lptune.training.answers import answers_log_p, reference_log_p
from lptune.training.evaluating import evaluating
from lptune.training.kto import SUMS, kto_loss, kto_metrics, unrelated_ratio
from lptune.training.listed import ListsMoments
from lptune.training.loop import Step, Steps, plan_steps
from lptune.training.metrics import MetricsWriter
from lptune.training.optimizer import build_optimizer
from lptune.training.planned import PlannedStep
from lptune.training.preference import METRICS, answers_of, mean_metrics, preference_loss
from lptune.training.record import StepMeter, UtilizationMeter, losses_by_source
from lptune.training.samples import greedy
from lptune.training.schedule import learning_rate, set_learning_rate
from lptune.training.settings import check_memory, check_settings
from lptune.training.state import State
from lptune.training.trackers import check_logging
from lptune.training.update import Update, Updated

__all__ = [
    "METRICS",
    "SUMS",
    "AdamW",
    "ListsMoments",
    "MetricsWriter",
    "PlannedStep",
    "State",
    "Step",
    "StepMeter",
    "Steps",
    "Update",
    "Updated",
    "UtilizationMeter",
    "answers_log_p",
    "answers_of",
    "build_optimizer",
    "check_logging",
    "check_memory",
    "check_settings",
    "evaluating",
    "greedy",
    "kto_loss",
    "kto_metrics",
    "learning_rate",
    "losses_by_source",
    "mean_metrics",
    "plan_steps",
    "preference_loss",
    "reference_log_p",
    "set_learning_rate",
    "unrelated_ratio",
]
