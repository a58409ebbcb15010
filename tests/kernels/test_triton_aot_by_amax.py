"""The quantizers by known amaxes, and with stochastic rounding, compiled for GPUs that are not there: one
configuration of each on an architecture in the suite, all by `make test-kernels`.
"""

import re
from itertools import product
from typing import Any

import pytest

from lptune.kernels.triton import by_amax, by_row, quantize, stochastic
from lptune.numerics import FORMATS
from tests.helpers.ahead_of_time import check, check_bits, compile_for, suite_keeps

ARCHS = (80, 89, 90)
TILES = quantize.TILE_CONFIGS
_SIZES = {"M": "i32", "K": "i32", "stride_m": "i32", "stride_k": "1"}


def _format(arch: int, fmt: str) -> dict[str, Any]:
    return {"FORMAT": fmt, "MAX": FORMATS[fmt].max, "POWER_OF_TWO": False, "HARDWARE_FLOAT8": arch > 80}


@pytest.mark.parametrize(
    ("arch", "config", "fmt", "what"),
    suite_keeps(
        product(
            ARCHS, TILES, ("int8", "e4m3"), ("weight", "weight in blocks", "delayed", "delayed both ways")
        ),
        (80, TILES[4], "int8", "delayed both ways"),
        (89, TILES[1], "e4m3", "weight in blocks"),
        (90, TILES[1], "e4m3", "weight in blocks"),
    ),
)
def test_quantizers_by_known_amaxes_compile_without_spills(
    arch: int, config: quantize.TileConfig, fmt: str, what: str
) -> None:
    weight, twice = what.startswith("weight"), what == "delayed both ways"
    row_major = weight or twice
    arguments = _SIZES | _format(arch, fmt) | {
        "x_ptr": "*fp32" if weight else "*bf16",
        "amax_ptr": "*fp32",
        "measured_ptr": None if weight else "*i32",
        "scale_ptr": "*fp32",
        "current_ptr": None if weight else "*fp32",
        "q_ptr": "*i8",
        "second_q_ptr": "*i8" if twice else None,
        "q_stride_m": "i32" if row_major else "1",
        "q_stride_k": "1" if row_major else "i32",
        "second_q_stride_m": "1",
        "second_q_stride_k": "i32",
        "first_row": "i32",
        "block_columns": "i32",
        "num_amaxes": "i32",
        "SIDE": 128 if what == "weight in blocks" else 0,
        "DELAYED": not weight,
        "TWICE": twice,
        "ROUNDED_TO": "bfloat16" if weight else "",
        "BLOCK_M": config.block_m,
        "BLOCK_K": config.block_k,
        "SCALES": by_amax._SCALES_AT_ONCE,
    }  # fmt: skip
    compiled = compile_for(arch, by_amax.known_amax_kernel, arguments, num_warps=config.num_warps)
    check_bits(compiled)
    assert bool(re.search(r"cvt\.rn\.bf16", compiled.ptx)) == weight


@pytest.mark.parametrize("arch", ARCHS)
def test_measuring_kernels_compile_without_spills(arch: int) -> None:
    config = quantize.TILE_CONFIGS[0]
    tile = {"BLOCK_M": config.block_m, "BLOCK_K": config.block_k}
    amaxes = {"past_ptr": "*fp32", "measured_ptr": "*i32"}
    first = _SIZES | amaxes | tile | {"x_ptr": "*bf16", "TILES": quantize.TILES_PER_PROGRAM}
    last = amaxes | {"x_ptr": "*bf16", "current_ptr": "*fp32", "scale_ptr": "*fp32"}
    last |= {"HAS_CURRENT": True, "REPLACE": False, "MAX": 448.0}
    blocks_of = _SIZES | {"x_ptr": "*fp32", "amax_ptr": "*fp32", "above": "i32"}
    blocks_of |= {"SIDE": 128, "BLOCK_M": 32, "BLOCK_K": 128}
    for kernel, arguments in (
        (by_amax.amax_without_past_kernel, first),
        (by_amax.delayed_scale_kernel, last),
        (by_amax.block_amax_kernel, blocks_of),
    ):
        check(compile_for(arch, kernel, arguments, num_warps=4))


@pytest.mark.parametrize(
    ("arch", "fmt", "block_k", "held", "updates"),
    suite_keeps(
        [
            (arch, fmt, *row, updates)
            for row in ((256, True), (16384, True), (4096, False))
            for arch, fmt, updates in product(ARCHS, ("int8", "e4m3"), (False, True))
        ],
        (80, "e4m3", 16384, True, False),
        (89, "e4m3", 16384, True, True),
        (90, "e4m3", 16384, True, False),
    ),
)
def test_stochastic_row_quantizers_compile_without_spills(
    arch: int, fmt: str, block_k: int, held: bool, updates: bool
) -> None:
    """updates: a float32 weight that may keep its old values; else an input with a multiplier."""
    arguments = _format(arch, fmt) | {
        "x_ptr": "*fp32" if updates else "*bf16",
        "multiplier_ptr": "*fp32",
        "q_ptr": "*i8",
        "scale_ptr": "*fp32",
        "q_before_ptr": "*i8",
        "scale_before_ptr": "*fp32",
        "found_inf_ptr": "*fp32",
        "key": "i64",
        "first": "i64",
        "K": "i32",
        "stride_m": "i32",
        "MULTIPLY": not updates,
        "MAY_SKIP": updates,
        "BLOCK_K": block_k,
        "HELD": held,
    }
    num_warps = by_row.rows_num_warps(block_k)
    check_bits(compile_for(arch, stochastic.stochastic_rows_kernel, arguments, num_warps=num_warps))


@pytest.mark.parametrize(
    ("arch", "config", "fmt", "dim", "twice"),
    suite_keeps(
        [
            (*case, *dims)
            for case in product(ARCHS, TILES, ("int8", "e4m3"))
            for dims in ((0, False), (1, False), (2, True))
        ],
        (80, TILES[0], "e4m3", 0, False),
        (89, TILES[4], "e4m3", 0, False),
        (90, TILES[2], "e4m3", 0, False),
    ),
)
def test_stochastic_tile_quantizers_compile_without_spills(
    arch: int, config: quantize.TileConfig, fmt: str, dim: int, twice: bool
) -> None:
    arguments = _SIZES | _format(arch, fmt) | {
        "x_ptr": "*bf16",
        "multiplier_k_ptr": "*fp32",
        "multiplier_m_ptr": "*fp32",
        "row_amax_ptr": "*i32",
        "column_amax_ptr": "*i32",
        "q_ptr": "*i8",
        "second_q_ptr": "*i8",
        "scale_ptr": "*fp32",
        "key": "i64",
        "first": "i64",
        "q_stride_m": "i32" if twice else "1",
        "q_stride_k": "1" if twice else "i32",
        "second_q_stride_m": "1",
        "second_q_stride_k": "i32",
        "DIM": dim,
        "MULTIPLY": dim != 2,
        "TWICE": twice,
        "BLOCK_M": config.block_m,
        "BLOCK_K": config.block_k,
    }  # fmt: skip
    kernel = stochastic.stochastic_tiles_kernel
    check_bits(compile_for(arch, kernel, arguments, num_warps=config.num_warps))
