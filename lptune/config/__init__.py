"""Typed configs: dataclasses <- YAML <- key=value. Imports no torch and no sibling."""

from typing import TYPE_CHECKING, Any

from lptune.config.checks import check_model_folder, check_path
from lptune.config.data_files import SUFFIXES, check_sources, data_files, left_out
from lptune.config.errors import (
    ChoiceError,
    DivergedError,
    UnknownKeyError,
    UserError,
    closest,
    no_8_bit_gemm_error,
    no_gpu_error,
    remedy,
    too_many_ranks_error,
)
from lptune.config.extras import command_to_install, how_to_install
from lptune.config.inference import (
    AnswersConfig,
    EvaluateConfig,
    EvaluationDataConfig,
    GenerateConfig,
    HarnessConfig,
    PromptsConfig,
    SamplingConfig,
)
from lptune.config.optimization import OptimizerConfig, ScheduleConfig
from lptune.config.pages import with_addresses
from lptune.config.paths import (
    RUN_FILES,
    RUN_FOLDERS,
    TEMPORARY,
    HeldFolder,
    check_given_files_stay,
    check_inputs_stay,
    check_model_files,
    is_mount_point,
    is_within,
    kind_of,
    lock_file,
    model_file,
    named,
    open_regular,
)
from lptune.config.precision import PRECISION_KINDS, KindKeys, PrecisionConfig
from lptune.config.ranks import check_batches, mesh_axes
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
    CheckpointConfig,
    DataConfig,
    ExportConfig,
    LoggingConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
)
from lptune.config.sources import SourceConfig, entries, source_names
from lptune.config.text import (
    MEBI,
    LongLineError,
    flop_text,
    printable,
    raw_lines,
    read_text,
    size_text,
)

if TYPE_CHECKING:
    from lptune.config.load import as_written, default, key_paths, load_config, to_yaml


def __getattr__(name: str) -> Any:
    # The file that reads configs imports OmegaConf and PyYAML, which `lptune --help` does not need: 30 ms.
    if name in ("as_written", "default", "key_paths", "load_config", "to_yaml"):
        from lptune.config import load

        return getattr(load, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "MEBI",
    "PRECISION_KINDS",
    "KindKeys",
    "RUN_FILES",
    "RUN_FOLDERS",
    "SUFFIXES",
    "TEMPORARY",
    "AnswersConfig",
    "CheckpointConfig",
    "ChoiceError",
    "DataConfig",
    "DistillConfig",
    "DistillationConfig",
    "DivergedError",
    "EvaluateConfig",
    "HarnessConfig",
    "EvaluatedConfig",
    "EvaluationDataConfig",
    "ExportConfig",
    "FinetuneConfig",
    "GenerateConfig",
    "HeldFolder",
    "KtoConfig",
    "KtoLossConfig",
    "LoggingConfig",
    "LogitsConfig",
    "LongLineError",
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
    "UnknownKeyError",
    "UserError",
    "as_written",
    "check_batches",
    "check_given_files_stay",
    "check_inputs_stay",
    "check_model_files",
    "check_model_folder",
    "check_path",
    "check_sources",
    "closest",
    "command_to_install",
    "data_files",
    "default",
    "entries",
    "how_to_install",
    "key_paths",
    "is_mount_point",
    "is_within",
    "kind_of",
    "lock_file",
    "left_out",
    "load_config",
    "mesh_axes",
    "model_file",
    "named",
    "no_8_bit_gemm_error",
    "no_gpu_error",
    "open_regular",
    "too_many_ranks_error",
    "printable",
    "raw_lines",
    "read_text",
    "flop_text",
    "size_text",
    "remedy",
    "source_names",
    "to_yaml",
    "with_addresses",
]
