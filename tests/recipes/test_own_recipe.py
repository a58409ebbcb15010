"""A recipe of a user's own: another loss, a config with a key of its own, and nothing copied but the loop."""

import json
from pathlib import Path

import pytest

from lptune.base.errors import UserError
from lptune.cli import recipe
from lptune.config import load_config
from tests.helpers import warm
from tests.recipes.conftest import Run, losses

RECIPE = '''
"""Continued pre-training with a z-loss, without evaluation."""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from lptune import checkpoint, data, distributed, linear, training
from lptune.config import RunConfig
from lptune.training import is_due


@dataclass(frozen=True, kw_only=True)
class ZLossConfig(RunConfig):
    z_loss: float = 1e-4


def main(cfg: ZLossConfig) -> None:
    with (
        distributed.session(cfg.device, cfg.parallel, cfg.seed) as world,
        checkpoint.open_run(cfg, world) as run,
    ):
        training.check_settings(cfg, world)
        base = checkpoint.read_base(cfg.model.path, world.print)
        model = base.build_on_meta()
        plan = linear.convert(model, cfg.precision, device=world.device, num_tokens=cfg.tokens_per_forward)
        run.find_checkpoint()
        tokenizer = data.load_tokenizer(base.folder, cfg.data.chat_template, date=run.started_on)
        rows = data.prepare(cfg.data, tokenizer, seed=cfg.seed, vocab_size=base.config.vocab_size)
        loader = data.Loader.for_run(rows.train, cfg, rank=world.data_rank, num_ranks=world.data_size)
        num_steps = cfg.num_steps or loader.num_steps(cfg.num_epochs)
        run.check_continues(plan, num_steps, rows.train.digest, tokenizer.chat_template)
        if run.is_finished(num_steps):
            return

        distributed.parallelize(model, world, cfg)
        distributed.materialize(model, world, cfg)
        optimizer = training.build_optimizer(model, cfg.optimizer, cfg.seed)
        low = linear.LowPrecision(model, plan, optimizer, world=world, seed=cfg.seed)
        update = training.Update(model, optimizer, world, cfg.max_grad_norm, low, run.skipped)
        step = run.load(base, model, optimizer, low)
        run.begin(plan, rows.report)
        meter = training.StepMeter(cfg, plan, base.config, world)
        with (
            run.writer(model, optimizer, low, update) as writer,
            training.MetricsWriter(run.metrics, cfg.logging, world.is_main, step, num_steps) as metrics,
        ):
            while step < num_steps:
                with meter.timed():
                    batches, num_targets = loader.micro_batches(step), max(1, loader.num_targets(step))
                    with low.step(step, num_passes=len(batches)):
                        loss_sum = torch.zeros((), device=world.device)
                        for batch in distributed.accumulate(model, batches, world, cfg, low):
                            loss = z_loss(model, batch.to(world.device), cfg)
                            (loss * (world.data_size / num_targets)).backward()
                            loss_sum += loss.detach()
                    lr = training.learning_rate(step, num_steps, cfg.optimizer.lr, cfg.schedule)
                    training.set_learning_rate(optimizer, lr)
                    updated = update(loss_sum, num_targets)
                lengths = loader.document_lengths(step)
                step += 1
                metrics.write(meter.record(step, updated, num_targets, lr, lengths, update, low))
                stopped, is_overdue = world.at_boundary(writer.is_overdue())
                is_last = step == num_steps
                if stopped or is_last or is_overdue or is_due(step, cfg.checkpoint.every_steps):
                    writer.save(step, wait=bool(stopped) or is_last)
                if stopped:
                    raise run.stopped(stopped)
        run.export(base)


def z_loss(model, batch, cfg):
    logits = model(batch.tokens_BS).float().flatten(0, 1)
    labels = batch.labels_BS.flatten()
    log_z = logits.logsumexp(-1)[labels != -100]
    return F.cross_entropy(logits, labels, reduction="sum") + cfg.z_loss * log_z.square().sum()
'''


@pytest.fixture
def own(tmp_path: Path, tiny_config: Path) -> Path:
    """The recipe; its config is tiny_config without the keys of an evaluation."""
    (tmp_path / "z_loss.py").write_text(RECIPE, encoding="utf-8")
    text = tiny_config.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if "eval_" not in line]
    tiny_config.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tmp_path / "z_loss.py"


def test_it_trains_in_low_precision_resumes_bitwise_and_exports(
    own: Path, run_recipe: Run, tmp_path: Path
) -> None:
    keys = ["precision.kind=int8_rowcol", "z_loss=0.001", "num_steps=4", "checkpoint.every_steps=2"]
    done = run_recipe(*keys, f"output_dir={tmp_path / 'whole'}", recipe=str(own), ranks=2)
    assert "8-bit GEMMs ran" in done.stdout
    assert (tmp_path / "whole" / "export" / "model.safetensors").exists()
    saved = tmp_path / "whole" / "checkpoints" / "step-00000002"
    run_recipe(*keys, f"output_dir={tmp_path / 'part'}", f"resume={saved}", recipe=str(own), ranks=2)
    assert losses(tmp_path / "part") == losses(tmp_path / "whole")[2:]
    state = json.loads((saved / "state.json").read_text(encoding="utf-8"))
    assert state["config"]["z_loss"] == 0.001


def test_a_change_of_its_own_key_is_named_where_no_step_is_left(own: Path, run_recipe: Run) -> None:
    run_recipe("num_steps=1", recipe=str(own))
    done = run_recipe("num_steps=1", "z_loss=0.5", recipe=str(own), code=2)
    assert "z_loss 0.0001 (now 0.5)" in done.stderr
    assert "already finished" in run_recipe("num_steps=1", recipe=str(own)).stdout


def test_it_can_be_planned(own: Path, tiny_config: Path, tmp_path: Path) -> None:
    done = warm.lptune(["plan", str(own), "--config", str(tiny_config), "device=cpu"], folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "collectives of a step" in done.stdout


def test_a_key_of_another_recipe_is_refused(own: Path, tiny_config: Path) -> None:
    with pytest.raises(UserError, match="eval_every_steps"):
        load_config(recipe.config_class(own), tiny_config, ["eval_every_steps=3"])
