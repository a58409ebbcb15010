"""What a launcher can see of a run without torch: told before torch is imported and before a rank starts.

The library looks at all of it again, and at more. Only for recipes that came with this installation: a copy
may read its model and its data from wherever it likes.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

from lptune.config import (
    FinetuneConfig,
    UserError,
    check_batches,
    check_model_folder,
    closest,
    mesh_axes,
    no_8_bit_gemm_error,
    no_gpu_error,
)

_DATA_SUFFIXES = (".json", ".jsonl", ".csv", ".txt", ".parquet")
_GPUS = ("nvidia[0-9]*", "kfd", "dxg")  # in /dev: NVIDIA, AMD, Windows' subsystem for Linux


def check(cfg: FinetuneConfig, num_ranks: int | None) -> None:
    """Raises UserError (one line) for what keeps `cfg` from running here.

    num_ranks: on all machines; None where only torchrun knows.
    """
    if num_ranks is not None:
        mesh_axes(cfg.parallel, num_ranks)
        check_batches(cfg.global_batch_size, cfg.micro_batch_size, num_ranks // cfg.parallel.tensor)
    _check_device(cfg)
    with suppress(OSError):  # what cannot be looked at, the library says
        check_model_folder(Path(cfg.model.path).expanduser())
        _check_files(cfg)


def _check_files(cfg: FinetuneConfig) -> None:
    for key, source in (("data.source", cfg.data.source), ("data.eval_source", cfg.data.eval_source)):
        one_file = isinstance(source, str) and is_file_name(source) and not set("*?[") & set(source)
        path = Path(str(source)).expanduser() if one_file else None
        if path is not None and not path.exists() and not path.is_symlink() and path.parent.is_dir():
            hint = closest(path.name, [entry.name for entry in path.parent.iterdir()])
            raise UserError(f"{source}: no such file{hint}; set {key} to a file, a hub id or builtin")


def is_file_name(source: str) -> bool:
    """Whether a `data.source` means a file: a hub id and `builtin` do not."""
    return source.endswith(_DATA_SUFFIXES) or source.startswith(("/", "./", "../", "~"))


def _check_device(cfg: FinetuneConfig) -> None:
    if cfg.device == "cuda" and not _may_have_gpu():
        raise no_gpu_error("this machine has no GPU")
    precision = cfg.precision
    emulates = precision.emulate or os.environ.get("LPTUNE_KERNELS") == "reference"
    on_cpu = cfg.device == "cpu" or not _may_have_gpu()
    if precision.kind.startswith("float8") and on_cpu and not emulates:
        raise no_8_bit_gemm_error(precision.kind, "e4m3", "cpu here")


def _may_have_gpu() -> bool:
    return sys.platform != "linux" or any(True for name in _GPUS for _ in Path("/dev").glob(name))
