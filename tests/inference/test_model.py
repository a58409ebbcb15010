"""Models are loaded from every place and in every precision, with the bits of the run that trained them."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from lptune import data, models
from lptune.base.errors import UserError
from lptune.config import PrecisionConfig
from lptune.distributed import World
from lptune.inference import LoadedModel, load_model
from lptune.inference.model import open_model
from tests.helpers import warm
from tests.helpers.tiny_recipe import write_config


def load(path: Path, world: World, kind: str = "none", dtype: str = "float32") -> LoadedModel:
    precision = PrecisionConfig(kind=kind, emulate=not kind.startswith("int8"))
    return load_model(str(path), precision, dtype, world, num_tokens=8)


def train(tmp_path: Path, folder: Path, *keys: str) -> Path:
    """The folder of a run of two steps, with an evaluation at its end."""
    config = write_config(tmp_path / "tiny.yaml", folder, tmp_path / "run")
    arguments = ["run", "full_finetune", "--config", str(config), "num_steps=2", *keys]
    done = warm.lptune(arguments, folder=tmp_path, timeout_s=120)
    assert done.returncode == 0, done.stderr
    return tmp_path / "run"


def held_out_loss(loaded: LoadedModel, run: Path) -> float:
    """What the run wrote as eval_loss, computed with the loaded model."""
    from lptune.config import FinetuneConfig, load_config

    cfg = load_config(FinetuneConfig, run / "config.yaml", [])
    prepared = data.prepare(cfg.data, loaded.tokenizer, seed=cfg.seed, vocab_size=1024)
    assert prepared.evaluation is not None
    loss_sum, num_targets = torch.zeros(()), 0
    with torch.no_grad():
        for batch in data.evaluation_batches(prepared.evaluation, cfg.micro_batch_size, rank=0, num_ranks=1):
            packed = models.DocumentBounds(batch.positions_BS, batch.document_BS, batch.offsets)
            loss_sum += loaded.model(batch.tokens_BS, packed, batch.labels_BS)
            num_targets += batch.num_targets
    return loss_sum.item() / num_targets


@pytest.mark.parametrize("kind", ["int8_weight_only", "float8_delayed"])
def test_a_checkpoint_gives_the_loss_that_its_run_evaluated(
    world: World, checkpoint: Path, tmp_path: Path, kind: str
) -> None:
    keys = ("compute_dtype=bfloat16", f"precision.emulate={str(kind == 'float8_delayed').lower()}")
    keys += (f"data.chat_template={'none' if kind == 'int8_weight_only' else 'null'}",)
    run = train(tmp_path, checkpoint, f"precision.kind={kind}", *keys)
    last = json.loads((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    of_run = load(run, world, kind, "bfloat16")
    assert held_out_loss(of_run, run) == last["eval_loss"]
    assert (of_run.tokenizer.template is None) == (kind == "int8_weight_only")
    of_step = load(run / "checkpoints" / "step-00000002", world, kind, "bfloat16")
    for ours, same in zip(of_run.model.parameters(), of_step.model.parameters(), strict=True):
        assert torch.equal(ours, same)
    if kind == "float8_delayed":
        plain, exported = load(run, world), load(run / "export", world)
        for ours, same in zip(plain.model.parameters(), exported.model.parameters(), strict=True):
            assert torch.equal(ours, same)


def test_a_path_that_is_no_model_gets_one_line(world: World, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match="is the folder of a run that has no checkpoint yet"):
        load(tmp_path / "empty", world)
    moved = tmp_path / "base"
    shutil.copytree(checkpoint, moved)
    run = train(tmp_path, moved, "num_steps=1")
    (run / "checkpoints" / "step-00000001").rename(tmp_path / "step-00000001")
    moved.rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"was trained from .*base, which has its config\.json"):
        load(tmp_path / "step-00000001", world)
    shutil.copytree(tmp_path / "elsewhere", moved)
    (moved / "config.json").write_text((moved / "config.json").read_text().replace("0.02", "0.03"))
    with pytest.raises(UserError, match=r"the digest of config\.json"):
        load(tmp_path / "step-00000001", world)


def test_a_given_template_whose_tokens_the_tokenizer_splits_is_a_note(checkpoint: Path) -> None:
    lines: list[str] = []
    for template in ("zephyr", "mistral"):
        open_model(str(checkpoint), lines.append, template, "prompts.chat_template")
    (line,) = lines
    assert line.startswith("note: prompts.chat_template=mistral: [INST], [/INST]")
