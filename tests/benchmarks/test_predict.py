"""The prediction of a step: its FLOPs, what a speed-up needs, and that the documentation has its numbers."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers.slow import slow_but

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def predict(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("predict")


def test_linear_layers_take_six_flops_for_each_weight_and_token(predict: ModuleType) -> None:
    config, tokens = predict.config_of("llama3_2/3b"), 4096
    linear = predict.parts("none", config, tokens, 4096)[0]
    # q and o 3072 x 3072, k and v 3072 x 1024, three of the MLP 3072 x 8192; 28 layers.
    weights = 28 * (2 * 3072 * 3072 + 2 * 3072 * 1024 + 3 * 3072 * 8192)
    assert linear.ms[0] == pytest.approx(1e3 * 6 * weights * tokens / predict.BF16)


def test_the_needed_rate_gives_the_speed_up(predict: ModuleType) -> None:
    config, tokens = predict.config_of("llama3_2/1b"), 8192
    high, low = (predict.parts(kind, config, tokens, 4096) for kind in ("none", "int8_rowcol"))
    bf16, flops = predict.total(high)[0], 1e-3 * high[0].ms[0] * predict.BF16
    rate = predict.needed_rate(low, bf16, 1.3, flops)
    others = predict.total(low)[0] - low[0].ms[0]
    assert bf16 / (others + 1e3 * flops / rate) == pytest.approx(1.3)
    assert predict.needed_rate(low, bf16, 100.0, flops) == float("inf")


@pytest.mark.parametrize(
    ("preset", "tokens", "device"),
    # One of each device stands for the other rows of the table.
    slow_but(
        lambda preset, tokens, device: preset != "llama3_2/3b",
        [
            ("llama3_2/1b", 16384, "h200"),
            ("llama3_2/3b", 8192, "h200"),
            ("llama3_2/3b", 16384, "h200"),
            ("llama3_2/3b", 12288, "h100"),
            ("llama3_1/8b", 8192, "h100"),
        ],
    ),
)
def test_the_documentation_has_the_predicted_numbers(
    predict: ModuleType, preset: str, tokens: int, device: str
) -> None:
    row = predict.row(preset, tokens, predict.named_device(device))
    assert row in (ROOT / "docs/gpu.md").read_text("utf-8").splitlines()
