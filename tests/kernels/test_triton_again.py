"""A remembered launch is the one that Triton would make: a stand-in for the driver gets the same arguments.

The kernels are compiled for Hopper and do not run. With a GPU, test_triton_*.py compare what they compute.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lptune.kernels.triton import again, by_row, launch, stochastic
from tests.helpers.triton_calls import calls, matrix, stand_in_gpu

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1",
    reason="a stand-in takes the place of the driver",
)


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[list[Any]]:
    with stand_in_gpu(tmp_path) as found:
        yield found


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


def test_a_remembered_launch_has_the_arguments_of_the_first(launched: list[Any]) -> None:
    """All of them in one process: a key that lacks something would take another call's launch."""
    first: dict[str, list[Any]] = {}
    for name, (function, inputs) in calls().items():
        function(*inputs)
        first[name] = _compared(launched, inputs)
        launched.clear()
    assert all(first.values())
    remembered = dict(again._remembered)
    for name, (function, inputs) in calls().items():  # new inputs, at other addresses
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
    x = matrix(64, 256)
    given = [(5, 7), (9, 16), (1, 0)]
    for key, first in given:
        stochastic.quantize_rows_stochastic(x, None, "int8", False, key, first)
    assert [each.arguments[8:10] for each in launched] == given
    assert len({each.kernel for each in launched}) == 1
    launched.clear()
    again.forget()
    for key, first in given:
        stochastic.quantize_stochastic(x, None, "int8", False, 0, key, first, False)
    assert [each.arguments[9:11] for each in launched if "store" in each.kernel][-3:] == given
    assert len(again._remembered) == 1


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
        by_row.quantize_rows(matrix(64, 256), None, "int8", False, False)
    assert launched
    assert not again._remembered
