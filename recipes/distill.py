"""Distillation: a student, all weights trained, learns the probabilities of a frozen teacher, on 1..N ranks.

    lptune run distill --config llama3_2/1b_distill data.source=rows.jsonl precision.kind=int8_rowcol

Like full_finetune, but for the loss. Teacher and student have one tokenizer, and any width and depth. The
teacher is sharded over the same ranks, by default with its weights in INT8. It computes its last hidden
states; its head runs chunk by chunk together with the head of the student. With logits.folder, no teacher
runs: its most probable words are read from the files that precompute_logits wrote.
"""

import torch
from torch import Tensor

from lptune import checkpoint, data, distillation, distributed, linear, models, training
from lptune.config import DistillConfig


def main(cfg: DistillConfig) -> None:
    """Runs the training that `cfg` describes. Wrong input raises UserError before output_dir is changed."""
    with (
        distributed.session(cfg.device, cfg.parallel, cfg.seed, cfg.deterministic) as world,
        checkpoint.open_run(cfg, world) as run,
    ):
        # --- Input. All input is read and checked before the run's folder is made or changed.
        training.check_settings(cfg, world)
        base = run.read_base()  # only headers; weights are read by run.load
        teacher = distillation.open_teacher(cfg, world)  # a model, or a folder of its log-probabilities
        model = base.build_on_meta(freeze=cfg.freeze)
        plan = linear.convert(model, cfg.precision, device=world.device, num_tokens=cfg.tokens_per_forward)
        training.check_memory(model, cfg, world, teacher.on_meta())  # before anything is loaded or tokenized
        run.started_on = teacher.started_on or run.started_on
        tokenizer = data.load_tokenizer(base.folder, cfg.data.chat_template, date=run.started_on)
        teacher.check_tokens(tokenizer, base.config.vocab_size)
        with distributed.machine_first(world):  # one rank tokenizes; the others read its cache
            rows = data.prepare(cfg.data, tokenizer, seed=cfg.seed, vocab_size=base.config.vocab_size)
        teacher.check_rows(rows.train, tokenizer.chat_template)
        # Which steps are left? Model, data and seed must be those of the checkpoint that the run continues.
        steps = training.plan_steps(
            run, plan, rows, tokenizer, others={"the teacher's weights": teacher.digest}
        )
        if not steps:
            return

        # --- Models. Each is cut, checkpointed, compiled and sharded; then it gets storage and weights.
        distributed.parallelize(model, world, cfg)
        distributed.materialize(model, world, cfg)
        teacher.load()
        optimizer = training.build_optimizer(model, cfg.optimizer, cfg.seed)
        # With what low precision keeps from step to step. The first step is verified against the plan.
        state = training.State(model, plan, optimizer, cfg, world, frozen=teacher.low)
        run.load(base, state)

        # --- Training. The library seeds, times and verifies each step, saves, and stops where it must.
        steps.start(state)
        if steps.eval_due:  # before the first step, or because a signal left this evaluation out
            steps.record(eval_loss=evaluate(model, rows.held_out, cfg, world))
        for step in steps:
            for batch in step.shadow_batches():
                loss = batch_loss(model, teacher, batch, world)
                step.add(loss)
                (loss * step.loss_factor).backward()
            for batch in step.batches():
                loss = batch_loss(model, teacher, batch, world)
                step.add(loss)
                (loss * step.loss_factor).backward()
            step.update()
            if step.eval_due:
                step.record(eval_loss=evaluate(model, rows.held_out, cfg, world))

        # --- Result. The export comes before the samples, because generating can run out of memory.
        run.export(base)
        steps.show_samples()


def batch_loss(
    model: models.Backbone, teacher: distillation.Teacher, batch: data.Batch, world: distributed.World
) -> Tensor:
    """The loss of the section `distillation`, summed over the targets of the batch, float32."""
    objective = teacher.objective(batch)
    batch = batch.to(world.device)
    loss: Tensor = model(batch.tokens_BS, models.DocumentBounds.of(batch), batch.labels_BS, objective).sum()
    return loss


@training.evaluating  # without gradients and without dropout; then the model trains on
def evaluate(model: models.Backbone, rows: data.Rows, cfg: DistillConfig, world: distributed.World) -> float:
    """The mean cross-entropy of held-out targets, over all ranks, without the teacher. A collective."""
    loss_sum, num_targets = torch.zeros((), device=world.device), 0
    for batch in data.evaluation_batches(
        rows, cfg.micro_batch_size, rank=world.data_rank, num_ranks=world.data_size
    ):
        batch = batch.to(world.device)
        loss_sum += model(batch.tokens_BS, models.DocumentBounds.of(batch), batch.labels_BS)
        num_targets += batch.num_targets
    return world.sum(loss_sum) / max(1.0, world.sum(num_targets))


def planned_step(cfg: DistillConfig) -> training.PlannedStep:
    """For `lptune plan`: the student, and the teacher unless its words are read from disk."""
    return distillation.planned_step(cfg)
