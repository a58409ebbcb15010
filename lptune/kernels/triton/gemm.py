"""8-bit GEMM with the scales in the epilogue: `out = (a @ b) * scale_a * scale_b`, INT8 and float8 alike.

Each program computes tiles of `out` and steps along the contraction by 128 (INT8 also by 64), accumulating in
registers. The scales are constant along the contraction, so they are applied to the accumulator once, at the
end, and the result is rounded once. A library GEMM without scales in its epilogue needs a second pass over
`out`.

- Persistent: there are as many programs as the device has processors (or twice as many). Each takes every
  n-th tile, so that the epilogue of one tile overlaps the loads of the next. Tiles are numbered in groups of
  8 rows of tiles, so that programs that run at the same time share rows of a and columns of b in the L2
  cache.
- K-major: both operands are contiguous along the contraction, the only layout that the 8-bit tensor cores of
  Hopper accept. The quantizers store them so; any other layout is copied here first.
- Since Hopper the TMA loads whole tiles (host-side tensor descriptors). Elsewhere, and for an operand that is
  not aligned to 16 bytes as the TMA requires, tiles are loaded through pointers.
- INT8 accumulates in int32, exactly: every backend gives the same bits. Float8 accumulates in the tensor
  core, which on Hopper keeps about 14 bits of a sum (DeepSeek-V3, arXiv:2412.19437, section 3.3.2); so the
  accumulator is added to a float32 one every 128 products. cuBLAS calls the alternative "fast accumulation".
- A configuration changes the time, but no bit: INT8 is exact in any order, and float8 always steps by 128
  (the gpu tests compare them).
- On Hopper, the tensor core idles at the end of each step. Triton lets products run on while the loop goes
  on only if the accumulator is float32; INT8 products are waited for in the step that issues them. Float8
  ones may be pending in PTX, but then the two accumulators are added, and ptxas waits for that. With two
  programs on a processor, one multiplies while the other waits. hopper.py, another kernel for the same GEMM,
  lets INT8 products run on, and float8 ones beside another group's additions; autotuning chooses.
- In this kernel, both wait before they issue the next load. So of n stages, n - 2 are loaded while the tensor
  core works: one program on a processor needs three or more. (Read in machine code, of Triton 3.7.1.)

Ran on an H100 (sm_90); for sm_80, 86, 89, 100 and 120 only interpreted, and compiled ahead of time without
spills. On sm_100 Triton compiles INT8 to `mma.sync` up to 3.7, and to the fifth generation's instruction
since 3.8.
"""

import logging
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lptune.kernels.triton import again, launch
from lptune.kernels.triton.again import Describe, Launch

if TYPE_CHECKING:
    from lptune.kernels.triton.hopper import HopperConfig

logger = logging.getLogger(__name__)

BLOCK_K = 128
GROUP_M = 8


class GemmConfig(NamedTuple):
    """Launch parameters of a GEMM kernel."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    per_processor: int  # programs on one processor
    block_k: int = BLOCK_K  # size of a step; with block scales, a step is one block instead

    @property
    def described(self) -> tuple[Describe, Describe]:
        """What makes the TMA's descriptors of a and b: of the tiles that one step loads."""
        return again.tile([self.block_m, self.block_k]), again.tile([self.block_n, self.block_k])


_COMMON = (
    GemmConfig(128, 128, 8, 3, 1),
    GemmConfig(128, 128, 8, 4, 1),
    GemmConfig(64, 128, 4, 4, 1),
    GemmConfig(128, 64, 4, 4, 2),
    GemmConfig(64, 64, 4, 4, 2),
)
_WIDE, _TALL = GemmConfig(128, 256, 8, 3, 1), GemmConfig(256, 128, 8, 3, 1)
_TWO_PROGRAMS, _TWO_LARGE_PROGRAMS = GemmConfig(64, 128, 4, 4, 2), GemmConfig(128, 128, 4, 3, 2)

_INT8_ON_AMPERE = (
    GemmConfig(128, 256, 8, 3, 1, block_k=64),
    GemmConfig(256, 128, 8, 3, 1, block_k=64),
    GemmConfig(128, 128, 4, 4, 2, block_k=64),
    GemmConfig(128, 128, 8, 4, 1, block_k=64),
)
"""Short steps leave room for large tiles and more stages in 163 KB (A100), 99 KB (consumer Ampere, Ada)."""


def gemm_configs(major: int, is_int8: bool, tma: bool) -> tuple[GemmConfig, ...]:
    """Configurations for autotuning on a device of compute capability `major`; the first that fits its
    shared memory is the default.

    Only those that compile without spills (tests/kernels/test_triton_aot.py); the pointers of loads without
    TMA take registers, too. Float8 on Hopper has two accumulators: at 128 x 256 they do not fit into the
    registers, at 256 x 128 only with TMA. On Blackwell the accumulator has its own memory, and 128 x 256
    fits.
    """
    if is_int8 and major == 9:
        found = (*_COMMON, _WIDE._replace(num_stages=4), _TWO_PROGRAMS)
        return (_TWO_LARGE_PROGRAMS, *found) if tma else found
    if is_int8 and major == 8:
        return (*_COMMON, _WIDE, *_INT8_ON_AMPERE)
    if is_int8 or major >= 10:
        return (*_COMMON, _WIDE)
    if major == 9:
        return (*_COMMON, _TWO_PROGRAMS, _TALL) if tma else (*_COMMON, _TWO_PROGRAMS)
    return _COMMON


def hopper_configs(major: int, is_int8: bool, tma: bool) -> "tuple[HopperConfig, ...]":
    """Those of the kernel in Gluon (hopper.py); none elsewhere, or if this Triton cannot import it."""
    if major != 9 or not tma:
        return ()
    try:
        from lptune.kernels.triton import hopper
    except Exception as error:  # Gluon's interface is not stable, and tl.dot is as right
        logger.debug("8-bit GEMMs run without their kernel for Hopper: %s", error)
        return ()
    return hopper.INT8_CONFIGS if is_int8 else hopper.FLOAT8_CONFIGS


@triton.jit
def tile_of(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """(row, column) of tile number `tile`. Tiles are numbered column by column in groups of GROUP_M rows."""
    per_group = GROUP_M * tiles_n
    first_m = tile // per_group * GROUP_M
    group_m = min(tiles_m - first_m, GROUP_M)
    return first_m + tile % per_group % group_m, tile % per_group // group_m


@triton.jit
def scaled_mm_kernel(
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
    SCALE_A: tl.constexpr,
    SCALE_B: tl.constexpr,
    TMA: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """a: (M, K), b: (N, K), out: (M, N), all row by row. With TMA, a and b are descriptors, else pointers.

    SCALE_A, SCALE_B: 0 no scale, 1 one scale, 2 one per row of a or b.
    """
    IS_INT8: tl.constexpr = (a.dtype if TMA else a.dtype.element_ty) == tl.int8
    ACCUMULATOR: tl.constexpr = tl.int32 if IS_INT8 else tl.float32
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    # Flattened with the inner loop, so that loads of the next tile start early.
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, NUM_PROGRAMS, flatten=True):
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        start_m, start_n = tile_m * BLOCK_M, tile_n * BLOCK_N
        rows, columns = start_m + tl.arange(0, BLOCK_M), start_n + tl.arange(0, BLOCK_N)
        if not TMA:
            inner = tl.arange(0, BLOCK_K)[None, :]
            # Rows beyond the end wrap around: their results are not stored, and no mask is needed.
            a_rows = a + (rows % M).to(tl.int64)[:, None] * stride_a + inner
            b_rows = b + (columns % N).to(tl.int64)[:, None] * stride_b + inner
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACCUMULATOR)
        for step in range(steps):
            start_k = step * BLOCK_K
            if TMA:  # loads zeros beyond the end
                a_tile = a.load([start_m, start_k])
                b_tile = b.load([start_n, start_k])
            else:
                inside = inner < K - start_k
                a_tile = tl.load(a_rows + start_k, mask=inside, other=0.0)
                b_tile = tl.load(b_rows + start_k, mask=inside, other=0.0)
            acc = tl.dot(
                a_tile, b_tile.T, acc, out_dtype=ACCUMULATOR, max_num_imprecise_acc=0 if IS_INT8 else BLOCK_K
            )
        at = out_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
        inside_out = (rows < M)[:, None] & (columns < N)[None, :]
        if out_ptr.dtype.element_ty == tl.int32:
            tl.store(at, acc, mask=inside_out)
        else:
            # In the order of the reference: acc * scale_a first.
            scaled = acc.to(tl.float32)
            if SCALE_A == 2:
                scaled = scaled * tl.load(scale_a_ptr + rows, mask=rows < M, other=0.0)[:, None]
            elif SCALE_A == 1:
                scaled = scaled * tl.load(scale_a_ptr)
            if SCALE_B == 2:
                scaled = scaled * tl.load(scale_b_ptr + columns, mask=columns < N, other=0.0)[None, :]
            elif SCALE_B == 1:
                scaled = scaled * tl.load(scale_b_ptr)
            tl.store(at, scaled.to(out_ptr.dtype.element_ty), mask=inside_out)


def scaled_mm(
    a_MK: Tensor,
    b_KN: Tensor,
    scale_a_M1: Tensor | None,
    scale_b_1N: Tensor | None,
    out_dtype: torch.dtype,
    *,
    tokens_contracted: bool = False,
    config: "GemmConfig | HopperConfig | None" = None,
    tma: bool | None = None,
) -> Tensor:
    """Same as `kernels.scaled_mm`. out_dtype: int32 (INT8 only, without scales) or a float.

    tokens_contracted: K, not M, is the number of tokens (grad_weight), which autotuning buckets. config, tma:
    override the choice of autotuning and of the device.
    """
    (m, k), n, device = a_MK.shape, b_KN.shape[1], a_MK.device
    out_MN = torch.empty(m, n, dtype=out_dtype, device=device)
    if m == 0 or n == 0 or k == 0:
        return out_MN.zero_()
    a, b_NK = k_major(a_MK), k_major(b_KN.t())
    scale_a, scale_b = (None if s is None else s.contiguous() for s in (scale_a_M1, scale_b_1N))
    kinds = _kind(scale_a, m), _kind(scale_b, n)
    strides = a.stride(0), b_NK.stride(0)
    tensors = (a, b_NK, out_MN, scale_a, scale_b, None)  # no places of groups
    dtypes = [None if each is None else each.dtype for each in tensors]
    key = ("scaled_mm", a.get_device(), m, n, k, *strides, *kinds, *dtypes, tokens_contracted)
    chosen = config is not None or tma is not None
    if not chosen and again.again(key, tensors):
        return out_MN
    use_tma = (launch.has_tma(device) if tma is None else tma) and fits_tma(a) and fits_tma(b_NK)
    processors = launch.num_processors(device)

    def launch_by(config: "GemmConfig | HopperConfig") -> Launch:
        num_programs = processors * config.per_processor
        num_tiles = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
        if not isinstance(config, GemmConfig):
            from lptune.kernels.triton import hopper

            constants = hopper.constants(config, kinds, num_programs, promote=a.dtype != torch.int8)
            return Launch(
                hopper.hopper_kernel,
                (min(num_programs, num_tiles),),
                len(tensors),
                (m, n, k, 1),
                constants,
                config.num_warps,
                described=hopper.describe(config),
            )
        return Launch(
            scaled_mm_kernel,
            (min(num_programs, num_tiles),),
            5,
            (m, n, k, *strides),
            {
                "SCALE_A": kinds[0],
                "SCALE_B": kinds[1],
                "TMA": use_tma,
                "NUM_PROGRAMS": num_programs,
                "BLOCK_M": config.block_m,
                "BLOCK_N": config.block_n,
                "BLOCK_K": config.block_k,
                "GROUP_M": GROUP_M,
            },
            config.num_warps,
            config.num_stages,
            config.described if use_tma else (),
        )

    if config is None:
        is_int8, major = a.dtype == torch.int8, launch.capability(device)[0]
        configs: tuple[GemmConfig | HopperConfig, ...] = gemm_configs(major, is_int8, use_tma)
        configs += hopper_configs(major, is_int8, use_tma)
        name = gemm_key("scaled_mm", a, b_NK, out_dtype, use_tma, tokens_contracted)
        config = launch.tuned(name, configs, lambda each: launch_by(each).run(tensors), device)
    if chosen:
        launch_by(config).run(tensors)
    else:
        again.first(key, [launch_by(config)], tensors)
    return out_MN


def gemm_key(
    kernel: str, a: Tensor, b_NK: Tensor, out_dtype: torch.dtype, tma: bool, tokens_contracted: bool
) -> str:
    """The key of a GEMM for autotuning, with the number of tokens bucketed and the exact weight sizes."""
    (m, k), n = a.shape, b_NK.shape[0]
    sizes = f"M={m} N={n} K~{launch.bucket(k)}" if tokens_contracted else f"M~{launch.bucket(m)} N={n} K={k}"
    return f"{kernel} {a.dtype} {b_NK.dtype} {out_dtype} tma={tma} {sizes}"


def k_major(x: Tensor) -> Tensor:
    """x itself if it is stored row by row; otherwise a copy that is."""
    return x if x.stride(1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()


def fits_tma(x: Tensor) -> bool:
    """Whether a TMA descriptor can describe x (one byte per element): rows must be aligned to 16 bytes."""
    return x.data_ptr() % 16 == 0 and x.stride(0) % 16 == 0


def _kind(scale: Tensor | None, size: int) -> int:
    # One row with one scale counts as both.
    return 0 if scale is None else 2 if scale.numel() == size else 1
