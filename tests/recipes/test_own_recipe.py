"""A recipe of a user's own: another loss, a config with a key of its own, and nothing copied but the loop."""

import json
from pathlib import Path

import pytest

from lptune.base.errors import UserError
from lptune.cli import recipe
from lptune.config import load_config
from tests.helpers import warm
from tests.recipes.conftest import Run, losses, read_metrics, refusal

RECIPE = '''
"""Continued pre-training with a z-loss, without evaluation."""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from lptune import checkpoint, data, distributed, linear, training
from lptune.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class ZLossConfig(RunConfig):
    z_loss: float = 1e-4


def main(cfg: ZLossConfig) -> None:
    with (
        distributed.session(cfg.device, cfg.parallel, cfg.seed) as world,
        checkpoint.open_run(cfg, world) as run,
    ):
        base = run.read_base()
        model = base.build_on_meta()
        plan = linear.convert(model, cfg.precision, device=world.device, num_tokens=cfg.tokens_per_forward)
        tokenizer = data.load_tokenizer(base.folder, cfg.data.chat_template, date=run.started_on)
        rows = data.prepare(cfg.data, tokenizer, seed=cfg.seed, vocab_size=base.config.vocab_size)
        steps = training.plan_steps(run, plan, rows, tokenizer)
        if not steps:
            return

        distributed.parallelize(model, world, cfg)
        distributed.materialize(model, world, cfg)
        optimizer = training.build_optimizer(model, cfg.optimizer, cfg.seed)
        state = training.State(model, plan, optimizer, cfg, world)
        run.load(base, state)
        steps.start(state)
        for step in steps:
            for batch in step.batches():
                loss = z_loss(model, batch.to(world.device), cfg)
                (loss * step.loss_factor).backward()
                step.add(loss)
            step.update()
            step.record(z_loss=cfg.z_loss)
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
    assert [row["z_loss"] for row in read_metrics(tmp_path / "part")] == [0.001] * 2
    state = json.loads((saved / "state.json").read_text(encoding="utf-8"))
    assert state["config"]["z_loss"] == 0.001


def test_a_loop_that_leaves_its_micro_batches_early_is_stopped_before_the_update(
    own: Path, tmp_path: Path, run_recipe: Run
) -> None:
    """Else nothing would compare the first step with the plan."""
    cut, loop = tmp_path / "cut.py", "for batch in step.batches():"
    text = own.read_text("utf-8")
    assert text.count(loop) == 1
    cut.write_text(text.replace(loop, "for batch in [next(step.batches())]:"), encoding="utf-8")
    done = run_recipe(f"output_dir={tmp_path / 'cut'}", recipe=str(cut), code=1)
    assert "step.batches() is to run to its end" in done.stderr
    assert read_metrics(tmp_path / "cut") == []


def test_a_change_of_its_own_key_is_named_where_no_step_is_left(own: Path, run_recipe: Run) -> None:
    run_recipe("num_steps=1", recipe=str(own))
    done = run_recipe("num_steps=1", "z_loss=0.5", recipe=str(own), code=2)
    assert "z_loss 0.0001 (now 0.5)" in refusal(done)


def test_it_can_be_planned_and_says_itself_what_its_step_is(
    own: Path, tiny_config: Path, tmp_path: Path
) -> None:
    command = ["plan", str(own), "--config", str(tiny_config), "device=cpu"]
    done = warm.lptune(command, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "collectives of a step" in done.stdout
    # A model beside the one that is trained, as a recipe with a reward model would have it.
    planned = """

class Judged(training.PlannedStep):
    def loss(self, frozen, tokens_BS, documents, cfg):
        with torch.no_grad():
            frozen.hidden_states(tokens_BS, documents)
        return super().loss(frozen, tokens_BS, documents, cfg)


def planned_step(cfg):
    return Judged(frozen="model.path")
"""
    own.write_text(own.read_text("utf-8") + planned, encoding="utf-8")
    both = warm.lptune(command, folder=tmp_path)
    assert both.returncode == 0, both.stderr
    assert both.stdout != done.stdout
    own.write_text(own.read_text("utf-8") + "\n\ndef planned_step(cfg):\n    return None\n", encoding="utf-8")
    none = warm.lptune(command, folder=tmp_path)
    assert (none.returncode, none.stderr) == (
        2, "error: plan: z_loss does not train: there is no step to plan\n"
    )  # fmt: skip


def test_a_key_of_another_recipe_is_refused(own: Path, tiny_config: Path) -> None:
    with pytest.raises(UserError, match="eval_every_steps"):
        load_config(recipe.config_class(own), tiny_config, ["eval_every_steps=3"])
