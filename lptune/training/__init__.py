"""Parts of a training loop besides the model: optimizer, schedule, update, metrics."""

from lptune.training.adamw import AdamW, AveragingAdamW
from lptune.training.answers import reference_log_p
from lptune.training.evaluating import eval_mode, evaluating
from lptune.training.first_loss import check_first_loss
from lptune.training.generate import greedy
from lptune.training.kto import SUMS, kto_loss, kto_metrics, kto_reference, unrelated_ratio
from lptune.training.listed import ListsMoments
from lptune.training.metrics import MetricsWriter
from lptune.training.optimizer import build_optimizer, clip_grad_norm
from lptune.training.preference import METRICS, answers_of, mean_metrics, preference_loss
from lptune.training.record import StepMeter, losses_by_source
from lptune.training.samples import show_samples
from lptune.training.schedule import is_due, learning_rate, set_learning_rate
from lptune.training.settings import check_settings, describe_run, shadow_check
from lptune.training.teacher import build_teacher, distillation, top_k_distillation
from lptune.training.trackers import check_logging
from lptune.training.update import Update, Updated
from lptune.training.utilization import UtilizationMeter, peak_memory_gib

__all__ = [
    "METRICS",
    "SUMS",
    "AdamW",
    "AveragingAdamW",
    "ListsMoments",
    "MetricsWriter",
    "StepMeter",
    "Update",
    "Updated",
    "UtilizationMeter",
    "answers_of",
    "build_optimizer",
    "build_teacher",
    "check_first_loss",
    "check_logging",
    "check_settings",
    "clip_grad_norm",
    "describe_run",
    "distillation",
    "eval_mode",
    "evaluating",
    "greedy",
    "is_due",
    "kto_loss",
    "kto_metrics",
    "kto_reference",
    "learning_rate",
    "losses_by_source",
    "mean_metrics",
    "peak_memory_gib",
    "preference_loss",
    "reference_log_p",
    "set_learning_rate",
    "shadow_check",
    "show_samples",
    "top_k_distillation",
    "unrelated_ratio",
]
