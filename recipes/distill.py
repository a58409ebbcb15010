"""Distillation: a student, all weights trained, learns the probabilities of a frozen teacher, on 1..N ranks.

    lptune run distill --config llama3_2/1b_distill data.source=rows.jsonl precision.kind=int8_rowcol

Like full_finetune, but for the loss. Teacher and student have one tokenizer, and any width and depth. The
teacher is sharded over the same ranks, by default with its weights in INT8. It computes its last hidden
states; its head runs chunk by chunk together with the head of the student. With logits.folder, no teacher
runs: its most probable words are read from the files that precompute_logits wrote.
"""

from functools import partial

import torch
from torch import Tensor

from lptune import checkpoint, data, distillation, distributed, linear, models, training
from lptune.config import DistillConfig
from lptune.training import is_due


def main(cfg: DistillConfig) -> None:
    """Runs the training that `cfg` describes. Wrong input raises UserError before output_dir is changed."""
    with (
        distributed.session(cfg.device, cfg.parallel, cfg.seed, cfg.deterministic) as world,
        checkpoint.open_run(cfg, world) as run,
    ):
        # --- Input. All input is read and checked before the run's folder is made or changed.
        training.check_settings(cfg, world)
        base = checkpoint.read_base(cfg.model.path, world.print)  # only headers; weights are read by run.load
        teacher = distillation.open_teacher(cfg, world)  # a model, or a folder of its log-probabilities
        model = base.build_on_meta(freeze=cfg.freeze)
        plan = linear.convert(model, cfg.precision, device=world.device, num_tokens=cfg.tokens_per_forward)
        run.find_checkpoint()
        run.started_on = teacher.started_on or run.started_on
        tokenizer = data.load_tokenizer(base.folder, cfg.data.chat_template, date=run.started_on)
        vocab_size = base.config.vocab_size
        teacher.check_tokens(tokenizer, vocab_size)
        with distributed.machine_first(world):  # one rank tokenizes; the others read its cache
            train, held_out, report = data.prepare(cfg.data, tokenizer, seed=cfg.seed, vocab_size=vocab_size)
        teacher.check_rows(train, tokenizer.chat_template)
        loader = data.Loader.for_run(train, cfg, rank=world.data_rank, num_ranks=world.data_size)
        num_steps = cfg.num_steps or loader.num_steps(cfg.num_epochs)
        others = {"the teacher's weights": teacher.digest}
        stops = data.learned_stops(train, tokenizer)  # the tokens that end answers, for the export
        template = tokenizer.chat_template
        run.check_continues(plan, num_steps, train.digest, template, others=others, stops=stops)
        num_steps = run.last_step(run.step, num_steps, cfg.early_stop_after)
        if run.is_finished(num_steps):
            return

        # --- Models. Each is cut, checkpointed, compiled and sharded; then it gets storage and weights.
        distributed.parallelize(model, world, cfg)
        distributed.materialize(model, world, cfg)
        teacher.load()
        optimizer = training.build_optimizer(model, cfg.optimizer, cfg.seed)
        dtype = getattr(torch, cfg.compute_dtype)
        watch = partial(
            distributed.verify_collectives, model, world.mesh, dtype, world.print, frozen=teacher.model
        )
        # What low precision keeps from step to step. It verifies the first step against the plan.
        low = linear.LowPrecision(
            model, plan, optimizer, world=world, seed=cfg.seed, verify=cfg.precision.verify, watch=watch
        )
        update = training.Update(model, optimizer, world, cfg.max_grad_norm, low, run.skipped)
        step = run.load(base, model, optimizer, low)
        report += training.describe_run(model, plan, cfg, world, step, num_steps, train.one_document_per_row)
        run.begin(plan, report)
        meter = training.StepMeter(cfg, plan, base.config, world, loader.steps_per_epoch)
        training.check_first_loss(model, low, loader, cfg, world, step)  # warns if 8 bits cost much

        # --- Training.
        with (
            run.writer(model, optimizer, low, update) as writer,
            training.MetricsWriter(run.metrics, cfg.logging, world.is_main, step, num_steps) as metrics,
        ):
            # Before the first step, or if a signal stopped the run before the evaluation of this step.
            is_eval_due = is_due(step, cfg.eval_every_steps, step == num_steps)
            if held_out is not None and is_eval_due and not run.has_evaluation(step):
                metrics.write({"step": step, "eval_loss": evaluate(model, held_out, cfg, world)})
                num_steps = run.last_step(step, num_steps, cfg.early_stop_after)
            if stopped := world.stop_requested():  # later signals let the step end, and its state is saved
                raise run.stopped(stopped)
            is_save_due = False
            while step < num_steps:
                with meter.timed():
                    world.seed(cfg.seed, step)  # so dropout, added to a copy of this file, resumes exactly
                    batches, num_targets = loader.micro_batches(step), max(1, loader.num_targets(step))
                    num_passes = len(batches)
                    with low.step(step, num_passes), teacher.step(step, num_passes):
                        loss_sum = torch.zeros((), device=world.device)
                        for batch in distributed.accumulate(model, batches, world, cfg, low):
                            loss = batch_loss(model, teacher, batch, world)
                            (loss * (world.data_size / num_targets)).backward()  # FSDP averages over ranks
                            loss_sum += loss.detach()
                    lr = training.learning_rate(step, num_steps, cfg.optimizer.lr, cfg.schedule)
                    training.set_learning_rate(optimizer, lr)
                    # Clips, steps, clears gradients. If the loss or a gradient is not finite, only clears.
                    updated = update(loss_sum, num_targets)
                lengths = loader.document_lengths(step)
                step += 1
                record = meter.record(step, updated, num_targets, lr, lengths, update, low)
                is_last = step == num_steps
                stopped, is_overdue = world.at_boundary(writer.is_overdue())
                if held_out is not None and not stopped and is_due(step, cfg.eval_every_steps, is_last):
                    record["eval_loss"] = evaluate(model, held_out, cfg, world)
                metrics.write(record)
                if "eval_loss" in record:
                    num_steps = run.last_step(step, num_steps, cfg.early_stop_after)
                if update.num_skipped_in_a_row >= cfg.diverged_after_steps:
                    raise update.diverged(step, writer.wait(), run.path)
                writer.check()
                # A skipped step has nothing new, and would drive out a good checkpoint: the next is saved.
                is_save_due |= is_overdue or is_due(step, cfg.checkpoint.every_steps)
                at_end = bool(stopped) or (step == num_steps and cfg.checkpoint.at_end)
                if at_end or (is_save_due and not update.num_skipped_in_a_row):
                    writer.save(step, eval_loss=record.get("eval_loss"), wait=at_end)
                    is_save_due = False
                if stopped:
                    raise run.stopped(stopped)

        # --- Result.
        run.export(base)


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
