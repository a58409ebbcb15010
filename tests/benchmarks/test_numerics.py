"""The script behind the tables of docs/numerics.md, on a small layer."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from lptune.config import PRECISION_KINDS


@pytest.fixture(scope="module")
def script(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("numerics")


def test_every_kind_holds_under_every_kind_of_checkpointing(script: ModuleType) -> None:
    eager = [mode for mode in script.MODES if mode[0] == "none"]
    rows = list(script.modes_table((64, 96, 80), modes=eager))[1:]
    # One row for each kind: checkpointing changes no error.
    assert [row[0] for row in rows] == ["bf16", *(kind for kind in PRECISION_KINDS if kind != "none")]
    assert {row[-1] for row in rows} == {"yes"}


def test_the_blocks_own_arithmetic_rounds_nothing(script: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((32, 48), (64, 48), (32, 64))
    x, w, g = (torch.randn(*shape, generator=generator).bfloat16() for shape in shapes)
    results, _, _ = script.run(script.Operands(x, w, g), script.precision("none"))
    assert torch.equal(results["output"], x @ w.t())
    assert torch.equal(results["grad_input"], g @ w)
    assert torch.equal(results["grad_weight"], g.t() @ x)
