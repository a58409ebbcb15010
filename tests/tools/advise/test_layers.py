"""The groups of linear layers of real models."""

import pytest
import torch

from lptune import linear, models
from lptune.config import PrecisionConfig
from lptune.tools.advise.measure import Group, Shape, groups_of, skip_patterns


def groups(preset: str, **options: object) -> list[Group]:
    family, _, size = preset.partition("/")
    model = models.build_on_meta(models.config_from_dict(models.PRESETS[family][size], preset))
    precision = PrecisionConfig(kind="int8_rowcol", **options)  # type: ignore[arg-type]
    return groups_of(model, linear.convert(model, precision, device=torch.device("cpu")))


def test_layers_that_read_one_input_are_one_group_the_largest_first() -> None:
    found = groups("llama3_2/1b")
    assert [(each.label, each.shapes[0].in_features, each.out_text, each.count) for each in found] == [
        ("gate,up", 2048, "2x8192", 16),
        ("down", 8192, "2048", 16),
        ("q,k,v", 2048, "2048+2x512", 16),
        ("o", 2048, "2048", 16),
    ]
    assert found[2].num_weights == 2048 * (2048 + 2 * 512)
    assert found[3].layer_names[0] == "model.layers.0.self_attn.o_proj"


def test_fused_projections_are_groups_of_one_layer() -> None:
    assert {each.label for each in groups("phi4/mini")} == {"gate_up", "down", "qkv", "o"}


def test_layers_that_stay_in_high_precision_are_in_no_group() -> None:
    found = groups("llama3_2/1b", skip=("lm_head", "k_proj", "layers.0.*"))
    assert {each.label: each.count for each in found} == {"gate,up": 15, "down": 15, "q,v": 15, "o": 15}


@pytest.mark.parametrize(
    ("others", "patterns"),
    [
        (("model.layers.1.mlp",), ("layers.0.self_attn.k_proj",)),
        ((), ("k_proj",)),
    ],
)
def test_patterns_match_the_slow_layers_and_no_others(
    others: tuple[str, ...], patterns: tuple[str, ...]
) -> None:
    slow = Group((Shape("k_proj", 8, 8, False),), ("model.layers.0.self_attn",))
    fast = [Group((Shape("k_proj", 8, 16, False),), others)] if others else []
    assert skip_patterns([slow], fast) == patterns
