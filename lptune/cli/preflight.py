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
    too_many_ranks_error,
)
from lptune.devices import FLOAT8_CAPABILITY, known_device

_DATA_SUFFIXES = (".json", ".jsonl", ".csv", ".txt", ".parquet")
_GPUS = ("nvidia[0-9]*", "kfd", "dxg")  # in /dev: NVIDIA, AMD, Windows' subsystem for Linux
_NVIDIA = Path("/proc/driver/nvidia/gpus")


def check(cfg: FinetuneConfig, num_machines: int | None, num_local_ranks: int | None) -> None:
    """Raises UserError (one line) for what keeps `cfg` from running here.

    num_local_ranks: on each of the machines. Both are None where only torchrun knows.
    """
    if num_machines is not None and num_local_ranks is not None:
        num_ranks = num_machines * num_local_ranks
        mesh_axes(cfg.parallel, num_ranks)
        check_batches(cfg.global_batch_size, cfg.micro_batch_size, num_ranks // cfg.parallel.tensor)
    _check_device(cfg, num_local_ranks or 1)
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


def _check_device(cfg: FinetuneConfig, num_local_ranks: int) -> None:
    if cfg.device == "cuda" and not _may_have_gpu():
        raise no_gpu_error("this machine has no GPU")
    precision = cfg.precision
    emulates = precision.emulate or os.environ.get("LPTUNE_KERNELS") == "reference"
    needs_float8 = precision.kind.startswith("float8") and not emulates
    if cfg.device == "cpu" or not _may_have_gpu():
        if needs_float8:
            raise no_8_bit_gemm_error(precision.kind, "e4m3", "cpu here")
        return
    gpus = _nvidia_gpus()
    if gpus and num_local_ranks > len(gpus):
        raise too_many_ranks_error(len(gpus), len(gpus))
    known = [known_device(name) for name in gpus]
    if needs_float8 and gpus and all(gpu and gpu.capability < FLOAT8_CAPABILITY for gpu in known):
        raise no_8_bit_gemm_error(precision.kind, "e4m3", gpus[0])


def _may_have_gpu() -> bool:
    return sys.platform != "linux" or any(True for name in _GPUS for _ in Path("/dev").glob(name))


def _nvidia_gpus() -> list[str]:
    """Names of this machine's NVIDIA GPUs, as torch calls them; none where the driver does not tell.

    torch may see fewer (CUDA_VISIBLE_DEVICES), never more.
    """
    with suppress(OSError):
        lines = [
            line.partition(":")
            for file in sorted(_NVIDIA.glob("*/information"))
            for line in file.read_text(errors="replace").splitlines()
        ]
        return [name.strip() for key, _, name in lines if key == "Model"]
    return []
