"""skip_small: what was measured decides, and where nothing was measured it says so."""

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lptune import linear
from lptune.base.errors import UserError
from lptune.config import PrecisionConfig
from lptune.linear.crossover import Measurements, measurements

SMALL = PrecisionConfig(kind="int8_rowcol", skip_small=True)
# Speed-up = tokens * in * out / 2**24, a straight line in logarithms: interpolation is exact.
GRID = ((64, 1024), (64, 256, 1024), (64, 1024))
PRODUCT = Measurements(
    "made up",
    *GRID,
    tuple(tuple(tuple(t * i * o / 2**24 for o in GRID[2]) for i in GRID[1]) for t in GRID[0]),
)


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(256, 512, bias=False), nn.Linear(512, 64, bias=False))


def test_between_the_points_the_logarithm_is_interpolated() -> None:
    for tokens, k, n in ((64, 64, 64), (128, 100, 999), (1000, 256, 80), (512, 512, 512)):
        assert PRODUCT.at(tokens, k, n) == pytest.approx(tokens * k * n / 2**24, rel=1e-12)


def test_outside_of_the_grid_the_edge_counts() -> None:
    assert PRODUCT.at(1, 64, 64) == PRODUCT.at(64, 64, 64)
    assert PRODUCT.at(10**6, 10**6, 10**6) == PRODUCT.at(1024, 1024, 1024)


def test_the_number_of_tokens_decides_which_layers_are_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    # The package has a function of the module's name.
    monkeypatch.setattr(
        sys.modules["lptune.linear.convert"], "measurements", lambda kind, device_type: PRODUCT
    )
    few = linear.convert(_model(), SMALL, num_tokens=192)
    assert [layer.reason for layer in few.layers] == [
        None,
        "precision.skip_small: 0.38x of bf16 at 192 tokens",
    ]
    many = linear.convert(_model(), SMALL, num_tokens=1024)
    assert len(many.converted) == 2
    with pytest.raises(UserError, match=r"would convert no layer .*0\.50x of bf16 at 8 tokens"):
        linear.convert(_model(), SMALL, num_tokens=8)


@pytest.mark.parametrize(
    ("kind", "sizes", "is_small"),
    [  # in, out: the thresholds of torchao's filter for H100
        ("float8_tensorwise", (4096, 1024), True),
        ("float8_tensorwise", (4096, 2048), False),
        ("float8_tensorwise", (8192, 1024), False),
        ("int8_rowcol", (2048, 4096), True),
        ("int8_rowcol", (4096, 4096), False),
        ("int8_rowcol", (8192, 2048), True),
        ("int8_rowcol", (1024, 8192), True),
    ],
)
def test_a_gpu_that_was_not_measured_goes_by_the_published_thresholds_and_says_so(
    monkeypatch: pytest.MonkeyPatch, kind: str, sizes: tuple[int, int], is_small: bool
) -> None:
    monkeypatch.setattr(sys.modules["lptune.linear.convert"], "choose_backend", lambda *args: "torch")
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8192, 8192), nn.Linear(*sizes))
    precision = PrecisionConfig(kind=kind, skip_small=True)
    plan = linear.convert(model, precision, device=torch.device("cuda"), num_tokens=4096)
    why = f"precision.skip_small: published H100 thresholds, {kind} was not measured on cuda"
    assert [layer.reason for layer in plan.layers] == [None, why if is_small else None]


def test_what_cannot_be_known_is_one_line() -> None:
    with pytest.raises(UserError, match=r"convert\(\) needs num_tokens"):
        linear.convert(_model(), SMALL)
    with torch.device("meta"):
        model = _model()
    with pytest.raises(UserError, match="needs the device"):
        linear.convert(model, SMALL, num_tokens=64)
    emulated = PrecisionConfig(kind="float8_rowwise", emulate=True, skip_small=True)
    with pytest.raises(UserError, match="emulated float8_rowwise has not been measured on cpu"):
        linear.convert(_model(), emulated, num_tokens=64)


def test_the_committed_measurements_are_whole() -> None:
    assert (Path(linear.__file__).parent / "crossover.json").exists()
    for kind in ("int8_rowcol", "int8_tensorwise"):
        found = measurements(kind, "cpu")
        assert found is not None
        for tokens in found.tokens:
            for k in found.in_features:
                for n in found.out_features:
                    assert 0 < found.at(tokens, k, n) < math.inf
