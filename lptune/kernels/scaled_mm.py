"""GEMM on 8-bit operands with the scales applied to the accumulator.

`out = (a @ b) * scale_a * scale_b`: 8-bit numbers are multiplied and summed in a wide accumulator; then the
scales are applied, and the result is rounded to the output dtype. This works for scales that are constant
along the contraction: one per row of a, one per column of b, or one per tensor.

INT8 accumulates in int32. The sum is exact, so every backend gives the same bits. An int32 cannot overflow
with 133,144 products; longer contractions (many tokens in grad_weight, a vocabulary of 152k in grad_input)
are split into parts of 133,120, each exact, whose sum is rounded to float32.

Float8 accumulates in float32, where products of two float8 numbers are exact. The order of the sum, and so
the last bits, depend on the backend. On CUDA, torch (cuBLASLt) runs GEMMs with one scale per tensor. torch
also runs `output` with row scales and a bfloat16 result. It uses "fast accumulation" in the tensor core,
which keeps about 14 bits on Hopper; torchao, too, uses that for `output` only. `grad_input`, `grad_weight`
and other dtypes run on lptune's kernel, because before CUDA 12.9 torch applies their scales in a second pass
over the result. On Hopper with CUDA 12.9 torch applies them in the GEMM, and was no faster in a step
(docs/gpu.md). Sizes that are not multiples of 16, which torch refuses, run on lptune's kernel, too.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lptune.kernels import cublaslt, native
from lptune.kernels.backend import choose_backend, triton_kernels
from lptune.kernels.cpu_gemms import int_mm_float32
from lptune.kernels.op import op
from lptune.kernels.record import GRAD_WEIGHT, OUTPUT, note
from lptune.numerics.formats import INT32_SAFE_CONTRACTION

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)

# A multiple of 128, so that each part of a split contraction starts at an aligned address.
_LONGEST_CONTRACTION = INT32_SAFE_CONTRACTION // 128 * 128


def _empty_product(
    a_MK: Tensor,
    b_KN: Tensor,
    scale_a_M1: Tensor | None,
    scale_b_1N: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    _check(a_MK, b_KN, scale_a_M1, scale_b_1N)
    return a_MK.new_empty((a_MK.shape[0], b_KN.shape[1]), dtype=out_dtype)


@op(fake=_empty_product)
def scaled_mm(
    a_MK: Tensor,
    b_KN: Tensor,
    scale_a_M1: Tensor | None,
    scale_b_1N: Tensor | None,
    out_dtype: torch.dtype,
    layer: Tensor,
    gemm: int,
    *,
    emulate: bool = False,
) -> Tensor:
    """Same as `((a.double() @ b.double()).float() * scale_a * scale_b).to(out_dtype)`; None: a scale of 1.

    INT8 in [-127, 127], as quantizers make it: bitwise (above 133,120 products, up to a float32 sum of exact
    parts). Float8: up to the rounding of a float32 sum.

    a_MK, b_KN: both int8 or both float8, any strides (fastest: a row-major, b column-major). Scales: float32,
    (M, 1) and (1, N), or (1, 1) for one per tensor. layer: `layer_handle` of the calling layer; gemm: index
    into GEMMS. Both are used by `record_gemms` only. emulate: use the reference on any device.
    Raises ValueError for other dtypes and shapes.
    """
    _check(a_MK, b_KN, scale_a_M1, scale_b_1N)
    out_MN = product(a_MK, b_KN, scale_a_M1, scale_b_1N, out_dtype, gemm, emulate)
    note(layer, gemm)
    return out_MN


def product(
    a_MK: Tensor,
    b_KN: Tensor,
    scale_a_M1: Tensor | None,
    scale_b_1N: Tensor | None,
    out_dtype: torch.dtype,
    gemm: int,
    emulate: bool,
) -> Tensor:
    """`scaled_mm` within an op that counts its GEMM itself."""
    mm = _int8_mm if a_MK.dtype == torch.int8 else _float8_mm
    return mm(a_MK, b_KN, scale_a_M1, scale_b_1N, out_dtype, gemm, emulate)


def _empty_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


@op(fake=_empty_like)
def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)` that survives torch.compile.

    Inductor drops a float32 -> bfloat16 -> float32 round trip. The weight would then not be rounded before
    its quantization, and compiled and eager runs would differ in every scale.
    """
    return x.to(dtype, copy=True)


def _check(a_MK: Tensor, b_KN: Tensor, scale_a_M1: Tensor | None, scale_b_1N: Tensor | None) -> None:
    if not (a_MK.dtype == b_KN.dtype == torch.int8 or {a_MK.dtype, b_KN.dtype} <= set(_FLOAT8)):
        raise ValueError(
            f"scaled_mm needs two int8 or two float8 operands, got {a_MK.dtype} and {b_KN.dtype}"
        )
    if a_MK.dim() != 2 or b_KN.dim() != 2 or a_MK.shape[1] != b_KN.shape[0]:
        raise ValueError(
            f"scaled_mm needs (M, K) and (K, N), got {tuple(a_MK.shape)} and {tuple(b_KN.shape)}"
        )
    m, n = a_MK.shape[0], b_KN.shape[1]
    if scale_a_M1 is not None and scale_a_M1.shape not in ((m, 1), (1, 1)):
        raise ValueError(f"scaled_mm needs scale_a of shape (M, 1) or (1, 1), got {tuple(scale_a_M1.shape)}")
    if scale_b_1N is not None and scale_b_1N.shape not in ((1, n), (1, 1)):
        raise ValueError(f"scaled_mm needs scale_b of shape (1, N) or (1, 1), got {tuple(scale_b_1N.shape)}")
    for scale in (scale_a_M1, scale_b_1N):
        if scale is not None and scale.dtype != torch.float32:  # kernels read its memory as float32
            raise ValueError(f"scaled_mm needs scales in float32, got {scale.dtype}")


def _int8_mm(
    a_MK: Tensor,
    b_KN: Tensor,
    scale_a_M1: Tensor | None,
    scale_b_1N: Tensor | None,
    out_dtype: torch.dtype,
    gemm: int,
    emulate: bool,
) -> Tensor:
    backend = "reference" if emulate else choose_backend("int8_gemm", a_MK.device.type)
    m, k = a_MK.shape
    mm: Callable[[Tensor, Tensor], Tensor]
    if backend in ("triton", "native"):  # these apply the scales in their epilogue
        scaled: Callable[..., Tensor] = native.int8_mm
        if backend == "triton":
            scaled = functools.partial(triton_kernels().scaled_mm, tokens_contracted=gemm == GRAD_WEIGHT)
        if k <= _LONGEST_CONTRACTION:
            return scaled(a_MK, b_KN, scale_a_M1, scale_b_1N, out_dtype)
        mm = functools.partial(scaled, scale_a_M1=None, scale_b_1N=None, out_dtype=torch.float32)
    else:
        mm = {"torch": _int_mm, "float32": int_mm_float32, "reference": _int_mm_reference}[backend]
    if k <= _LONGEST_CONTRACTION:
        acc_MN = mm(a_MK, b_KN)
    else:
        acc_MN = torch.zeros(m, b_KN.shape[1], dtype=torch.float32, device=a_MK.device)
        for start in range(0, k, _LONGEST_CONTRACTION):
            part = slice(start, start + _LONGEST_CONTRACTION)
            acc_MN += mm(a_MK[:, part], b_KN[part])
    if choose_backend("quantize", a_MK.device.type) == "native" and acc_MN.dtype == torch.int32:
        return native.apply_scales(acc_MN, scale_a_M1, scale_b_1N, out_dtype)
    return _apply_scales(acc_MN.to(torch.float32), scale_a_M1, scale_b_1N).to(out_dtype)


def _float8_mm(
    a_MK: Tensor,
    b_KN: Tensor,
    scale_a_M1: Tensor | None,
    scale_b_1N: Tensor | None,
    out_dtype: torch.dtype,
    gemm: int,
    emulate: bool,
) -> Tensor:
    scales = (scale_a_M1, scale_b_1N)
    rowwise = any(scale is not None and scale.numel() != 1 for scale in scales)
    fast = rowwise and gemm == OUTPUT and out_dtype == torch.bfloat16
    by_torch = (fast or not rowwise) and cublaslt.takes(b_KN)
    operation = "float8_gemm" if by_torch else "float8_other_gemm"
    backend = "reference" if emulate else choose_backend(operation, a_MK.device.type)
    if backend == "triton":
        out_MN: Tensor = triton_kernels().scaled_mm(
            a_MK, b_KN, *scales, out_dtype, tokens_contracted=gemm == GRAD_WEIGHT
        )
        return out_MN
    if backend == "torch":
        return cublaslt.scaled_mm(a_MK, b_KN, *scales, out_dtype, fast=fast)
    acc_MN = a_MK.to(torch.float32) @ b_KN.to(torch.float32)
    return _apply_scales(acc_MN, *scales).to(out_dtype)


def _int_mm_reference(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    # float64 holds every integer up to 2**53: exact far beyond the int32 limit.
    return (a_MK.double() @ b_KN.double()).to(torch.int32)


def _int_mm(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    if a_MK.device.type == "cpu":
        return torch._int_mm(a_MK, b_KN)
    # cuBLASLt needs more than 16 rows, and K and N in multiples of 8. Zeros change no sum and no scale.
    (m, k), n = a_MK.shape, b_KN.shape[1]
    pad_m, pad_k, pad_n = max(32 - m, 0), -k % 16, -n % 16
    if pad_m or pad_k:
        a_MK = F.pad(a_MK, (0, pad_k, 0, pad_m))
    if pad_k or pad_n:
        b_KN = F.pad(b_KN, (0, pad_n, 0, pad_k))
    return torch._int_mm(a_MK, b_KN)[:m, :n]


def _apply_scales(acc_MN: Tensor, scale_a: Tensor | None, scale_b: Tensor | None) -> Tensor:
    if scale_a is not None:
        acc_MN = acc_MN * scale_a
    return acc_MN if scale_b is None else acc_MN * scale_b
