"""Typed configs: dataclasses <- YAML <- key=value. Imports no torch and no sibling."""

from lptune.config.checks import check_model_folder, check_path
from lptune.config.data_files import SUFFIXES, check_sources, data_files, left_out
from lptune.config.errors import (
    DivergedError,
    UserError,
    closest,
    no_8_bit_gemm_error,
    no_gpu_error,
    too_many_ranks_error,
)
from lptune.config.extras import how_to_install
from lptune.config.load import as_written, default, key_paths, load_config, to_yaml
from lptune.config.paths import (
    RUN_FILES,
    RUN_FOLDERS,
    TEMPORARY,
    HeldFolder,
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
from lptune.config.precision import PRECISION_KINDS, PrecisionConfig
from lptune.config.ranks import check_batches, mesh_axes
from lptune.config.schema import (
    CheckpointConfig,
    DataConfig,
    ExportConfig,
    FinetuneConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
)
from lptune.config.sources import SourceConfig, entries, source_names
from lptune.config.text import MEBI, printable, read_text

__all__ = [
    "MEBI",
    "PRECISION_KINDS",
    "RUN_FILES",
    "RUN_FOLDERS",
    "SUFFIXES",
    "TEMPORARY",
    "CheckpointConfig",
    "DataConfig",
    "DivergedError",
    "ExportConfig",
    "FinetuneConfig",
    "HeldFolder",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RunConfig",
    "ScheduleConfig",
    "SourceConfig",
    "UserError",
    "as_written",
    "check_batches",
    "check_inputs_stay",
    "check_model_files",
    "check_model_folder",
    "check_path",
    "check_sources",
    "closest",
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
    "read_text",
    "source_names",
    "to_yaml",
]
