"""The one place that decides which implementation runs an 8-bit operation."""

import functools
import importlib.util
import logging
import os
from types import ModuleType

import torch

from lptune.config import UserError, how_to_install
from lptune.devices import FLOAT8_CAPABILITY
from lptune.kernels import cublaslt, native
from lptune.planned import HOPPER, planned, planned_device_type
from lptune.trials import tries

logger = logging.getLogger(__name__)

# What each operation can run on; the first that works here is taken.
BACKENDS: dict[str, dict[str, tuple[str, ...]]] = {
    # cuBLASLt has no scales in its epilogue for int8: a second pass over the accumulator, four bytes each.
    "int8_gemm": {"cpu": ("torch", "float32", "reference"), "cuda": ("triton", "torch", "reference")},
    "float8_gemm": {"cpu": ("reference",), "cuda": ("torch", "reference")},
    # Scales of rows, and not fast accumulation into bfloat16: see scaled_mm.py.
    "float8_rowwise_gemm": {"cpu": ("reference",), "cuda": ("triton", "torch", "reference")},
    # Sizes that torch refuses.
    "float8_odd_gemm": {"cpu": ("reference",), "cuda": ("triton", "reference")},
    # Whole blocks of 128; and any other blocks, MX's of 32 among them.
    "block_gemm": {"cpu": ("reference",), "cuda": ("triton", "torch", "reference")},
    "other_block_gemm": {"cpu": ("reference",), "cuda": ("triton", "reference")},
    "quantize": {"cpu": ("native", "reference"), "cuda": ("triton", "reference")},
}
_FLOAT8_GEMMS = ("float8_gemm", "float8_rowwise_gemm", "float8_odd_gemm", "block_gemm", "other_block_gemm")
_TRITON_CAPABILITY = (8, 0)  # Ampere
_TRIALS = {"float8_rowwise_gemm": "cublaslt_rowwise", "block_gemm": "cublaslt_blocks"}
NAMES = ("torch", "triton", "native", "float32", "reference")


def requested_backend() -> str | None:
    """`LPTUNE_KERNELS`, if set. Raises UserError for a name that is no backend's."""
    name = os.environ.get("LPTUNE_KERNELS")
    if name is not None and name not in NAMES:
        raise UserError(f"LPTUNE_KERNELS={name!r}: must be one of {', '.join(NAMES)}; set it or unset it")
    return name


@functools.cache
def choose_backend(operation: str, device_type: str) -> str:
    """Name of the implementation that runs `operation` (a key of BACKENDS) on `device_type`; logged once.

    triton     lptune's kernels (kernels/triton); float8 GEMMs since Ada, the rest since Ampere
    torch      torch's own 8-bit GEMMs: oneDNN's VNNI or AMX kernels on CPU, cuBLASLt and CUTLASS on CUDA
    native     lptune's C++, compiled on first use (kernels/native)
    float32    float32 GEMMs over slices short enough to be exact: for CPUs on which oneDNN's int8 GEMM is not
    reference  plain torch: float64 for INT8 (exact), float32 for float8

    `LPTUNE_KERNELS` overrides the choice where the operation has a backend of that name, for debugging.
    `LPTUNE_TRY` (lptune/trials.py) takes cuBLASLt for what else Triton runs; UserError where that cannot.
    """
    candidates = BACKENDS[operation].get(device_type, ("reference",))
    name, trial = requested_backend(), _TRIALS.get(operation)
    if name is None and trial is not None and tries(trial) and "torch" in candidates:
        cublaslt.check_vector_scales(trial)
        name = "torch"
    if name is None or name not in candidates:
        name = next(each for each in candidates if _works(each, operation, device_type))
    logger.info("%s on %s runs on backend %r", operation, device_type, name)
    return name


def triton_kernels() -> ModuleType:
    """`lptune.kernels.triton`, imported where it runs and not before: a run on CPU needs no Triton."""
    from lptune.kernels import triton

    return triton


def type_of(device: torch.device) -> str:
    """`device.type`, or what is planned for: where memory depends on it."""
    return planned_device_type() or device.type


def compute_capability() -> tuple[int, int]:
    """That of the GPU here, or of the one that is planned for; without either, Hopper's."""
    device = planned()
    if device is not None:
        return device.capability
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else HOPPER


def k_major(device: torch.device) -> bool:
    """Whether 8-bit GEMMs on `device` want both operands contiguous along the contraction."""
    return type_of(device) == "cuda"


def _works(backend: str, operation: str, device_type: str) -> bool:
    if backend == "reference":
        return True
    if backend == "native":
        return native.available()
    if device_type == "cpu":
        return backend != "torch" or _int_mm_is_exact()
    capability = compute_capability()
    if backend == "torch" and operation == "block_gemm":
        return cublaslt.has_vector_scales()
    least = FLOAT8_CAPABILITY if operation in _FLOAT8_GEMMS else _TRITON_CAPABILITY
    if backend == "triton" and capability >= least:
        _check_triton()
    return capability >= least or (backend == "torch" and operation not in _FLOAT8_GEMMS)


def _check_triton() -> None:
    """Raises UserError where Triton is not installed: slower kernels in its place would go unnoticed."""
    # Not an import: that is for where it runs (triton_kernels). A plan for another machine's GPU needs none.
    if planned() is None and importlib.util.find_spec("triton") is None:
        raise UserError(
            "device: the kernels for CUDA need Triton, and this Python has none; "
            f"{how_to_install('triton')}, or set LPTUNE_KERNELS=reference for slow kernels without it"
        )


@functools.cache
def _int_mm_is_exact() -> bool:
    """Whether the CPU's int8 GEMM adds without saturating.

    Without VNNI, oneDNN sums pairs of products in int16, which 2 * 127 * 127 overflows: silently, by up to a
    fifth of a layer's output. Any operands at full scale show it.
    """
    a = torch.full((64, 256), 127, dtype=torch.int8)
    a[::2] = -127
    return torch.equal(torch._int_mm(a, a.t()).long(), (a.double() @ a.t().double()).long())
