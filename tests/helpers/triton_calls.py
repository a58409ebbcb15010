"""Calls of the Triton kernels that differ in what a kernel is compiled for: dtypes, strides, sizes, formats.

With a stand-in for the driver (stand_in_gpu.py) they compile and launch for any GPU, and nothing runs.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lptune.kernels.triton import (
    again,
    block_mm,
    blocks,
    by_amax,
    by_row,
    gemm,
    grouped,
    launch,
    quantize,
    rotate,
    stochastic,
)
from tests.helpers import stand_in_gpu as driver


@contextmanager
def stand_in_gpu(folder: Path, arch: int = 90) -> Iterator[list[Any]]:
    """All launches, as the driver gets them; nothing is remembered of others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LPTUNE_AUTOTUNE", "0")
        again.forget()
        with driver.stand_in_gpu(folder, arch) as found:
            yield found
    again.forget()
    launch._fitting.clear()


def matrix(m: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(m, k, dtype=dtype)


def int8(m: int, k: int) -> Tensor:
    return matrix(m, k, torch.int8)


def calls() -> dict[str, tuple[Callable[..., object], list[Tensor]]]:
    """Each function with inputs, and again with everything that its kernel depends on changed."""
    x, w32, mk, mm = (
        matrix(64, 256),
        matrix(64, 256, torch.float32),
        matrix(1, 256).float(),
        torch.ones(64, 1),
    )
    a, b, sa, sb = int8(64, 256), int8(128, 256), torch.ones(64, 1), torch.ones(1, 128)
    f8 = (x.to(torch.float8_e4m3fn), matrix(128, 256).to(torch.float8_e4m3fn))
    one = torch.ones(1, 1)
    both = quantize.quantize_rows_and_columns

    def mm8(
        a: Tensor,
        b: Tensor,
        sa: Tensor | None = None,
        sb: Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Tensor:
        return gemm.scaled_mm(a, b.t(), sa, sb, dtype)

    def mm_blocks(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor) -> Tensor:
        return block_mm.block_scaled_mm(a, b.t(), sa, sb, 128, torch.bfloat16)

    def mm_mx(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor) -> Tensor:
        return block_mm.block_scaled_mm(a, b.t(), sa, sb, 32, torch.bfloat16)

    def e8m0(m: int, k: int) -> Tensor:
        return torch.ones(m, k).to(torch.float8_e8m0fnu)

    return {
        "scaled_mm": (mm8, [a, b, sa, sb]),
        "scaled_mm, no scales": (mm8, [a, b]),
        "scaled_mm, one scale": (mm8, [a, b, one, sb]),
        "scaled_mm, other sizes": (mm8, [a[:32], b, sa[:32], sb]),
        "scaled_mm, other strides": (mm8, [int8(64, 512)[:, :256], b, sa, sb]),
        "scaled_mm, pointers": (mm8, [int8(64, 260)[:, :256], b, sa, sb]),
        "scaled_mm, float32": (functools.partial(mm8, dtype=torch.float32), [a, b, sa, sb]),
        "scaled_mm, float8": (mm8, [*f8, sa, sb]),
        "rows": (lambda x: by_row.quantize_rows(x, None, "int8", False, False), [x]),
        "rows, multiplied": (lambda x, m: by_row.quantize_rows(x, m, "int8", False, False), [x, mk]),
        "rows, float8": (lambda x: by_row.quantize_rows(x, None, "e4m3", True, False), [x]),
        "rows, a master": (
            lambda x: by_row.quantize_rows(x, None, "int8", False, False, torch.bfloat16),
            [w32],
        ),
        "rows, long": (lambda x: by_row.quantize_rows(x, None, "e4m3", False, False), [matrix(4, 16384)]),
        "rows, too long to be held": (
            lambda x, m: by_row.quantize_rows(x, m, "int8", False, False),
            [matrix(4, 32768), matrix(1, 32768).float()],
        ),
        "rows, rotated": (lambda x: by_row.quantize_rows(x, None, "int8", False, False, rotated=True), [x]),
        "rows, rotated, long": (
            lambda x: by_row.quantize_rows(x, None, "int8", False, False, torch.bfloat16, rotated=True),
            [matrix(4, 16384, torch.float32)],
        ),
        "rotate": (lambda x: rotate(x, None, torch.float32), [matrix(64, 300)]),
        "columns": (lambda x: quantize.quantize_columns(x, None, "int8", False, True), [x]),
        "columns, multiplied": (lambda x, m: quantize.quantize_columns(x, m, "int8", False, True), [x, mm]),
        "columns, other strides": (
            lambda x: quantize.quantize_columns(x, None, "int8", False, True),
            [matrix(64, 512)[:, :256]],
        ),
        "row blocks, MX": (lambda x: blocks.quantize_blocks(x, (1, 32), "e4m3", True, False), [x]),
        "row blocks, e5m2": (lambda x: blocks.quantize_blocks(x, (1, 128), "e5m2", False, False), [x]),
        "both": (lambda x: both(x, None, "int8", False, True), [x]),
        "both, not transposed": (lambda x: both(x, None, "int8", False, False), [x]),
        "tensor both ways": (lambda x: quantize.quantize_tensor_both_ways(x, "e5m2", False), [x]),
        "row blocks": (lambda x: blocks.quantize_blocks(x, (1, 128), "e4m3", False, False), [x]),
        "column blocks": (lambda x: blocks.quantize_blocks(x, (128, 1), "e4m3", False, True), [x]),
        "row and column blocks": (
            lambda x: blocks.quantize_row_and_column_blocks(x, 128, "e4m3", False, True),
            [x],
        ),
        "block_scaled_mm": (mm_blocks, [*f8, torch.ones(64, 2), torch.ones(2, 1)]),
        "block_scaled_mm, other strides": (mm_blocks, [*f8, torch.ones(2, 64).t(), torch.ones(2, 1)]),
        "block_scaled_mm, vectors": (mm_blocks, [*f8, torch.ones(64, 2), torch.ones(2, 128)]),
        "block_scaled_mm, MX": (mm_mx, [*f8, e8m0(64, 8), e8m0(8, 128)]),
        "row and column blocks, MX": (
            lambda x: blocks.quantize_row_and_column_blocks(x, 32, "e4m3", True, True),
            [x],
        ),
        **_calls_by_amax(x, w32),
        **_calls_stochastic(x, w32, mk, mm),
    }


def grouped_calls() -> dict[str, tuple[Callable[..., object], list[Tensor]]]:
    """The functions of grouped layers."""
    where, sa, sb = torch.zeros(4, dtype=torch.int32), torch.ones(64, 1), torch.ones(512, 1)
    a, b = int8(64, 256), int8(512, 256)
    f8 = [each.to(torch.float8_e4m3fn) for each in (a, b)]
    x_runs, g_runs = int8(256, 512).t(), int8(128, 512).t()
    f8_runs = [each.to(torch.float8_e4m3fn) for each in (g_runs, x_runs)]
    of_a, of_b = torch.ones(4, 128), torch.ones(4, 256)

    def mm(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, where: Tensor) -> Tensor:
        return grouped.grouped_mm(a, b, sa, sb, where, torch.bfloat16)

    def outer(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, where: Tensor) -> Tensor:
        return grouped.grouped_outer(a, b, sa, sb, where, torch.bfloat16)

    return {
        "grouped_mm": (mm, [a, b, sa, sb, where]),
        "grouped_mm, float8": (mm, [f8[0], f8[1], sa, sb, where]),
        "grouped_outer": (outer, [g_runs, x_runs, of_a, of_b, where]),
        "grouped_outer, float8": (outer, [*f8_runs, of_a, of_b, where]),
        "grouped columns": (
            lambda x, m, where: grouped.quantize_grouped_columns(x, "int8", where, m, False),
            [matrix(64, 256), sa, where],
        ),
        "grouped rows": (
            lambda x, m, where: by_row.quantize_rows(x, m, "int8", False, False, ends_E=where),
            [matrix(64, 256), of_b, where],
        ),
        "transposed": (lambda w: grouped.transposed(w, 4), [b]),
    }


def _calls_by_amax(x: Tensor, w32: Tensor) -> dict[str, tuple[Callable[..., object], list[Tensor]]]:
    one, four, eight, three = torch.ones(1, 1), torch.ones(1, 4), torch.ones(2, 4), torch.ones(3)

    def known(fmt: str = "e4m3", power_of_two: bool = False, block: int | None = None, *more: Any) -> Any:
        first_row, rounded_to = more or (0, None)
        return lambda x, amax: by_amax.quantize_by_amax(
            x, amax, fmt, power_of_two, block, first_row, rounded_to
        )

    def delayed(fmt: str = "e4m3", replace: bool = False, columns: bool = False, twice: bool = False) -> Any:
        options = (fmt, replace, columns, twice)
        return lambda x, past, current=None: by_amax.quantize_delayed(x, past, current, *options)

    return {
        "by amax": (known(), [x, one]),
        "by amax, e5m2": (known("e5m2"), [x, one]),
        "by amax, power of two": (known("e4m3", True), [x, one]),
        "by amax, a master": (known("e4m3", False, None, 0, torch.bfloat16), [w32, one]),
        "by amax, not rounded": (known(), [w32, one]),
        "by amax, column by column": (known(), [matrix(256, 64).t(), one]),
        "by amax, blocks": (known("e4m3", False, 64), [x, four]),
        "by amax, other blocks": (known("e4m3", False, 128), [x, torch.ones(2, 2)]),
        "by amax, more blocks": (known("e4m3", False, 64), [x, eight]),
        "by amax, lower rows": (known("e4m3", False, 64, 64, None), [x, eight]),
        "delayed": (delayed(), [x, three[0], torch.ones(())]),
        "delayed, not aligned": (delayed(), [x, three[1], torch.ones(3)[1]]),
        "delayed, of no layer": (delayed(), [x, three[0]]),
        "delayed, int8": (delayed("int8"), [x, three[0], torch.ones(())]),
        "delayed, replaced": (delayed(replace=True), [x, three[0], torch.ones(())]),
        "delayed, transposed": (delayed(columns=True), [x, three[0], torch.ones(())]),
        "delayed both ways": (delayed(twice=True), [x, three[0], torch.ones(())]),
        "block amaxes": (lambda x: by_amax.block_amaxes(x, 64, 0), [x]),
        "block amaxes, smaller": (lambda x: by_amax.block_amaxes(x, 32, 0), [x]),
        "block amaxes, above": (lambda x: by_amax.block_amaxes(x, 64, 16), [x]),
        "block amaxes, a master": (lambda x: by_amax.block_amaxes(x, 64, 0), [w32]),
    }


def _calls_stochastic(
    x: Tensor, w32: Tensor, mk: Tensor, mm: Tensor
) -> dict[str, tuple[Callable[..., object], list[Tensor]]]:
    before = [int8(64, 256), torch.ones(64, 1)]

    def rows(fmt: str = "int8", power_of_two: bool = False, at: tuple[int, int] = (5, 7)) -> Any:
        def call(x: Tensor, mk: Tensor | None = None, *more: Tensor) -> object:
            kept = ((more[0], more[1]), more[2]) if more else ()
            return stochastic.quantize_rows_stochastic(x, mk, fmt, power_of_two, *at, *kept)

        return call

    def tiles(
        dim: int, transposed: bool = False, twice: bool = False, fmt: str = "int8", power_of_two: bool = False
    ) -> Any:
        return lambda x, multiplier=None: stochastic.quantize_stochastic(
            x, multiplier, fmt, power_of_two, dim, 2**40, 2**33, transposed, twice
        )

    return {
        "to bfloat16": (lambda x: stochastic.round_to_bfloat16(x, 2**40, 2**33), [w32]),
        "stochastic rows": (rows(), [x]),
        "stochastic rows, e4m3": (rows("e4m3"), [x]),
        "stochastic rows, power of two": (rows("e4m3", True), [x]),
        "stochastic rows, multiplied": (rows(), [x, mk]),
        "stochastic rows, a master": (rows(), [w32]),
        "stochastic rows, a master, multiplied": (rows(), [w32, mk]),
        "stochastic rows, other strides": (rows(), [matrix(64, 512)[:, :256]]),
        "stochastic rows, int64": (rows(at=(2**40, 7)), [x]),
        "stochastic rows, uint64": (rows(at=(2**63, 7)), [x]),
        "stochastic rows, far": (rows(at=(5, 2**33)), [x]),
        "stochastic rows, may be dropped": (
            lambda x, *more: rows()(x, None, *more),
            [w32, *before, torch.ones(())],
        ),
        "stochastic columns": (tiles(0), [x]),
        "stochastic columns, transposed": (tiles(0, True), [x]),
        "stochastic columns, multiplied": (tiles(0), [x, mm]),
        "stochastic columns, a master": (tiles(0), [w32]),
        "stochastic columns, a master, multiplied": (tiles(0), [w32, mm]),
        "stochastic columns, e4m3": (tiles(0, fmt="e4m3"), [x]),
        "stochastic columns, power of two": (tiles(0, fmt="e4m3", power_of_two=True), [x]),
        "stochastic columns, other strides": (tiles(0), [matrix(64, 512)[:, :256]]),
        "stochastic rows, transposed": (tiles(1, True), [x]),
        "stochastic tensor": (tiles(2), [x]),
        "stochastic tensor both ways": (tiles(2, False, True), [x]),
    }
