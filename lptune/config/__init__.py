"""Typed configs: dataclasses <- YAML <- key=value. Imports base alone, and no torch."""

from typing import TYPE_CHECKING, Any

from lptune.config.checks import check_address, check_batches, check_path, mesh_axes
from lptune.config.inference import (
    AnswersConfig,
    EvaluateConfig,
    EvaluationDataConfig,
    GenerateConfig,
    HarnessConfig,
    PromptsConfig,
    SamplingConfig,
)
from lptune.config.optimization import OPTIMIZER_KINDS, OptimizerConfig, ScheduleConfig
from lptune.config.paths import RUN_FILES, RUN_FOLDERS, check_inputs_stay
from lptune.config.precision import PRECISION_KINDS, KindKeys, PrecisionConfig
from lptune.config.recipes import (
    DistillationConfig,
    DistillConfig,
    EvaluatedConfig,
    FinetuneConfig,
    KtoConfig,
    KtoLossConfig,
    LogitsConfig,
    PrecomputeConfig,
    PreferenceConfig,
    PreferenceLossConfig,
    PretrainConfig,
    TeacherConfig,
)
from lptune.config.schema import (
    EXPORT_FORMATS,
    CheckpointConfig,
    DataConfig,
    ExportConfig,
    LoggingConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
)
from lptune.config.sources import (
    SUFFIXES,
    SourceConfig,
    check_sources,
    data_files,
    entries,
    left_out,
    source_names,
)

if TYPE_CHECKING:
    from lptune.config.load import default, key_paths, load_config, to_dict, to_yaml


def __getattr__(name: str) -> Any:
    # The file that reads configs imports OmegaConf and PyYAML, which `lptune --help` does not need: 30 ms.
    if name in ("default", "key_paths", "load_config", "to_dict", "to_yaml"):
        from lptune.config import load

        return getattr(load, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "OPTIMIZER_KINDS",
    "PRECISION_KINDS",
    "KindKeys",
    "RUN_FILES",
    "RUN_FOLDERS",
    "SUFFIXES",
    "AnswersConfig",
    "CheckpointConfig",
    "DataConfig",
    "DistillConfig",
    "DistillationConfig",
    "EvaluateConfig",
    "HarnessConfig",
    "EvaluatedConfig",
    "EvaluationDataConfig",
    "EXPORT_FORMATS",
    "ExportConfig",
    "FinetuneConfig",
    "GenerateConfig",
    "KtoConfig",
    "KtoLossConfig",
    "LoggingConfig",
    "LogitsConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "PrecomputeConfig",
    "PreferenceConfig",
    "PreferenceLossConfig",
    "PretrainConfig",
    "PromptsConfig",
    "RunConfig",
    "SamplingConfig",
    "ScheduleConfig",
    "SourceConfig",
    "TeacherConfig",
    "check_address",
    "check_batches",
    "check_inputs_stay",
    "check_path",
    "check_sources",
    "data_files",
    "default",
    "entries",
    "key_paths",
    "left_out",
    "load_config",
    "mesh_axes",
    "source_names",
    "to_dict",
    "to_yaml",
]
