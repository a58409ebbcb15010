"""What each kind costs before the first step: published figures, and those of a model here."""

import math
import re
from pathlib import Path

import pytest
import torch

from lptune import models
from lptune.config import PRECISION_KINDS, PrecisionConfig
from lptune.tools.advise.quality import PUBLISHED, differences, errors_by_layer
from tests.helpers.outliers import fill, known_batch

PAGE = Path(__file__).parents[3] / "docs/benchmarks.md"
TINY = models.config_from_dict(models.PRESETS["llama3_2"]["tiny"], "test")
KINDS = {kind: PrecisionConfig(kind=kind) for kind in ("int8_rowcol", "int8_rotated", "int8_weight_only")}


def test_each_published_figure_is_the_one_in_the_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .*?([+-][\d.]+ ± [\d.]+ %) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    found = {kind: str(each) for kind, each in PUBLISHED.differences.items()}
    assert found.pop("int4_weight") == "unknown"  # without training for it
    assert found.pop("bitnet") == "unknown"
    assert found.pop("nvfp4") == "unknown"
    assert found == dict(rows)
    assert {*PUBLISHED.differences, "none"} == set(PRECISION_KINDS)


@pytest.fixture(scope="module")
def model() -> models.Decoder:
    """With an outlier channel."""
    found = models.build_on_meta(TINY)
    found.to_empty(device="cpu")
    found.reset_buffers("cpu")
    fill(found, 300.0)
    return found.requires_grad_(False)


def test_the_differences_are_paired_and_the_weights_stay(model: models.Decoder) -> None:
    before = {name: each.clone() for name, each in model.named_parameters()}
    batches = [known_batch(TINY, rows=2, seq_len=64, seed=seed) for seed in range(3)]
    found, loss, num_targets = differences(model, KINDS, batches)
    assert all(torch.equal(each, before[name]) for name, each in model.named_parameters())
    assert num_targets == 3 * 128
    assert found["int8_rowcol"].difference > found["int8_rotated"].difference > 0.02
    # Each micro-batch by itself: its difference in nats, from which mean and standard error follow.
    alone = [differences(model, KINDS, [batch]) for batch in batches]
    assert loss == pytest.approx(sum(each[1] for each in alone) / 3)
    for kind, (difference, error) in found.items():
        nats = torch.tensor([each[0][kind].difference * each[1] for each in alone], dtype=torch.float64)
        assert difference == pytest.approx(nats.mean().item() / loss)
        assert error == pytest.approx(nats.std().item() / math.sqrt(3) / loss)  # equal numbers of targets
        assert math.isnan(alone[0][0][kind].standard_error)


def test_eight_micro_batches_run_however_little_time_there_is(model: models.Decoder) -> None:
    batches = (known_batch(TINY, rows=1, seq_len=16, seed=seed) for seed in range(12))
    found, _, num_targets = differences(
        model, {"int8_rowcol": PrecisionConfig(kind="int8_rowcol")}, batches, seconds=0
    )
    assert num_targets == 8 * 16
    assert not math.isnan(found["int8_rowcol"].standard_error)


def test_the_layers_with_the_outlier_are_found(model: models.Decoder) -> None:
    errors = errors_by_layer(model, PrecisionConfig(kind="int8_rowcol"), known_batch(TINY, 2, 64))
    assert len(errors) == 14
    worst = sorted(errors, key=lambda name: errors[name].worst_sqnr_db)[:2]
    assert {name.rpartition(".")[2] for name in worst} == {"down_proj"}
    assert not any(each.requires_grad for each in model.parameters())


def test_without_a_target_there_is_no_difference_and_no_error(model: models.Decoder) -> None:
    batch = known_batch(TINY, rows=1, seq_len=16)
    batch.labels_BS.fill_(-100)
    kinds = {"int8_rowcol": PrecisionConfig(kind="int8_rowcol")}
    found, _, num_targets = differences(model, kinds, [batch._replace(num_targets=0)] * 2)
    assert num_targets == found["int8_rowcol"].difference == 0
