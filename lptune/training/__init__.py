"""Parts of a training loop besides the model: optimizer, schedule, update, metrics, dry run."""

from lptune.training.generate import greedy
from lptune.training.metrics import MetricsWriter, check_logging
from lptune.training.optimizer import build_optimizer, clip_grad_norm
from lptune.training.schedule import learning_rate, set_learning_rate
from lptune.training.update import Update, Updated
from lptune.training.utilization import UtilizationMeter, peak_memory_gib

__all__ = [
    "MetricsWriter",
    "Update",
    "Updated",
    "UtilizationMeter",
    "build_optimizer",
    "check_logging",
    "clip_grad_norm",
    "greedy",
    "learning_rate",
    "peak_memory_gib",
    "set_learning_rate",
]
