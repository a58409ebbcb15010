"""GEMMs of torch on CUDA for float8 and NVFP4: cuBLASLt, or CUTLASS for row scales that cuBLASLt lacks.

Requirements of each call; torch refuses other operands:

    operands     a row-major, b column-major, contraction and columns multiples of 16
    rows         a scale for each row of a and each column of b, contiguous. On Hopper with CUDA 12.9 cuBLASLt
                 applies them to the accumulator; elsewhere CUTLASS does, to a result in bfloat16
    NVFP4        Blackwell; two numbers of 4 bits in a byte, the first in the low half; contraction a multiple
                 of 32. The e4m3 scales of 128 rows x 4 blocks lie together, see `_tiled`

The rules come from torch's ScaledBlas.cpp and the documentation of cuBLAS ("1D block scaling factors
layout"); tests/kernels/test_cublaslt.py and test_nvfp4.py check that the calls follow them. No call for NVFP4
has run on a GPU yet.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor


def takes(b_KN: Tensor) -> bool:
    """Whether torch can multiply float8 matrices of these sizes."""
    return b_KN.shape[0] % 16 == 0 and b_KN.shape[1] % 16 == 0


def scaled_mm(
    a_MK: Tensor,
    b_KN: Tensor,
    scale_a_M1: Tensor | None,
    scale_b_1N: Tensor | None,
    out_dtype: torch.dtype,
    *,
    fast: bool,
) -> Tensor:
    """As `kernels.scaled_mm`, for sizes that `takes` allows; with scales of rows, in bfloat16. fast: use fast
    accumulation.
    """
    rowwise = any(scale is not None and scale.numel() != 1 for scale in (scale_a_M1, scale_b_1N))
    # Row scales need a vector on both sides.
    m, n = (a_MK.shape[0], b_KN.shape[1]) if rowwise else (1, 1)
    scale_a, scale_b = (
        _ones(size, a_MK.device) if scale is None else scale.expand(size).contiguous()
        for scale, size in ((scale_a_M1, (m, 1)), (scale_b_1N, (1, n)))
    )
    a, b = _row_major(a_MK), _row_major(b_KN.t()).t()
    return torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=out_dtype, use_fast_accum=fast)


def nvfp4_mm(
    a_MK: Tensor,
    b_NK: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    tensor_scale_a_11: Tensor,
    tensor_scale_b_11: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    """As `kernels.nvfp4_mm`, with b and its scales by rows; N a multiple of 16."""
    recipes = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
    layouts = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
    return F.scaled_mm(
        _packed(a_MK),
        _packed(b_NK).t(),
        [_tiled(scale_a), tensor_scale_a_11],
        recipes,
        [_tiled(scale_b), tensor_scale_b_11],
        recipes,
        layouts,
        layouts,
        output_dtype=out_dtype,
    )


def _packed(q_MK: Tensor) -> Tensor:
    """Numbers of e2m1 as two codes in a byte: the sign and the number's place among the 8 magnitudes."""
    magnitudes = torch.tensor((0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), device=q_MK.device)
    q32 = F.pad(q_MK.to(torch.float32), (0, -q_MK.shape[1] % 32))
    code = torch.bucketize(q32.abs(), magnitudes, right=True) + 8 * q32.signbit()
    return (code[:, ::2] + 16 * code[:, 1::2]).to(torch.uint8).view(torch.float4_e2m1fn_x2)


def _tiled(scale: Tensor) -> Tensor:
    """Scales (rows, blocks) in tiles of 128 x 4, padded with zeros. Row r of a tile is at r % 32, r // 32."""
    rows, blocks = scale.shape
    padded = F.pad(scale.view(torch.uint8), (0, -blocks % 4, 0, -rows % 128))
    tiles = padded.view(-1, 4, 32, padded.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.contiguous().view(scale.dtype).flatten()


def _ones(size: tuple[int, int], device: torch.device) -> Tensor:
    # Kept, because filling it takes a launch in each GEMM of a step. Under capture the fill would become part
    # of the graph, and others would read the tensor before it is filled.
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.ones(size, dtype=torch.float32, device=device)
    return _kept_ones(size, device)


@functools.lru_cache(maxsize=64)
def _kept_ones(size: tuple[int, int], device: torch.device) -> Tensor:
    return torch.ones(size, dtype=torch.float32, device=device)


def _row_major(x: Tensor) -> Tensor:
    # For a single row, or rows of one element, torch calls other strides contiguous, too.
    x = x.contiguous()
    return x if x.stride() == (x.shape[1], 1) else x.as_strided(x.shape, (x.shape[1], 1))
