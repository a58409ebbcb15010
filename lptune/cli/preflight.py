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
    check_batches,
    check_model_folder,
    check_sources,
    mesh_axes,
    no_8_bit_gemm_error,
    no_gpu_error,
)

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
        check_sources("data.source", cfg.data.sources)
        check_sources("data.eval_source", cfg.data.eval_sources)


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
