"""Typed configs: dataclasses <- YAML <- key=value. Imports no torch and no sibling."""

from lptune.config.errors import DivergedError, UserError, closest
from lptune.config.load import key_paths, load_config, to_yaml
from lptune.config.schema import (
    CheckpointConfig,
    DataConfig,
    ExportConfig,
    FinetuneConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    ScheduleConfig,
)

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "DivergedError",
    "ExportConfig",
    "FinetuneConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "ScheduleConfig",
    "UserError",
    "closest",
    "key_paths",
    "load_config",
    "to_yaml",
]
