"""Moving averages of the weights, against float64 sums over the checkpoints of every step."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lptune.base.errors import UserError
from lptune.checkpoint import read_trained
from lptune.config import FinetuneConfig, load_config
from tests.faults.state import digests, stored_tensors
from tests.helpers import warm
from tests.helpers.tiny_recipe import write_config
from tests.recipes.conftest import Run, runner

NUM_STEPS = 6
DECAY = 0.5
# Float32 checkpoints of every step, and an export without a rounding of its own.
KEYS = (f"num_steps={NUM_STEPS}", "optimizer.lr=1e-2", "eval_every_steps=0", "export.dtype=float32")
EVERY_STEP = ("checkpoint.every_steps=1", f"checkpoint.keep_last={NUM_STEPS}")
EMA = f"optimizer.ema_decay={DECAY}"


def checkpoint_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08}"


def weights_of(run: Path, step: int) -> dict[str, Tensor]:
    stored = stored_tensors(checkpoint_of(run, step))
    return {name: tensor.double() for name, tensor in stored.items() if "/" not in name}


def averages_of(run: Path, initial: dict[str, Tensor], first: int = 1) -> dict[str, Tensor]:
    """By the definition, in float64, of updates `first` to NUM_STEPS."""
    averages = dict(initial)
    for update in range(first, NUM_STEPS + 1):
        count = update - first + 1
        decay = min(DECAY, (1 + count) / (10 + count))
        weights = weights_of(run, update)
        averages = {name: decay * averages[name] + (1 - decay) * weights[name] for name in averages}
    return averages


def assert_averages(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Each update rounds a product and a sum of float32."""
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        bound = 2 * NUM_STEPS * 2**-24 * expected[name].abs().amax()
        assert (tensor.double() - expected[name]).abs().amax() <= bound, name


def in_checkpoint(run: Path, step: int = NUM_STEPS) -> dict[str, Tensor]:
    stored = stored_tensors(checkpoint_of(run, step))
    return {name.removeprefix("ema/"): t for name, t in stored.items() if name.startswith("ema/")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Path:
    """The folder of a finished run in INT8 with averages."""
    folder = tmp_path_factory.mktemp("ema")
    config = write_config(folder / "tiny.yaml", tiny_checkpoint, folder / "run")
    done = runner("full_finetune", config)("precision.kind=int8_rowcol", *KEYS, EMA, *EVERY_STEP)
    assert "compared with the moving averages in" in done.stdout
    return folder / "run"


def test_the_export_has_the_averages_of_all_updates_and_the_initial_weights(
    whole: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    initial = {name: t.double() for name, t in load_file(tiny_checkpoint / "model.safetensors").items()}
    expected = averages_of(whole, initial)
    assert_averages(in_checkpoint(whole), expected)
    exported = load_file(whole / "export" / "model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in in_checkpoint(whole).items())
    card = (whole / "export" / "README.md").read_text(encoding="utf-8")
    assert "| weights | moving averages of the weights" in card
    last = weights_of(whole, NUM_STEPS)
    assert not all(torch.allclose(expected[name], last[name], rtol=1e-3) for name in last)

    said: list[str] = []
    read_trained(str(whole), said.append)
    assert any("step-00000006: uses the weights of this step" in line for line in said)

    command = ["export", str(checkpoint_of(whole, NUM_STEPS)), str(tmp_path / "last"), "--no-ema"]
    assert warm.lptune(command, folder=tmp_path).returncode == 0
    exported = load_file(tmp_path / "last" / "model.safetensors")
    assert all(torch.equal(exported[name].double(), tensor) for name, tensor in last.items())


def test_a_resumed_run_has_the_same_averages_to_the_bit(whole: Path, run_recipe: Run, tmp_path: Path) -> None:
    resume = f"resume={checkpoint_of(whole, 3)}"
    run_recipe("precision.kind=int8_rowcol", *KEYS, EMA, resume)
    ours, theirs = (stored_tensors(checkpoint_of(run, NUM_STEPS)) for run in (tmp_path / "run", whole))
    assert digests(ours) == digests(theirs)


def test_averages_that_a_resumed_run_turns_on_begin_with_its_weights_on_two_ranks(
    run_recipe: Run, tmp_path: Path
) -> None:
    run, first = tmp_path / "run", tmp_path / "first"
    run_recipe(*KEYS, f"output_dir={first}", *EVERY_STEP)
    assert not in_checkpoint(first)
    done = run_recipe(*KEYS, EMA, f"resume={checkpoint_of(first, 3)}", *EVERY_STEP, ranks=2)
    assert f"note: step 3 was trained with optimizer.ema_decay 0.0 (now {DECAY})" in done.stdout
    assert_averages(in_checkpoint(run), averages_of(run, weights_of(first, 3), first=4))
    done = run_recipe(*KEYS, f"output_dir={tmp_path / 'off'}", f"resume={checkpoint_of(run, 5)}", code=2)
    assert "holds 'ema/" in done.stderr
    command = ["export", str(checkpoint_of(first, NUM_STEPS)), str(tmp_path / "export"), "--ema"]
    done = warm.lptune(command, folder=tmp_path)
    assert done.returncode == 2
    assert "has no moving averages of the weights (optimizer.ema_decay)" in done.stderr


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["optimizer.ema_decay=1"], "optimizer.ema_decay: must be at least 0 and below 1, found 1"),
        ([EMA, "precision.kind=int8_weight_only"], "int8_weight_only keeps no float32 weights to average"),
        (
            [EMA, "export.average_checkpoints=2", "checkpoint.every_steps=2"],
            "are two averages of the weights, and an export has one",
        ),
    ],
)
def test_averages_that_cannot_be_are_refused(tiny_config: Path, keys: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(FinetuneConfig, tiny_config, keys)
