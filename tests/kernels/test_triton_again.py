"""A remembered launch is the one that Triton would make: a stand-in for the driver gets the same arguments.

The kernels are compiled for Hopper and do not run. With a GPU, test_triton_*.py compare what they compute.
"""

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lptune.kernels.triton import again, block_mm, blocks, by_amax, by_row, gemm, launch, quantize, stochastic

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1",
    reason="a stand-in takes the place of the driver",
)
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
Call = Callable[[], object]


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """All launches, as the driver gets them."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("LPTUNE_AUTOTUNE", "0")
    stand_in = importlib.import_module("stand_in_gpu")
    again.forget()
    with stand_in.stand_in_gpu(tmp_path) as found:
        yield found
    again.forget()
    launch._fitting.clear()
    del sys.modules["stand_in_gpu"]


def _matrix(m: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(m, k, dtype=dtype)


def _int8(m: int, k: int) -> Tensor:
    return _matrix(m, k, torch.int8)


def _compared(launches: list[Any], inputs: list[Tensor]) -> list[Any]:
    """Launches with names for addresses: those of inputs by their index, new ones in their order."""
    names: dict[int, str] = {each.data_ptr(): f"input {index}" for index, each in enumerate(inputs)}

    def named(argument: Any) -> Any:
        if isinstance(argument, tuple):
            return tuple(named(each) for each in argument)
        if type(argument).__name__ != "Address":
            return argument
        return names.setdefault(int(argument), f"result {len(names) - len(inputs)}")

    return [each._replace(arguments=tuple(named(one) for one in each.arguments)) for each in launches]


def _calls() -> dict[str, tuple[Callable[..., object], list[Tensor]]]:
    """Each function with inputs, and again with everything that its kernel depends on changed."""
    x, w32, mk, mm = (
        _matrix(64, 256),
        _matrix(64, 256, torch.float32),
        _matrix(1, 256).float(),
        torch.ones(64, 1),
    )
    a, b, sa, sb = _int8(64, 256), _int8(128, 256), torch.ones(64, 1), torch.ones(1, 128)
    f8 = (x.to(torch.float8_e4m3fn), _matrix(128, 256).to(torch.float8_e4m3fn))
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

    return {
        "scaled_mm": (mm8, [a, b, sa, sb]),
        "scaled_mm, no scales": (mm8, [a, b]),
        "scaled_mm, one scale": (mm8, [a, b, one, sb]),
        "scaled_mm, other sizes": (mm8, [a[:32], b, sa[:32], sb]),
        "scaled_mm, other strides": (mm8, [_int8(64, 512)[:, :256], b, sa, sb]),
        "scaled_mm, pointers": (mm8, [_int8(64, 260)[:, :256], b, sa, sb]),
        "scaled_mm, float32": (functools.partial(mm8, dtype=torch.float32), [a, b, sa, sb]),
        "scaled_mm, float8": (mm8, [*f8, sa, sb]),
        "rows": (lambda x: by_row.quantize_rows(x, None, "int8", False, False), [x]),
        "rows, multiplied": (lambda x, m: by_row.quantize_rows(x, m, "int8", False, False), [x, mk]),
        "rows, float8": (lambda x: by_row.quantize_rows(x, None, "e4m3", True, False), [x]),
        "rows, a master": (
            lambda x: by_row.quantize_rows(x, None, "int8", False, False, torch.bfloat16),
            [w32],
        ),
        "columns": (lambda x: quantize.quantize_columns(x, None, "int8", False, True), [x]),
        "columns, multiplied": (lambda x, m: quantize.quantize_columns(x, m, "int8", False, True), [x, mm]),
        "columns, other strides": (
            lambda x: quantize.quantize_columns(x, None, "int8", False, True),
            [_matrix(64, 512)[:, :256]],
        ),
        "row blocks, power of two": (lambda x: blocks.quantize_blocks(x, (1, 128), "e4m3", True, False), [x]),
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
        **_calls_by_amax(x, w32),
        **_calls_stochastic(x, w32, mk, mm),
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
        "by amax, column by column": (known(), [_matrix(256, 64).t(), one]),
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
    before = [_int8(64, 256), torch.ones(64, 1)]

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
        "stochastic rows": (rows(), [x]),
        "stochastic rows, e4m3": (rows("e4m3"), [x]),
        "stochastic rows, power of two": (rows("e4m3", True), [x]),
        "stochastic rows, multiplied": (rows(), [x, mk]),
        "stochastic rows, a master": (rows(), [w32]),
        "stochastic rows, a master, multiplied": (rows(), [w32, mk]),
        "stochastic rows, other strides": (rows(), [_matrix(64, 512)[:, :256]]),
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
        "stochastic columns, other strides": (tiles(0), [_matrix(64, 512)[:, :256]]),
        "stochastic rows, transposed": (tiles(1, True), [x]),
        "stochastic tensor": (tiles(2), [x]),
        "stochastic tensor both ways": (tiles(2, False, True), [x]),
    }


def test_a_remembered_launch_has_the_arguments_of_the_first(launched: list[Any]) -> None:
    """All of them in one process: a key that lacks something would take another call's launch."""
    first: dict[str, list[Any]] = {}
    for name, (function, inputs) in _calls().items():
        function(*inputs)
        first[name] = _compared(launched, inputs)
        launched.clear()
    assert all(first.values())
    remembered = dict(again._remembered)
    for name, (function, inputs) in _calls().items():  # new inputs, at other addresses
        kept = function(*inputs)
        found = _compared(launched, inputs)
        # The first time, a launch more finds out whether the configuration fits.
        assert found, name
        assert found == first[name][-len(found) :], name
        assert kept is not None
        launched.clear()
    assert again._remembered.keys() == remembered.keys()
    assert len(remembered) == len(first)


def test_a_remembered_launch_takes_the_random_key_and_first_index_of_its_call(
    launched: list[Any],
) -> None:
    x = _matrix(64, 256)
    given = [(5, 7), (9, 16), (1, 0)]
    for key, first in given:
        stochastic.quantize_rows_stochastic(x, None, "int8", False, key, first)
    assert [each.arguments[7:9] for each in launched] == given
    assert len({each.kernel for each in launched}) == 1
    launched.clear()
    again.forget()
    for key, first in given:
        stochastic.quantize_stochastic(x, None, "int8", False, 0, key, first, False)
    assert [each.arguments[8:10] for each in launched if "tiles" in each.kernel][-3:] == given
    assert len(again._remembered) == 1


def test_the_second_launch_does_not_go_through_triton(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = _matrix(64, 256)
    quantize.quantize_columns(x, None, "int8", False, True)
    monkeypatch.setattr(type(quantize.amax_kernel), "run", None)
    quantize.quantize_columns(x, None, "int8", False, True)
    assert len(launched) == 6  # two phases each time, and first whether the configuration fits
    with pytest.raises(TypeError):
        quantize.quantize_columns(_matrix(32, 256), None, "int8", False, True)


def test_a_tensor_that_is_not_aligned_gets_another_kernel(launched: list[Any]) -> None:
    flat = torch.zeros(64 * 256 + 4, dtype=torch.bfloat16)
    aligned, shifted = flat[:-4].view(64, 256), flat[4:].view(64, 256)
    for x in (aligned, shifted, aligned, shifted):
        by_row.quantize_rows(x, None, "int8", False, False)
    kernels = [each.kernel for each in launched]
    assert kernels[0] == kernels[2]
    assert kernels[1] == kernels[3] != kernels[0]
    assert len(again._remembered) == 2  # both


def test_nothing_is_remembered_of_a_launch_that_a_graph_records(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:  # undone before the stand-in, which patches the same function
        patch.setattr(launch, "capturing", lambda: True)
        by_row.quantize_rows(_matrix(64, 256), None, "int8", False, False)
    assert launched
    assert not again._remembered


def test_the_number_of_remembered_launches_is_bounded(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(again, "MAX_REMEMBERED", 3)
    for m in (16, 32, 48, 64, 80):
        by_row.quantize_rows(_matrix(m, 256), None, "int8", False, False)
        assert 1 <= len(again._remembered) <= 3
    assert len(launched) == 5
