"""Grouped GEMMs and their quantizers: one launch for all groups, and no look at their sizes from the host.

How many rows a group has is data on the device. So `places` writes a table, in one short launch, from which
each program reads what is its own:

    [0]              the number of tiles: runs of 128 rows of one group; the last of a group may be shorter
    [1 + 2 e ...]    for group e: the tiles of the groups before it, and its own
    [1 + 2 E + 3 t]  for tile t: its group, its first row, and the end of the group's rows

`grouped_mm` multiplies tile after tile by the matrix of the tile's group. `grouped_outer` contracts over the
rows of a group. For that the tensor core needs both operands transposed; so `quantize_grouped_columns` stores
them so, and begins each group at a multiple of 128 rows, with zeros before the next one: a step of the
contraction is never in two groups, and needs no mask. It costs 64 rows of 8 bits a group, on average.

On Hopper the kernel of hopper.py multiplies (docs/gpu.md has what it gains), elsewhere `tl.dot`.

The bits are those of gemm.py and quantize.py for each group.

Shapes: S rows, E groups, K and N sizes of a matrix, R = E * N.
"""

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lptune.kernels.layout import run_rows
from lptune.kernels.triton import again, launch
from lptune.kernels.triton.again import Launch
from lptune.kernels.triton.formats import magnitude_bits, round_to, scale_from_amax
from lptune.kernels.triton.gemm import fits_tma, hopper_configs, k_major
from lptune.kernels.triton.quantize import TILE_CONFIGS, TileConfig, vector
from lptune.numerics import FORMATS

if TYPE_CHECKING:
    from lptune.kernels.triton.hopper import HopperConfig

_TILE = tl.constexpr(128)
"""Rows of a tile, and of a step of `grouped_outer`."""


class GroupedConfig(NamedTuple):
    """Launch parameters of a grouped GEMM by `tl.dot`. All steps of float8 must have one length (`_run`)."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


CONFIGS = (
    GroupedConfig(128, 128, 8, 3),
    GroupedConfig(128, 64, 8, 4),
    GroupedConfig(64, 128, 4, 3),
)
"""The last one fits every device."""


@triton.jit
def places_kernel(ends_ptr, places_ptr, E, GROUPS: tl.constexpr):
    """Writes the table of the module's docstring. GROUPS: a power of two, at least E."""
    groups = tl.arange(0, GROUPS)
    inside = groups < E
    ends = tl.load(ends_ptr + groups, mask=inside, other=0)
    starts = tl.load(ends_ptr + groups - 1, mask=inside & (groups > 0), other=0)
    tiles = tl.where(inside, (ends - starts + _TILE - 1) // _TILE, 0)
    before = tl.cumsum(tiles, 0) - tiles
    tl.store(places_ptr, tl.sum(tiles))
    tl.store(places_ptr + 1 + 2 * groups, before, mask=inside)
    tl.store(places_ptr + 2 + 2 * groups, tiles, mask=inside)
    for tile in range(tl.max(tiles)):
        mine = tile < tiles
        at = places_ptr + 1 + 2 * E + 3 * (before + tile)
        tl.store(at, groups, mask=mine)
        tl.store(at + 1, starts + tile * _TILE, mask=mine)
        tl.store(at + 2, ends, mask=mine)


@triton.jit
def grouped_mm_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    scale_a_ptr,
    scale_b_ptr,
    places_ptr,
    E,
    N,
    K,
    stride_a,
    stride_b,
    HAS_SCALE_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """a: (S, K), b: (E * N, K), out: (S, N), all row by row. Group e has the rows of b from e * N on."""
    IS_INT8: tl.constexpr = a_ptr.dtype.element_ty == tl.int8
    ACCUMULATOR: tl.constexpr = tl.int32 if IS_INT8 else tl.float32
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile_m, tile_n = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n
    if tile_m < tl.load(places_ptr):
        entry = places_ptr + 1 + 2 * E + 3 * tile_m
        group, start, end = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        rows, columns = start + tl.arange(0, _TILE), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        inner = tl.arange(0, BLOCK_K)[None, :]
        # Rows beyond the end are other rows: their results are not stored, and no mask is needed.
        a_rows = a_ptr + tl.minimum(rows, end - 1).to(tl.int64)[:, None] * stride_a + inner
        of_b = group.to(tl.int64) * N + tl.minimum(columns, N - 1)
        b_rows = b_ptr + of_b[:, None] * stride_b + inner
        acc = tl.zeros((_TILE, BLOCK_N), dtype=ACCUMULATOR)
        for start_k in range(0, K, BLOCK_K):
            inside = inner < K - start_k
            a_tile = tl.load(a_rows + start_k, mask=inside, other=0.0)
            b_tile = tl.load(b_rows + start_k, mask=inside, other=0.0)
            acc = tl.dot(
                a_tile, b_tile.T, acc, out_dtype=ACCUMULATOR, max_num_imprecise_acc=0 if IS_INT8 else BLOCK_K
            )
        scaled = acc.to(tl.float32) * tl.load(scale_a_ptr + rows, mask=rows < end, other=0.0)[:, None]
        if HAS_SCALE_B:
            scaled = scaled * tl.load(scale_b_ptr + of_b)[None, :]
        at = out_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
        tl.store(at, scaled.to(out_ptr.dtype.element_ty), mask=(rows < end)[:, None] & (columns < N)[None, :])


@triton.jit
def grouped_outer_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    scale_a_ptr,
    scale_b_ptr,
    places_ptr,
    N,
    K,
    stride_a,
    stride_b,
    HAS_SCALE_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """a: (N, S'), b: (K, S'), row by row, where each group begins at a multiple of 128. out: (E * N, K)."""
    IS_INT8: tl.constexpr = a_ptr.dtype.element_ty == tl.int8
    ACCUMULATOR: tl.constexpr = tl.int32 if IS_INT8 else tl.float32
    group = tl.program_id(1)
    first, tiles = tl.load(places_ptr + 1 + 2 * group), tl.load(places_ptr + 2 + 2 * group)
    tiles_k = tl.cdiv(K, BLOCK_N)
    rows = tl.program_id(0) // tiles_k * _TILE + tl.arange(0, _TILE)
    columns = tl.program_id(0) % tiles_k * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = first * _TILE + tl.arange(0, BLOCK_K)[None, :]
    a_rows = a_ptr + tl.minimum(rows, N - 1).to(tl.int64)[:, None] * stride_a + inner
    b_rows = b_ptr + tl.minimum(columns, K - 1).to(tl.int64)[:, None] * stride_b + inner
    acc = tl.zeros((_TILE, BLOCK_N), dtype=ACCUMULATOR)
    for start_s in range(0, tiles * _TILE, BLOCK_K):
        acc = tl.dot(
            tl.load(a_rows + start_s),
            tl.load(b_rows + start_s).T,
            acc,
            out_dtype=ACCUMULATOR,
            max_num_imprecise_acc=0 if IS_INT8 else BLOCK_K,
        )
    of_a, of_b = group.to(tl.int64) * N + rows, group.to(tl.int64) * K + columns
    scaled = acc.to(tl.float32) * tl.load(scale_a_ptr + of_a, mask=rows < N, other=0.0)[:, None]
    if HAS_SCALE_B:
        scaled = scaled * tl.load(scale_b_ptr + of_b, mask=columns < K, other=0.0)[None, :]
    to = out_ptr + of_a[:, None] * K + columns[None, :]
    tl.store(to, scaled.to(out_ptr.dtype.element_ty), mask=(rows < N)[:, None] & (columns < K)[None, :])


@triton.jit
def grouped_columns_kernel(
    x_ptr,
    multiplier_ptr,
    q_ptr,
    scale_ptr,
    ends_ptr,
    places_ptr,
    K,
    stride_s,
    stride_k,
    stride_q,
    MULTIPLY: tl.constexpr,
    FORMAT: tl.constexpr,
    MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    HARDWARE_FLOAT8: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """q (K, S'), in runs as `grouped_outer_kernel` wants it, and scales (E, K): of the columns of
    x * multiplier (S), within the rows of a group.
    """
    group = tl.program_id(1)
    start = tl.where(group > 0, tl.load(ends_ptr + tl.maximum(group - 1, 0)), 0)
    end = tl.load(ends_ptr + group)
    first, tiles = tl.load(places_ptr + 1 + 2 * group), tl.load(places_ptr + 2 + 2 * group)
    columns = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    largest = tl.zeros((BLOCK_M, BLOCK_K), tl.int32)
    for before in range(0, tiles * _TILE, BLOCK_M):
        rows = start + before + tl.arange(0, BLOCK_M)
        inside = (rows < end)[:, None] & (columns < K)[None, :]
        at = rows.to(tl.int64)[:, None] * stride_s + columns.to(tl.int64)[None, :] * stride_k
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if MULTIPLY:
            x = x * tl.load(multiplier_ptr + rows, mask=rows < end, other=0.0)[:, None]
        bits = magnitude_bits(x)
        largest = tl.where(bits > largest, bits, largest)
    scale, inverse = scale_from_amax(tl.max(largest, axis=0), MAX, POWER_OF_TWO)
    tl.store(scale_ptr + group.to(tl.int64) * K + columns, scale, mask=columns < K)
    to_columns = q_ptr + columns.to(tl.int64)[None, :] * stride_q + first * _TILE
    for before in range(0, tiles * _TILE, BLOCK_M):
        offsets = before + tl.arange(0, BLOCK_M)
        rows = start + offsets
        inside = (rows < end)[:, None] & (columns < K)[None, :]
        at = rows.to(tl.int64)[:, None] * stride_s + columns.to(tl.int64)[None, :] * stride_k
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if MULTIPLY:
            x = x * tl.load(multiplier_ptr + rows, mask=rows < end, other=0.0)[:, None]
        q = round_to(x * inverse[None, :], FORMAT, MAX, HARDWARE_FLOAT8)
        # Rows beyond the end are zeros, up to the next group.
        tl.store(to_columns + offsets[:, None], q, mask=(columns < K)[None, :])
    if group == tl.num_programs(1) - 1:  # and after the last group up to the end
        nothing = tl.zeros((BLOCK_M, BLOCK_K), q_ptr.dtype.element_ty)
        for before in range(tiles * _TILE, stride_q - first * _TILE, BLOCK_M):
            to = to_columns + (before + tl.arange(0, BLOCK_M))[:, None]
            tl.store(to, nothing, mask=(columns < K)[None, :])


@triton.jit
def transpose_kernel(q_ptr, out_ptr, N, K, BLOCK: tl.constexpr):
    """out (E, K, N) is q (E, N, K), transposed; both are 8-bit and contiguous."""
    of_group = tl.program_id(2).to(tl.int64) * N * K
    rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (rows < N) & (columns < K)
    tile = tl.load(q_ptr + of_group + rows * K + columns, mask=inside)
    tl.store(out_ptr + of_group + columns * N + rows, tile, mask=inside)


def places(ends_E: Tensor, num_rows: int) -> Tensor:
    """The table of the module's docstring, int32. num_rows: S."""
    num_groups = len(ends_E)
    size = 1 + 2 * num_groups + 3 * (num_rows // _TILE.value + num_groups)
    found = torch.empty(size, dtype=torch.int32, device=ends_E.device)
    constants = {"GROUPS": triton.next_power_of_2(num_groups)}
    key = ("places", ends_E.get_device(), num_groups)
    if not again.again(key, (ends_E, found)):
        again.first(key, [Launch(places_kernel, (1,), 2, (num_groups,), constants, 4)], (ends_E, found))
    return found


def transposed(w_RK: Tensor, num_groups: int) -> Tensor:
    """The 8-bit matrices of `w_RK` (E * N, K), each transposed: (E * K, N), contiguous."""
    w = w_RK.contiguous()
    n, k, block = w.shape[0] // num_groups, w.shape[1], 64
    out = torch.empty(num_groups * k, n, dtype=w.dtype, device=w.device)
    tensors, key = (w.view(torch.int8), out.view(torch.int8)), ("transpose", w.get_device(), num_groups, n, k)
    if out.numel() and not again.again(key, tensors):
        grid = (triton.cdiv(k, block), triton.cdiv(n, block), num_groups)
        again.first(key, [Launch(transpose_kernel, grid, 2, (n, k), {"BLOCK": block}, 4)], tensors)
    return out


def grouped_mm(
    a_SK: Tensor,
    b_RK: Tensor,
    scale_a_S1: Tensor,
    scale_b_R1: Tensor | None,
    ends_E: Tensor,
    out_dtype: torch.dtype,
    config: "GroupedConfig | HopperConfig | None" = None,
) -> Tensor:
    """`kernels.grouped_mm` with by_rows. config: overrides the choice of autotuning."""
    (num_rows, k), num_groups = a_SK.shape, len(ends_E)
    n = b_RK.shape[0] // num_groups
    out_SN = torch.empty(num_rows, n, dtype=out_dtype, device=a_SK.device)
    if out_SN.numel() == 0 or k == 0:
        return out_SN.zero_()
    gemm = _Gemm("rows", k_major(a_SK), k_major(b_RK), out_SN, num_rows, n, k, num_groups)
    gemm.run(scale_a_S1, scale_b_R1, ends_E, num_rows, config)
    return out_SN


def grouped_outer(
    a_SN: Tensor,
    b_SK: Tensor,
    scale_a_EN: Tensor,
    scale_b_EK: Tensor | None,
    ends_E: Tensor,
    out_dtype: torch.dtype,
    config: "GroupedConfig | HopperConfig | None" = None,
) -> Tensor:
    """`kernels.grouped_outer`: a and b in runs, as `quantize_grouped_columns` stores them."""
    (num_groups, n), k = scale_a_EN.shape, b_SK.shape[1]
    out_RK = torch.empty(num_groups * n, k, dtype=out_dtype, device=a_SN.device)
    if out_RK.numel() == 0 or len(a_SN) == 0:
        return out_RK.zero_()
    gemm = _Gemm("outer", k_major(a_SN.t()), k_major(b_SK.t()), out_RK, n, k, len(a_SN), num_groups)
    gemm.run(scale_a_EN, scale_b_EK, ends_E, len(a_SN), config)
    return out_RK


class _Gemm(NamedTuple):
    """One grouped GEMM: out (m, n) of each group is a @ b.T, by rows of a or by outer products.

    form: "rows": a (S, k), b (E * n, k), and m is S. "outer": a (m, S'), b (n, S'), and k is S'.
    """

    form: str
    a: Tensor
    b: Tensor
    out: Tensor
    m: int
    n: int
    k: int
    num_groups: int

    def run(
        self,
        scale_a: Tensor,
        scale_b: Tensor | None,
        ends_E: Tensor,
        num_rows: int,
        config: "GroupedConfig | HopperConfig | None",
    ) -> None:
        """Multiplies into `out`. num_rows: at least as many as the groups have."""
        a, b, device = self.a, self.b, self.a.device
        scale_b = None if scale_b is None else scale_b.contiguous()
        tensors = (a, b, self.out, scale_a.contiguous(), scale_b, places(ends_E, num_rows))
        dtypes = a.dtype, b.dtype, self.out.dtype
        sizes = (self.m, self.n, self.k, self.num_groups)
        key = (self.form, a.get_device(), *sizes, a.stride(0), b.stride(0), *dtypes, scale_b is None)
        by = functools.partial(self._launch, has_scale_b=scale_b is not None)
        if config is not None:
            by(config).run(tensors)
        elif not again.again(key, tensors):
            is_int8, tma = a.dtype == torch.int8, launch.has_tma(device) and fits_tma(a) and fits_tma(b)
            found: list[GroupedConfig | HopperConfig]
            # All steps of float8 have one length, so that no configuration changes a bit.
            found = [each for each in CONFIGS if each.block_k == 128 or is_int8]
            fast = hopper_configs(launch.capability(device)[0], is_int8, tma)
            found += [each for each in fast if each.block_m == _TILE.value]
            n, k, num_rows = (self.n, self.k, self.m) if self.form == "rows" else (self.m, self.n, self.k)
            name = f"grouped {self.form} {a.dtype} {self.out.dtype} tma={tma} E={self.num_groups}"
            name += f" N={n} K={k} S~{launch.bucket(num_rows)}"
            chosen = launch.tuned(name, found, lambda each: by(each).run(tensors), device)
            again.first(key, [by(chosen)], tensors)

    def _launch(self, config: "GroupedConfig | HopperConfig", has_scale_b: bool) -> Launch:
        by_rows, tile = self.form == "rows", _TILE.value
        tiles_n = triton.cdiv(self.n, config.block_n)
        # Each group may have a tile that is not full.
        tiles_m = triton.cdiv(self.m, tile) + self.num_groups if by_rows else triton.cdiv(self.m, tile)
        if not isinstance(config, GroupedConfig):
            from lptune.kernels.triton import hopper

            num_programs = launch.num_processors(self.a.device) * config.per_processor
            num_tiles = tiles_m * tiles_n * (1 if by_rows else self.num_groups)
            return Launch(
                hopper.hopper_kernel,
                (min(num_programs, num_tiles),),
                6,
                (self.m, self.n, self.k, self.num_groups),
                hopper.constants(
                    config,
                    (2, 2 * has_scale_b),
                    num_programs,
                    self.a.dtype != torch.int8,
                    1 if by_rows else 2,
                ),
                config.num_warps,
                described=hopper.describe(config),
            )
        constants = {"HAS_SCALE_B": has_scale_b, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k}
        strides = self.a.stride(0), self.b.stride(0)
        rest = (constants, config.num_warps, config.num_stages)
        if by_rows:
            numbers = (self.num_groups, self.n, self.k, *strides)
            return Launch(grouped_mm_kernel, (tiles_m * tiles_n,), 6, numbers, *rest)
        return Launch(
            grouped_outer_kernel, (tiles_m * tiles_n, self.num_groups), 6, (self.m, self.n, *strides), *rest
        )


def quantize_grouped_columns(
    x_SK: Tensor, fmt: str, ends_E: Tensor, multiplier_S1: Tensor | None, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """`kernels.quantize_grouped_columns`, (S', K) in runs. Reads x twice: for amaxes, then for values."""
    (num_rows, k), num_groups, device = x_SK.shape, len(ends_E), x_SK.device
    q_KS = torch.empty(k, run_rows(num_rows, num_groups), dtype=torch.int8, device=device)
    scale_EK = torch.empty(num_groups, k, dtype=torch.float32, device=device)
    where = places(ends_E, num_rows)
    tensors = (x_SK, vector(multiplier_S1, x_SK), q_KS, scale_EK, ends_E, where)
    folded = multiplier_S1 is not None
    key = ("grouped columns", x_SK.get_device(), *x_SK.shape, num_groups, *x_SK.stride(), x_SK.dtype)
    key = (*key, tensors[1].dtype, folded, fmt, power_of_two)

    def by(config: TileConfig) -> Launch:
        return Launch(
            grouped_columns_kernel,
            (triton.cdiv(k, config.block_k), num_groups),
            len(tensors),
            (k, *x_SK.stride(), q_KS.stride(0)),
            launch.format_constants(fmt, device, power_of_two)
            | {"MULTIPLY": folded, "BLOCK_M": config.block_m, "BLOCK_K": config.block_k},
            config.num_warps,
        )

    if k and num_rows and not again.again(key, tensors):
        name = f"grouped columns {x_SK.dtype} {fmt} multiplied={folded} column_major={x_SK.stride(1) != 1}"
        name += f" E={num_groups} S~{launch.bucket(num_rows)} K={k}"
        config = launch.tuned(name, TILE_CONFIGS, lambda each: by(each).run(tensors), device)
        again.first(key, [by(config)], tensors)
    return q_KS.t().view(FORMATS[fmt].dtype), scale_EK if num_rows else scale_EK.zero_()
