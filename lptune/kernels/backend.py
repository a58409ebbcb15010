"""The one place that decides which implementation runs an 8-bit GEMM."""

import functools
import logging
import os

import torch

from lptune.config import UserError

logger = logging.getLogger(__name__)

BACKENDS = ("torch", "float32", "reference")


def requested_backend() -> str | None:
    """`LPTUNE_KERNELS`, if set. Raises UserError for a name that is none of BACKENDS."""
    name = os.environ.get("LPTUNE_KERNELS")
    if name is not None and name not in BACKENDS:
        raise UserError(f"LPTUNE_KERNELS={name!r}: must be one of {', '.join(BACKENDS)}; set it or unset it")
    return name


@functools.cache
def choose_backend(device_type: str) -> str:
    """Name of the implementation used on `device_type`; logged once per process.

    torch      `torch._int_mm`: oneDNN's VNNI or AMX kernels on CPU, cuBLASLt's IMMA kernels on CUDA
    float32    float32 GEMMs over slices short enough to be exact: for CPUs on which oneDNN's int8 GEMM is not
    reference  float64 GEMM, exact for int8; slow

    `LPTUNE_KERNELS` overrides the choice, for debugging.
    """
    name = requested_backend() or ("torch" if device_type != "cpu" or _int_mm_is_exact() else "float32")
    logger.info("8-bit GEMMs on %s run on backend %r", device_type, name)
    return name


def _int_mm_is_exact() -> bool:
    """Whether the CPU's int8 GEMM adds without saturating.

    Without VNNI, oneDNN sums pairs of products in int16, which 2 * 127 * 127 overflows: silently, by up to a
    fifth of a layer's output. Any operands at full scale show it.
    """
    a = torch.full((64, 256), 127, dtype=torch.int8)
    a[::2] = -127
    return torch.equal(torch._int_mm(a, a.t()).long(), (a.double() @ a.t().double()).long())
