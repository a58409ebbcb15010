"""GEMM with one scale per block, applied inside its sum.

The scales change along the contraction, so the product of each block is scaled before it is added:
`acc += (a_block @ b_block) * scale_a * scale_b`. The tensor core computes the product; the sum is in float32
registers, which on Hopper also keeps it precise (gemm.py). This needs a second accumulator, so the largest
tiles do not fit.

MX blocks of 32 would interrupt the tensor core four times as often. Blackwell applies E8M0 scales inside the
tensor core (`tl.dot_scaled` compiles to `tcgen05.mma` with block scaling). Before Blackwell, that is emulated
here in steps of 32: correct, but not fast.

Ran on an H100; otherwise interpreted (except the Blackwell path, which the interpreter lacks), and compiled
ahead of time without spills.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lptune.kernels.triton import again, launch
from lptune.kernels.triton.again import Launch
from lptune.kernels.triton.gemm import GROUP_M, GemmConfig, fits_tma, gemm_key, k_major, tile_of
from lptune.numerics import MX_BLOCK


@triton.jit
def _load_scale(pointers, mask, E8M0: tl.constexpr):
    """Loads scales as float32; the bits of E8M0 become the exponent of a float32."""
    if E8M0:
        bits = tl.load(pointers, mask=mask, other=0).to(tl.int32)
        # 2**-127 is subnormal in float32, and 0xff is NaN.
        bits = tl.where(bits == 0, 0x00400000, tl.where(bits == 255, 0x7FC00000, bits << 23))
        scale = bits.to(tl.float32, bitcast=True)
    else:
        scale = tl.load(pointers, mask=mask, other=0.0)
    return scale


@triton.jit
def block_mm_kernel(
    a,
    b,
    out_ptr,
    scale_a_ptr,
    scale_b_ptr,
    M,
    N,
    K,
    stride_a,
    stride_b,
    scale_a_stride_m,
    scale_a_stride_k,
    scale_b_stride_n,
    scale_b_stride_k,
    B_COLUMNS: tl.constexpr,
    E8M0: tl.constexpr,
    NATIVE: tl.constexpr,
    TMA: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """As `scaled_mm_kernel`, with one scale per row of a and per B_COLUMNS rows of b for each step of
    BLOCK_K.

    NATIVE: the tensor core applies E8M0 scales of 32 elements, BLOCK_K / 32 of them in each step.
    """
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, NUM_PROGRAMS, flatten=True):
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        start_m, start_n = tile_m * BLOCK_M, tile_n * BLOCK_N
        rows, columns = start_m + tl.arange(0, BLOCK_M), start_n + tl.arange(0, BLOCK_N)
        scale_rows = scale_a_ptr + rows.to(tl.int64) * scale_a_stride_m
        scale_columns = scale_b_ptr + (columns // B_COLUMNS).to(tl.int64) * scale_b_stride_n
        if not TMA:
            inner = tl.arange(0, BLOCK_K)[None, :]
            a_rows = a + (rows % M).to(tl.int64)[:, None] * stride_a + inner
            b_rows = b + (columns % N).to(tl.int64)[:, None] * stride_b + inner
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(steps):
            start_k = step * BLOCK_K
            if TMA:
                a_tile = a.load([start_m, start_k])
                b_tile = b.load([start_n, start_k])
            else:
                inside = inner < K - start_k
                a_tile = tl.load(a_rows + start_k, mask=inside, other=0.0)
                b_tile = tl.load(b_rows + start_k, mask=inside, other=0.0)
            if NATIVE:
                each = step * (BLOCK_K // 32) + tl.arange(0, BLOCK_K // 32)[None, :]
                known = each < tl.cdiv(K, 32)
                scale_a = tl.load(
                    scale_rows[:, None] + each * scale_a_stride_k, mask=known & (rows < M)[:, None], other=0
                )
                scale_b = tl.load(
                    scale_columns[:, None] + each * scale_b_stride_k,
                    mask=known & (columns < N)[:, None],
                    other=0,
                )
                A_FORMAT: tl.constexpr = "e4m3" if a_tile.dtype == tl.float8e4nv else "e5m2"
                B_FORMAT: tl.constexpr = "e4m3" if b_tile.dtype == tl.float8e4nv else "e5m2"
                acc = tl.dot_scaled(a_tile, scale_a, A_FORMAT, b_tile.T, scale_b, B_FORMAT, acc)
            else:
                scale_a = _load_scale(scale_rows + step * scale_a_stride_k, rows < M, E8M0)
                scale_b = _load_scale(scale_columns + step * scale_b_stride_k, columns < N, E8M0)
                product = tl.dot(a_tile, b_tile.T, out_dtype=tl.float32)
                acc += product * scale_a[:, None] * scale_b[None, :]
        at = out_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
        tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=(rows < M)[:, None] & (columns < N)[None, :])


def block_mm_configs(kind: str, major: int) -> tuple[GemmConfig, ...]:
    """Configurations for autotuning on a device of compute capability `major`; the first is the default.

    kind: "square" blocks of b, one scale for 128 columns; "vector", one for each column; "native", applied
    by the tensor core. All step by one block, or by 128 where native, so a choice changes no bit. Only what
    compiles without spills (tests/kernels/test_triton_aot.py): with a scale per element of the product, tiles
    of 128 x 128 do not fit the registers. Where the tensor core takes its operands from registers as well
    (Ada, consumer Blackwell), larger ones fit in 8 warps only.
    """
    if major in (8, 12):
        small = (GemmConfig(64, 128, 8, 2, 1), GemmConfig(64, 64, 4, 3, 2), GemmConfig(64, 64, 4, 2, 2))
        return (GemmConfig(128, 64, 4, 4, 2), *small) if kind == "square" else small
    if kind == "vector":
        narrow = (GemmConfig(64, 128, 4, 3, 1), GemmConfig(64, 128, 4, 4, 1))
        return narrow if major >= 10 else (*narrow, GemmConfig(64, 64, 4, 3, 2), GemmConfig(128, 64, 8, 4, 1))
    common = (GemmConfig(128, 128, 8, 3, 1), GemmConfig(128, 128, 8, 4, 1), GemmConfig(128, 64, 4, 4, 2))
    if kind == "native":  # with fewer than 128 rows Triton takes bfloat16 instructions instead
        return (*common, GemmConfig(256, 128, 8, 3, 1), GemmConfig(128, 256, 8, 3, 1))
    return (*common, GemmConfig(64, 128, 4, 4, 1), GemmConfig(64, 64, 4, 4, 2))


def block_scaled_mm(
    a_MK: Tensor,
    b_KN: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    block: int,
    out_dtype: torch.dtype,
    *,
    tokens_contracted: bool = False,
    config: GemmConfig | None = None,
    tma: bool | None = None,
) -> Tensor:
    """Same as `kernels.block_scaled_mm`; `block` is 32 or 128. The rest as for `gemm.scaled_mm`."""
    (m, k), n, device = a_MK.shape, b_KN.shape[1], a_MK.device
    out_MN = torch.empty(m, n, dtype=out_dtype, device=device)
    if m == 0 or n == 0 or k == 0:
        return out_MN.zero_()
    a, b_NK = k_major(a_MK), k_major(b_KN.t())
    e8m0 = scale_a.dtype == torch.float8_e8m0fnu
    if e8m0:
        scale_a, scale_b = scale_a.view(torch.uint8), scale_b.view(torch.uint8)
    b_columns = 1 if scale_b.shape[1] == n else block
    numbers = (
        m,
        n,
        k,
        a.stride(0),
        b_NK.stride(0),
        *scale_a.stride(),
        scale_b.stride(1),
        scale_b.stride(0),
    )
    tensors = (a, b_NK, out_MN, scale_a, scale_b)
    dtypes = [each.dtype for each in tensors]
    key = ("block_mm", a.get_device(), *numbers, *dtypes, block, b_columns, tokens_contracted)
    chosen = config is not None or tma is not None
    if not chosen and again.again(key, tensors):
        return out_MN
    native = e8m0 and block == MX_BLOCK and b_columns == 1 and launch.capability(device)[0] == 10
    kind = "native" if native else "vector" if b_columns == 1 else "square"
    block_k = 128 if native else block
    use_tma = (launch.has_tma(device) if tma is None else tma) and fits_tma(a) and fits_tma(b_NK)
    processors = launch.num_processors(device)

    def launch_by(config: GemmConfig) -> Launch:
        num_programs = processors * config.per_processor
        num_tiles = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
        return Launch(
            block_mm_kernel,
            (min(num_programs, num_tiles),),
            len(tensors),
            numbers,
            {
                "B_COLUMNS": b_columns,
                "E8M0": e8m0,
                "NATIVE": native,
                "TMA": use_tma,
                "NUM_PROGRAMS": num_programs,
                "BLOCK_M": config.block_m,
                "BLOCK_N": config.block_n,
                "BLOCK_K": block_k,
                "GROUP_M": GROUP_M,
            },
            config.num_warps,
            config.num_stages,
            config._replace(block_k=block_k).described if use_tma else (),
        )

    if config is None:
        name = gemm_key(f"block_mm {block} {kind}", a, b_NK, out_dtype, use_tma, tokens_contracted)
        configs = block_mm_configs(kind, launch.capability(device)[0])
        config = launch.tuned(name, configs, lambda each: launch_by(each).run(tensors), device)
    if chosen:
        launch_by(config).run(tensors)
    else:
        again.first(key, [launch_by(config)], tensors)
    return out_MN
