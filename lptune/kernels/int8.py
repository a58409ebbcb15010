"""INT8 GEMM with the scales applied to the accumulator.

`out = (a @ b) * scale_a * scale_b`: int8 products, int32 accumulation, scales and rounding to the output
dtype last. The sum is exact, so every backend gives the same bits. Contractions longer than an int32 holds
(133,144 products: many tokens in grad_weight, a 152k vocabulary in grad_input) are split and summed in
float32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lptune.kernels.backend import choose_backend
from lptune.kernels.record import note
from lptune.numerics.formats import INT32_SAFE_CONTRACTION

# The epilogue on CPU walks over so many accumulator elements at a time: 1 MiB of int32 stays in the L2 cache.
_EPILOGUE_ELEMENTS = 1 << 18


def int8_scaled_mm(
    a_MK: Tensor,
    b_KN: Tensor,
    scale_a_M1: Tensor | None,
    scale_b_1N: Tensor | None,
    out_dtype: torch.dtype,
    layer: Tensor,
    gemm: int,
) -> Tensor:
    """Same as `((a.double() @ b.double()).float() * scale_a * scale_b).to(out_dtype)`; None: a scale of 1.

    a_MK, b_KN: int8, any strides (fastest: a row-major, b column-major). Scales: float32, (M, 1) and (1, N).
    layer: `layer_handle` of the calling layer; gemm: index into GEMMS. Both only feed `record_gemms`.
    Raises ValueError for other dtypes and shapes.
    """
    _check(a_MK, b_KN, scale_a_M1, scale_b_1N)
    out_MN: Tensor = _int8_scaled_mm(a_MK, b_KN, scale_a_M1, scale_b_1N, out_dtype, layer, gemm)
    return out_MN


@torch.library.custom_op("lptune::int8_scaled_mm", mutates_args=())
def _int8_scaled_mm(
    a_MK: Tensor,
    b_KN: Tensor,
    scale_a_M1: Tensor | None,
    scale_b_1N: Tensor | None,
    out_dtype: torch.dtype,
    layer: Tensor,
    gemm: int,
) -> Tensor:
    m, k = a_MK.shape
    mm = _BACKENDS[choose_backend(a_MK.device.type)]
    if k <= INT32_SAFE_CONTRACTION:
        acc_MN = mm(a_MK, b_KN)
    else:
        acc_MN = torch.zeros(m, b_KN.shape[1], dtype=torch.float32, device=a_MK.device)
        for start in range(0, k, INT32_SAFE_CONTRACTION):
            part = slice(start, start + INT32_SAFE_CONTRACTION)
            acc_MN += mm(a_MK[:, part], b_KN[part])
    out_MN = _apply_scales(acc_MN, scale_a_M1, scale_b_1N, out_dtype)
    note(layer, gemm)
    return out_MN


@_int8_scaled_mm.register_fake
def _(
    a_MK: Tensor,
    b_KN: Tensor,
    scale_a_M1: Tensor | None,
    scale_b_1N: Tensor | None,
    out_dtype: torch.dtype,
    layer: Tensor,
    gemm: int,
) -> Tensor:
    return a_MK.new_empty((a_MK.shape[0], b_KN.shape[1]), dtype=out_dtype)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)` that survives torch.compile.

    Inductor drops a float32 -> bfloat16 -> float32 round trip, and with it the rounding of the weight before
    its quantization, so that compiled and eager runs would disagree on every scale.
    """
    out: Tensor = _cast(x, dtype)
    return out


@torch.library.custom_op("lptune::cast", mutates_args=())
def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype, copy=True)


@_cast.register_fake
def _(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


def _check(a_MK: Tensor, b_KN: Tensor, scale_a_M1: Tensor | None, scale_b_1N: Tensor | None) -> None:
    if a_MK.dtype != torch.int8 or b_KN.dtype != torch.int8:
        raise ValueError(f"int8_scaled_mm needs int8 operands, got {a_MK.dtype} and {b_KN.dtype}")
    if a_MK.dim() != 2 or b_KN.dim() != 2 or a_MK.shape[1] != b_KN.shape[0]:
        raise ValueError(
            f"int8_scaled_mm needs (M, K) and (K, N), got {tuple(a_MK.shape)} and {tuple(b_KN.shape)}"
        )
    if scale_a_M1 is not None and scale_a_M1.shape != (a_MK.shape[0], 1):
        raise ValueError(f"int8_scaled_mm needs scale_a of shape (M, 1), got {tuple(scale_a_M1.shape)}")
    if scale_b_1N is not None and scale_b_1N.shape != (1, b_KN.shape[1]):
        raise ValueError(f"int8_scaled_mm needs scale_b of shape (1, N), got {tuple(scale_b_1N.shape)}")


def _mm_reference(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    # float64 holds every integer up to 2**53: exact far beyond the int32 limit.
    return (a_MK.double() @ b_KN.double()).to(torch.int32)


def _mm_float32(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    # 127 * 127 * 1024 < 2**24: float32 holds every partial sum of so many products exactly.
    acc_MN = torch.zeros(a_MK.shape[0], b_KN.shape[1], dtype=torch.int32, device=a_MK.device)
    for start in range(0, a_MK.shape[1], 1024):
        part = slice(start, start + 1024)
        acc_MN += (a_MK[:, part].float() @ b_KN[part].float()).to(torch.int32)
    return acc_MN


def _mm_torch(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    if a_MK.device.type == "cpu":
        return torch._int_mm(a_MK, b_KN)
    # cuBLASLt wants more than 16 rows and K, N in multiples of 8; zeros change no sum and no scale.
    # Not yet run on hardware.
    (m, k), n = a_MK.shape, b_KN.shape[1]
    pad_m, pad_k, pad_n = max(32 - m, 0), -k % 16, -n % 16
    if pad_m or pad_k:
        a_MK = F.pad(a_MK, (0, pad_k, 0, pad_m))
    if pad_k or pad_n:
        b_KN = F.pad(b_KN, (0, pad_n, 0, pad_k))
    return torch._int_mm(a_MK, b_KN)[:m, :n]


_BACKENDS = {"torch": _mm_torch, "float32": _mm_float32, "reference": _mm_reference}


def _apply_scales(
    acc_MN: Tensor, scale_a_M1: Tensor | None, scale_b_1N: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    m, n = acc_MN.shape
    rows = m if acc_MN.device.type != "cpu" else max(1, _EPILOGUE_ELEMENTS // max(n, 1))
    out_MN = torch.empty(m, n, dtype=out_dtype, device=acc_MN.device)
    for start in range(0, m, max(rows, 1)):
        block = slice(start, start + rows)
        scaled = acc_MN[block].to(torch.float32)
        if scale_a_M1 is not None:
            scaled = scaled * scale_a_M1[block]
        if scale_b_1N is not None:
            scaled = scaled.mul_(scale_b_1N) if scale_a_M1 is not None else scaled * scale_b_1N
        out_MN[block] = scaled
    return out_MN
