"""Chooses the implementation (backend) of each 8-bit operation. No other code makes this choice."""

import functools
import importlib.util
import logging
import os
from types import ModuleType

import torch

from lptune.base.errors import UserError, how_to_install
from lptune.hardware.devices import FLOAT8_CAPABILITY
from lptune.hardware.planned import HOPPER, planned, planned_device_type
from lptune.kernels import cpu_gemms, native
from lptune.kernels.native.library import INSTRUCTION_SETS

logger = logging.getLogger(__name__)

# Backends of each operation, in order of preference; the first that works is taken.
BACKENDS: dict[str, dict[str, tuple[str, ...]]] = {
    # cuBLASLt applies no scales for int8: that takes a second pass over an accumulator of four bytes each.
    "int8_gemm": {
        "cpu": ("native", "torch", "float32", "reference"),  # the fastest: cpu_gemms.py
        "cuda": ("triton", "torch", "reference"),
    },
    "float8_gemm": {"cpu": ("reference",), "cuda": ("torch", "reference")},
    # Those of float8 that torch is not asked for: see scaled_mm.py.
    "float8_other_gemm": {"cpu": ("reference",), "cuda": ("triton", "reference")},
    "block_gemm": {"cpu": ("reference",), "cuda": ("triton", "reference")},
    # Blackwell's 4-bit tensor cores.
    "fp4_gemm": {"cpu": ("reference",), "cuda": ("torch", "reference")},
    "quantize": {"cpu": ("native", "reference"), "cuda": ("triton", "reference")},
}
_FLOAT8_GEMMS = ("float8_gemm", "float8_other_gemm", "block_gemm")
_TRITON_CAPABILITY = (8, 0)  # Ampere
_FP4_CAPABILITY = (10, 0)  # Blackwell
NAMES = ("torch", "triton", "native", *INSTRUCTION_SETS, "float32", "reference")


def requested_backend() -> str | None:
    """The backend in `LPTUNE_KERNELS`; None if unset. Raises UserError for an unknown name."""
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
    float32    float32 GEMMs over slices that are short enough to be exact
    reference  plain torch: float64 for INT8 (exact), float32 for float8

    `LPTUNE_KERNELS` overrides the choice if the operation has a backend of that name (for debugging). The
    name of an instruction set, such as avx2, means `native` of a CPU that has no better one; UserError if it
    is not to be had.
    """
    candidates = BACKENDS[operation].get(device_type, ("reference",))
    name = requested_backend()
    if device_type == "cpu" and name in ("native", *INSTRUCTION_SETS):
        _check_native(name, operation)
        name = "native"
    if name is None or name not in candidates:
        if (operation, device_type) == ("int8_gemm", "cpu"):
            name = cpu_gemms.fastest_int8_gemm()
        else:
            name = next(each for each in candidates if _works(each, operation, device_type))
    logger.info("%s on %s runs on backend %r", operation, device_type, name)
    return name


def backend_text(operation: str, device_type: str) -> str:
    """The backend of `operation` for people: with its instruction set, if it has one."""
    name = choose_backend(operation, device_type)
    return f"native ({native.instruction_set()})" if (operation, name) == ("int8_gemm", "native") else name


def triton_kernels() -> ModuleType:
    """`lptune.kernels.triton`, imported on first use: a run on a CPU does not need Triton."""
    from lptune.kernels import triton

    return triton


def type_of(device: torch.device) -> str:
    """`device.type`; in a dry run the type of the planned device."""
    return planned_device_type() or device.type


def compute_capability() -> tuple[int, int]:
    """Compute capability of the GPU; in a dry run that of the planned one; without a GPU Hopper's."""
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
    capability = compute_capability()
    if operation == "fp4_gemm":
        return capability >= _FP4_CAPABILITY
    least = FLOAT8_CAPABILITY if operation in _FLOAT8_GEMMS else _TRITON_CAPABILITY
    if backend == "triton" and capability >= least:
        _check_triton()
    return capability >= least or (backend == "torch" and operation not in _FLOAT8_GEMMS)


def _check_native(name: str, operation: str) -> None:
    """Raises UserError if `LPTUNE_KERNELS=name` asks for C++ that this machine does not have."""
    found = native.instruction_set()
    there = native.available() if operation != "int8_gemm" else bool(found)
    if not there or name not in ("native", found):
        why = f"the best here is {found}" if found else "no C++ compiler, or no INT8 GEMM for this processor"
        raise UserError(f"LPTUNE_KERNELS={name!r} is not to be had here ({why}); unset LPTUNE_KERNELS")


def _check_triton() -> None:
    """Raises UserError if Triton is not installed: a silent fall-back to slower kernels must not happen."""
    # No import here; triton_kernels imports it. A dry run for a GPU elsewhere does not need Triton.
    if planned() is None and importlib.util.find_spec("triton") is None:
        raise UserError(
            "device: the kernels for CUDA need Triton, and this Python has none; "
            f"{how_to_install('triton')}, or set LPTUNE_KERNELS=reference for slow kernels without it"
        )
