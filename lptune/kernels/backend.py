"""The one place that decides which implementation runs an 8-bit GEMM."""

import functools
import logging
import os

from lptune.config import UserError

logger = logging.getLogger(__name__)

BACKENDS = ("torch", "reference")


def requested_backend() -> str:
    """`LPTUNE_KERNELS`, else `torch`. Raises UserError for a name that is none of BACKENDS."""
    name = os.environ.get("LPTUNE_KERNELS", "torch")
    if name not in BACKENDS:
        raise UserError(f"LPTUNE_KERNELS={name!r}: must be one of {', '.join(BACKENDS)}; set it or unset it")
    return name


@functools.cache
def choose_backend(device_type: str) -> str:
    """Name of the implementation used on `device_type`; logged once per process.

    torch      `torch._int_mm`: oneDNN's VNNI or AMX kernels on CPU, cuBLASLt's IMMA kernels on CUDA
    reference  float64 GEMM, exact for int8; slow. `LPTUNE_KERNELS=reference` selects it for debugging
    """
    name = requested_backend()
    logger.info("8-bit GEMMs on %s run on backend %r", device_type, name)
    return name
