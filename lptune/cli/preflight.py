"""Checks of a run that need no torch, made before torch is imported and before a rank starts.

The library repeats these checks and makes more. Only recipes of this installation are checked here: a copied
recipe may read its model and data from anywhere.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

from lptune.base.errors import no_8_bit_gemm_error, no_gpu_error
from lptune.config import (
    EvaluateConfig,
    GenerateConfig,
    RunConfig,
    check_inputs_stay,
    check_sources,
)

_GPUS = ("nvidia[0-9]*", "kfd", "dxg")  # in /dev: NVIDIA, AMD, Windows' subsystem for Linux


def check(
    cfg: RunConfig, num_machines: int | None, num_local_ranks: int | None, *, here: bool = True
) -> None:
    """Raises UserError (one line) for what keeps `cfg` from running here.

    num_local_ranks: ranks on each machine. Both are None if only torchrun knows them. here: False if the run
    starts on other machines, whose devices are not known.
    """
    if num_machines is not None and num_local_ranks is not None:
        cfg.check_ranks(num_machines * num_local_ranks)
    if here:
        _check_device(cfg)
    with suppress(OSError):  # the library reports what cannot be read
        check_inputs_stay(cfg)
        check_sources("data.source", cfg.data.sources)
        check_sources("data.eval_source", cfg.data.eval_sources)
    check_models(cfg)


def check_models(cfg: RunConfig | GenerateConfig | EvaluateConfig, *, may_be_absent: bool = False) -> None:
    """Raises UserError for a model that the recipe would refuse by its config.json or by the headers of its
    weights. may_be_absent: a folder that does not exist is not checked.
    """
    from lptune import models  # slow to import

    folders = cfg.model_paths if isinstance(cfg, RunConfig) else {"model.path": cfg.model.path}
    for key, path in folders.items():
        folder = Path(path).expanduser()
        with suppress(OSError):  # the library reports what cannot be read
            if may_be_absent and not folder.exists():
                continue
            # A model that is not trained may be a run's: its checkpoint is verified when the recipe starts.
            if isinstance(cfg, RunConfig) or not models.is_of_run(folder):
                is_base = isinstance(cfg, RunConfig) and key == "model.path"
                backend = getattr(cfg.model, "backend", "auto") if is_base else "auto"
                facts = models.read_config(models.read_index(folder, key).folder, backend)
                if isinstance(cfg, RunConfig):
                    parallel = cfg.parallel
                    facts.check_execution(parallel.tensor, cfg.compile, parallel.context, parallel.expert)


def _check_device(cfg: RunConfig) -> None:
    if cfg.device == "cuda" and not _may_have_gpu():
        raise no_gpu_error("this machine has no GPU")
    precision = cfg.precision
    needs_float8 = precision.needs_float8 and os.environ.get("LPTUNE_KERNELS") != "reference"
    if needs_float8 and (cfg.device == "cpu" or not _may_have_gpu()):
        raise no_8_bit_gemm_error(precision.kind, "e4m3", "cpu here")


def _may_have_gpu() -> bool:
    return sys.platform != "linux" or any(True for name in _GPUS for _ in Path("/dev").glob(name))
