"""The groups of linear layers of real models, and their timing: what is built and verified, and that the time
is bounded. The times themselves are noise here.
"""

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch

from lptune import distributed, linear, models
from lptune.base.errors import UserError
from lptune.config import DataConfig, FinetuneConfig, ModelConfig, ParallelConfig, PrecisionConfig
from lptune.tools.advise import measure

TINY = models.config_from_dict(models.PRESETS["llama3_2"]["tiny"], "test")
CFG = FinetuneConfig(
    model=ModelConfig(path="none"),
    data=DataConfig(source="builtin", seq_len=32),
    micro_batch_size=4,
    global_batch_size=8,
    compile="none",
    device="cpu",
)


@pytest.fixture
def world() -> Iterator[distributed.World]:
    with distributed.session("cpu", ParallelConfig()) as found:
        yield found


def test_every_native_kind_is_timed_on_every_group_and_did_run_in_8_bits(
    world: distributed.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified: list[int] = []
    low_precision = linear.LowPrecision

    class Counting(low_precision):  # type: ignore[misc, valid-type]
        def undo(self, skipped: torch.Tensor) -> None:
            verified.append(self.verified.num_gemms)
            super().undo(skipped)

    monkeypatch.setattr(linear, "LowPrecision", Counting)
    kinds = [kind for kind in linear.native_kinds(world.device) if kind != "none"]
    found = measure.measure(CFG, TINY, kinds, seconds=60.0, world=world)
    assert set(found.pairs) == set(itertools.product(found.groups, kinds))
    assert {each.label for each in found.groups} == {"q,k,v", "o", "gate,up", "down"}
    assert len(found.update_blocks) == 4, "one block of two was built"
    assert (found.tokens, found.timed_tokens) == (128, 128)
    assert min(found.blocks_s, found.update_s, *(t for pair in found.pairs.values() for t in pair.low)) > 0
    # Of each group: three GEMMs a layer in INT8, two (of 8-bit weights) where W alone is in 8 bits.
    assert {3, 6, 9, 2, 4} <= set(verified)


def test_after_the_time_nothing_new_begins_but_the_largest_group_is_timed(world: distributed.World) -> None:
    kinds = ["int8_rowcol", "int8_tensorwise"]
    found = measure.measure(CFG, TINY, kinds, seconds=1e-9, world=world)
    assert set(found.pairs) == {(found.groups[0], kind) for kind in kinds}
    assert found.groups[0].label == "gate,up"


def test_a_model_that_does_not_fit_is_refused_in_one_line(
    world: distributed.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_free_bytes", lambda _: 1000)
    with pytest.raises(UserError, match=r"^advise: one block and the head .* 1.0 kB are free here; name"):
        measure.measure(CFG, TINY, ["int8_rowcol"], seconds=60.0, world=world)


def test_options_that_a_kind_does_not_have_are_left_out() -> None:
    given = PrecisionConfig(kind="int8_rowcol", grad_weight="folded", skip=("lm_head", "o_proj"))
    assert measure.precision_of(given, "int8_rowcol").grad_weight == "folded"
    other = measure.precision_of(given, "int8_tensorwise")
    assert other == PrecisionConfig(kind="int8_tensorwise", skip=("lm_head", "o_proj"))
    more = dataclasses.replace(given, shadow_every=20, verify=False, all_gather="high")
    other = measure.precision_of(more, "int8_tensorwise")  # refuses `folded` alone
    assert (other.shadow_every, other.verify, other.all_gather) == (20, False, "high")
    assert other.grad_weight == "low"
    small = dataclasses.replace(given, skip_small=True)
    assert not measure.precision_of(small, "int8_rowcol").skip_small


@pytest.mark.parametrize(
    ("flops", "rows", "seq_len"), [(1e15, 4, 32), (1e9, 2, 32), (5e8, 1, 32), (1.0, 1, 8)]
)
def test_fewer_tokens_are_timed_where_the_device_is_slow(
    flops: float, rows: int, seq_len: int, world: distributed.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest micro-batch that takes at most half of the time, in none and two kinds."""
    monkeypatch.setattr(measure, "_flops", lambda *_: flops)
    monkeypatch.setattr(measure, "_LEAST_TOKENS", 8)
    assert measure._timed_rows(CFG, TINY, 2, 1.0, world.device) == (rows, seq_len)


def groups(preset: str, **options: object) -> list[measure.Group]:
    family, _, size = preset.partition("/")
    model = models.build_on_meta(models.config_from_dict(models.PRESETS[family][size], preset))
    precision = PrecisionConfig(kind="int8_rowcol", **options)  # type: ignore[arg-type]
    return measure.groups_of(model, linear.convert(model, precision, device=torch.device("cpu")))


def test_layers_that_read_one_input_are_one_group_the_largest_first() -> None:
    found = groups("llama3_2/1b")
    assert [(each.label, each.shapes[0].in_features, each.out_text, each.count) for each in found] == [
        ("gate,up", 2048, "2x8192", 16),
        ("down", 8192, "2048", 16),
        ("q,k,v", 2048, "2048+2x512", 16),
        ("o", 2048, "2048", 16),
    ]
    assert found[2].num_weights == 2048 * (2048 + 2 * 512)
    assert found[3].modules[0] == "model.layers.0.self_attn"


def test_fused_projections_are_groups_of_one_layer() -> None:
    assert {each.label for each in groups("phi4/mini")} == {"gate_up", "down", "qkv", "o"}


def test_layers_that_stay_in_high_precision_are_in_no_group() -> None:
    found = groups("llama3_2/1b", skip=("lm_head", "k_proj", "layers.0.*"))
    assert {each.label: each.count for each in found} == {"gate,up": 15, "down": 15, "q,v": 15, "o": 15}
