"""8-bit GEMM for Hopper, in Gluon: products run on while tiles are loaded, and while the last one is stored.

Hopper's tensor core takes a step of products and works on its own. Triton's `tl.dot` lets it run on only if
the sums are float32; for INT8 it waits for every step (gemm.py). Gluon, the lower level of that compiler,
says when to wait. Here a program has warps of two roles (warp specialization):

    loads       one warp asks the TMA for the tiles of a and b, up to NUM_STAGES steps ahead
    products    one or two groups of warps multiply what has come, and store the results

They meet at two barriers for each stage of the ring in shared memory: `full` when the tiles of a step have
come, `empty` when the products that read them are done. A group issues a step's products, then waits for
those of the step before, so one step is always pending. With two groups (ping-pong), each has every other
tile of the program: one multiplies while the other scales and stores its sums. `turns` keeps them in order,
because a barrier knows only whether its phase is odd or even, and a group that ran two phases ahead would
misread it.

Float8 sums lose bits in the tensor core, so they are moved to float32 after every 128 products, as in gemm.py
(PROMOTE). A group then waits for its products before it adds them. So both groups share a tile, half of the
rows each: one multiplies while the other adds.

The same kernel multiplies for groups of rows, such as experts (GROUPED). It reads from a table which rows a
tile has (grouped.py), and how many steps: they differ from tile to tile if each group contracts over its own
rows. A group of warps then counts the steps of the other's tiles as well.

Results are stored 16 bytes at a time: the tensor core leaves two neighbours of a row in a thread, so four
threads exchange theirs first. Direct stores of 4 bytes cost 4 to 25 % of the GEMM's rate.

INT8 sums are exact in int32, so the bits are those of every other backend; float8 ones are those of gemm.py
(tests/kernels/test_triton_gemm.py).

Measured on an H100 SXM of 700 W at the sizes of Llama 3.2 3B and Llama 3 8B (docs/gpu.md), in TFLOP/s:

    INT8      1,285 to 1,433    `tl.dot` in its best configuration 1,120 to 1,240, cuBLASLt 630 to 930
    float8    1,020 to 1,140    `tl.dot` 870 to 1,000, cuBLASLt 1,070 to 1,200

Most of these are limited by power. Within a training step, between other kernels, INT8 runs at 1,640. Of
128 x 128 tiles and two groups, 4 rows of tiles at a time were faster than 8 and 16. For groups of about a
thousand rows on an H200: INT8 1,000 to 1,300, float8 810 to 1,070, torch in bfloat16 500 to 690.

Gluon is experimental in Triton: a version that cannot compile this leaves these configurations out of the
tuning, and `tl.dot` remains.
"""

from functools import partial
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lptune.kernels.triton.again import Describe
from lptune.kernels.triton.gemm import tile_of

BLOCK_K = 128
INSTRUCTION_N = gl.constexpr(128)
"""Columns of one instruction's result."""


class HopperConfig(NamedTuple):
    """Launch parameters of `hopper_kernel`. The tuner keeps lists: this one is longer than a GemmConfig."""

    block_m: int
    block_n: int
    num_warps: int  # in a group that multiplies
    num_stages: int
    num_groups: int  # that multiply, in turns: 1 or 2
    group_m: int  # rows of tiles that are computed at the same time
    per_processor: int = 1  # programs on one processor, whose shared memory the ring takes


INT8_CONFIGS = (
    HopperConfig(128, 128, 4, 6, 2, 4),
    HopperConfig(128, 256, 8, 4, 1, 8),
    HopperConfig(256, 128, 8, 4, 1, 8),
)
FLOAT8_CONFIGS = (HopperConfig(128, 128, 4, 6, 2, 4), HopperConfig(128, 128, 4, 6, 2, 8))
"""Two sets of sums leave no registers for a larger tile."""


def describe(config: HopperConfig) -> tuple[Describe, Describe]:
    """What makes the TMA's descriptors of a and b."""
    shapes = [config.block_m, BLOCK_K], [config.block_n, BLOCK_K]
    a, b = (
        partial(
            TensorDescriptor.from_tensor,
            block_shape=shape,
            layout=gl.NVMMASharedLayout.get_default_for(shape, gl.int8),
        )
        for shape in shapes
    )
    return a, b


def constants(
    config: HopperConfig, kinds: tuple[int, int], num_programs: int, promote: bool, grouped: int = 0
) -> dict[str, Any]:
    """The constants of `hopper_kernel`. kinds: of the scales, as `scaled_mm_kernel` has them."""
    return {
        "GROUPED": grouped,
        "PROMOTE": promote,
        "SCALE_A": kinds[0],
        "SCALE_B": kinds[1],
        "NUM_PROGRAMS": num_programs,
        "NUM_WARPS": config.num_warps,
        "NUM_STAGES": config.num_stages,
        "NUM_GROUPS": config.num_groups,
        "GROUP_M": config.group_m,
    }


@gluon.jit
def hopper_kernel(
    a,
    b,
    out_ptr,
    scale_a_ptr,
    scale_b_ptr,
    places_ptr,
    M,
    N,
    K,
    E,
    GROUPED: gl.constexpr,
    SCALE_A: gl.constexpr,
    SCALE_B: gl.constexpr,
    PROMOTE: gl.constexpr,
    NUM_PROGRAMS: gl.constexpr,
    NUM_WARPS: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    NUM_GROUPS: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    """a: (M, K), b: (N, K), descriptors; out: (M, N) row by row. Otherwise as `scaled_mm_kernel`.

    GROUPED: 0 one GEMM; of E groups, whose places grouped.py writes: 1 a (M, K), b (E * N, K), out (M, N),
    2 a (M, K), b (N, K) in runs of a group's columns, out (E * M, N).
    PROMOTE: adds the sums of every step to others in float32; only with two groups.
    """
    # `empty` counts two groups, of which one would never arrive.
    gl.static_assert(NUM_GROUPS == 2 or not PROMOTE, "PROMOTE needs two groups")
    BLOCK_M: gl.constexpr = a.block_type.shape[0]
    BLOCK_N: gl.constexpr = b.block_type.shape[0]
    STEP_K: gl.constexpr = a.block_type.shape[1]
    a_ring = gl.allocate_shared_memory(a.dtype, [NUM_STAGES, BLOCK_M, STEP_K], a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [NUM_STAGES, BLOCK_N, STEP_K], b.layout)
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2 if PROMOTE else 1)
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    fence_async_shared()
    tiles_m, tiles_n, steps = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N), gl.cdiv(K, STEP_K)
    if GROUPED == 1:
        tiles_m = gl.load(places_ptr)
    elif GROUPED == 2:
        tiles_m *= E
    ring = (a_ring, b_ring, full, empty)
    tiles = (tiles_m, tiles_n, steps, M, N, E, places_ptr)
    results = (out_ptr, scale_a_ptr, scale_b_ptr)
    kinds: gl.constexpr = (SCALE_A, SCALE_B, PROMOTE)
    sizes: gl.constexpr = (NUM_PROGRAMS, NUM_WARPS, NUM_STAGES, NUM_GROUPS, GROUP_M, GROUPED)
    if NUM_GROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply, (ring, turns, tiles, results, kinds, sizes, 0)),
                (_load, (a, b, ring, tiles, sizes)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (ring, turns, tiles, results, kinds, sizes, 0)),
                (_multiply, (ring, turns, tiles, results, kinds, sizes, 1)),
                (_load, (a, b, ring, tiles, sizes)),
            ],
            [NUM_WARPS, 1],
            [232, 24],
        )


@gluon.jit
def _place(
    tile, tiles, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr, GROUPED: gl.constexpr
):
    """Of tile number `tile`: (its first row of a, of b, its first step, the number of its steps), (its first
    row of out, the end of its group's rows, its first column, its first scale of b).
    """
    tiles_m, tiles_n, steps, M, N, E, places_ptr = tiles
    tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
    start_n = tile_n * BLOCK_N
    row_a, row_b, first, end = tile_m * BLOCK_M, start_n, tile_m * 0, M
    row_out, scale_b = row_a, start_n
    if GROUPED == 1:
        entry = places_ptr + 1 + 2 * E + 3 * tile_m
        row_a, end = gl.load(entry + 1), gl.load(entry + 2)
        row_b = gl.load(entry) * N + start_n
        row_out, scale_b = row_a, row_b
    elif GROUPED == 2:
        tiles_of_group = gl.cdiv(M, BLOCK_M)
        group = tile_m // tiles_of_group
        row_a = tile_m % tiles_of_group * BLOCK_M
        first, steps = gl.load(places_ptr + 1 + 2 * group), gl.load(places_ptr + 2 + 2 * group)
        row_out, end, scale_b = group * M + row_a, group * M + M, group * N + start_n
    return (row_a, row_b, first, steps), (row_out, end, start_n, scale_b)


@gluon.jit
def _steps_of(tile, tiles, BLOCK_M: gl.constexpr, GROUP_M: gl.constexpr, GROUPED: gl.constexpr):
    """The number of steps of tile number `tile`, of any if there is no such tile."""
    tiles_m, tiles_n, steps, M = tiles[0], tiles[1], tiles[2], tiles[3]
    if GROUPED == 2:
        tile_m = tile_of(min(tile, tiles_m * tiles_n - 1), tiles_m, tiles_n, GROUP_M)[0]
        steps = gl.load(tiles[6] + 2 + 2 * (tile_m // gl.cdiv(M, BLOCK_M)))
    return steps


@gluon.jit
def _load(a, b, ring, tiles, SIZES: gl.constexpr):
    """Loads the tiles of a and b, step after step, each into the next stage of the ring once it is empty."""
    a_ring, b_ring, full, empty = ring
    tiles_m, tiles_n = tiles[0], tiles[1]
    NUM_PROGRAMS: gl.constexpr = SIZES[0]
    NUM_STAGES: gl.constexpr = SIZES[2]
    GROUP_M: gl.constexpr = SIZES[4]
    GROUPED: gl.constexpr = SIZES[5]
    BLOCK_M: gl.constexpr = a.block_type.shape[0]
    BLOCK_N: gl.constexpr = b.block_type.shape[0]
    STEP_K: gl.constexpr = a.block_type.shape[1]
    loads = tiles_n * 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, NUM_PROGRAMS):
        place = _place(tile, tiles, BLOCK_M, BLOCK_N, GROUP_M, GROUPED)
        row_a, row_b, first, steps = place[0]
        for step in range(first, first + steps):
            stage, lap = loads % NUM_STAGES, loads // NUM_STAGES
            mbarrier.wait(empty.index(stage), (lap & 1) ^ 1)  # passes at once in the first lap
            mbarrier.expect(full.index(stage), a.block_type.nbytes + b.block_type.nbytes)
            # Beyond the end the TMA loads zeros.
            tma.async_copy_global_to_shared(a, [row_a, step * STEP_K], full.index(stage), a_ring.index(stage))
            tma.async_copy_global_to_shared(b, [row_b, step * STEP_K], full.index(stage), b_ring.index(stage))
            loads += 1


@gluon.jit
def _multiply(ring, turns, tiles, results, KINDS: gl.constexpr, SIZES: gl.constexpr, GROUP: gl.constexpr):
    """Multiplies and stores what is this group's (0 or 1): its tiles; with PROMOTE its rows of all tiles."""
    a_ring, b_ring, full, empty = ring
    tiles_m, tiles_n, N = tiles[0], tiles[1], tiles[4]
    SCALE_A: gl.constexpr = KINDS[0]
    SCALE_B: gl.constexpr = KINDS[1]
    PROMOTE: gl.constexpr = KINDS[2]
    NUM_PROGRAMS: gl.constexpr = SIZES[0]
    NUM_WARPS: gl.constexpr = SIZES[1]
    NUM_STAGES: gl.constexpr = SIZES[2]
    NUM_GROUPS: gl.constexpr = SIZES[3]
    GROUP_M: gl.constexpr = SIZES[4]
    GROUPED: gl.constexpr = SIZES[5]
    TURNS: gl.constexpr = 1 if PROMOTE else NUM_GROUPS  # groups that have every n-th tile
    INT8: gl.constexpr = a_ring.dtype == gl.int8
    BLOCK_M: gl.constexpr = a_ring.shape[1]
    BLOCK_N: gl.constexpr = b_ring.shape[1]
    ROWS: gl.constexpr = BLOCK_M // NUM_GROUPS if PROMOTE else BLOCK_M
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[NUM_WARPS, 1], instr_shape=[16, INSTRUCTION_N, 32]
    )
    turn: gl.constexpr = 0 if PROMOTE else GROUP
    uses = _steps_of(gl.program_id(0), tiles, BLOCK_M, GROUP_M, GROUPED) * turn
    laps = tiles_n * 0  # tiles that this group has begun
    first_tile = gl.program_id(0) + turn * NUM_PROGRAMS
    for tile in range(first_tile, tiles_m * tiles_n, NUM_PROGRAMS * TURNS):
        place = _place(tile, tiles, BLOCK_M, BLOCK_N, GROUP_M, GROUPED)
        steps = place[0][3]
        row, end, start_n, of_b = place[1]
        sums = gl.zeros((ROWS, BLOCK_N), dtype=gl.int32 if INT8 else gl.float32, layout=layout)
        if PROMOTE:
            row += GROUP * ROWS
            for _ in range(steps):
                stage = uses % NUM_STAGES
                mbarrier.wait(full.index(stage), (uses // NUM_STAGES) & 1)
                a_tile, b_tile = a_ring.index(stage).slice(GROUP * ROWS, ROWS), b_ring.index(stage)
                nothing = gl.zeros((ROWS, BLOCK_N), dtype=gl.float32, layout=layout)
                part = warpgroup_mma(a_tile, b_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
                part = warpgroup_mma_wait(num_outstanding=0, deps=(part,))
                mbarrier.arrive(empty.index(stage))
                sums = sums + part
                uses += 1
        else:
            if TURNS == 2:
                mbarrier.wait(turns.index(GROUP), (laps + 1 - GROUP) & 1)  # group 0 begins
                laps += 1
            pending = warpgroup_mma_init(sums)
            for step in range(steps):
                stage = uses % NUM_STAGES
                mbarrier.wait(full.index(stage), (uses // NUM_STAGES) & 1)
                b_tile = b_ring.index(stage).permute((1, 0))
                pending = warpgroup_mma(a_ring.index(stage), b_tile, pending, is_async=True)
                pending = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(pending,)))
                # The products of the step before are done: its stage may be filled again.
                mbarrier.arrive(empty.index((uses + NUM_STAGES - 1) % NUM_STAGES), pred=step > 0)
                uses += 1
            if TURNS == 2:
                mbarrier.arrive(turns.index(1 - GROUP))
            sums = warpgroup_mma_wait(num_outstanding=0, deps=(pending,))
            mbarrier.arrive(empty.index((uses + NUM_STAGES - 1) % NUM_STAGES), pred=steps > 0)
            if TURNS == 2:  # those of the other group's tile
                uses += _steps_of(tile + NUM_PROGRAMS, tiles, BLOCK_M, GROUP_M, GROUPED)
        _store(sums, results, row, end, start_n, of_b, N, SCALE_A, SCALE_B, layout, NUM_WARPS)


@gluon.jit
def _store(
    sums,
    results,
    row,
    end,
    start_n,
    of_b,
    N,
    SCALE_A: gl.constexpr,
    SCALE_B: gl.constexpr,
    layout: gl.constexpr,
    NUM_WARPS: gl.constexpr,
):
    """Scales and stores the sums of a tile, which the threads have by `layout`. end: of its rows."""
    out_ptr, scale_a_ptr, scale_b_ptr = results
    stored: gl.constexpr = _stored_layout(sums.shape[0], sums.shape[1], NUM_WARPS)
    if out_ptr.dtype.element_ty == gl.int32:
        out = sums
    else:
        # In the order of the reference: sums * scale_a first.
        out = sums.to(gl.float32)
        if SCALE_A == 2:
            rows = row + gl.arange(0, sums.shape[0], layout=gl.SliceLayout(1, layout))
            out = out * gl.load(scale_a_ptr + rows, mask=rows < end, other=0.0)[:, None]
        elif SCALE_A == 1:
            out = out * gl.load(scale_a_ptr)
        if SCALE_B == 2:
            columns = gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, layout))
            inside = start_n + columns < N
            out = out * gl.load(scale_b_ptr + of_b + columns, mask=inside, other=0.0)[None, :]
        elif SCALE_B == 1:
            out = out * gl.load(scale_b_ptr)
        out = out.to(out_ptr.dtype.element_ty)
    out = gl.convert_layout(out, stored)
    rows = row + gl.arange(0, sums.shape[0], layout=gl.SliceLayout(1, stored))
    columns = start_n + gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, stored))
    at = out_ptr + rows.to(gl.int64)[:, None] * N + columns[None, :]
    gl.store(at, out, mask=(rows < end)[:, None] & (columns < N)[None, :])


@gluon.constexpr_function
def _stored_layout(block_m: int, block_n: int, num_warps: int) -> gl.DistributedLinearLayout:
    """Like the layout of the sums, but a thread has 8 neighbours of a row, not 2: 16 bytes of bfloat16, of
    which four threads store 64.

    A linear layout: the (row, column) that each bit of a register's, a thread's and a warp's number adds.
    """
    registers = [[0, 1], [0, 2], [0, 4], [8, 0]]
    registers += [[0, 1 << bit] for bit in range(5, block_n.bit_length() - 1)]
    warps = [[16 << bit, 0] for bit in range(num_warps.bit_length() - 1)]
    registers += [[16 * num_warps << bit, 0] for bit in range((block_m // (16 * num_warps)).bit_length() - 1)]
    threads = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, threads, warps, [], [block_m, block_n])
