"""Preference tuning (DPO, IPO, SimPO, ORPO) of a Hugging Face checkpoint, all weights trained, on 1..N ranks.

    lptune run full_dpo --config llama3_2/1b_dpo data.source=preferences.jsonl precision.kind=int8_rowcol

Like full_finetune, but for the data (a prompt, a chosen and a rejected answer), the loss and the metrics. The
reference of DPO and IPO is no second model: its log-probabilities are computed once, before training.
"""

from functools import partial

import torch
from torch import Tensor

from lptune import checkpoint, data, distributed, linear, models, training
from lptune.config import PreferenceConfig
from lptune.training import is_due


def main(cfg: PreferenceConfig) -> None:
    """Runs the training that `cfg` describes. Wrong input raises UserError before output_dir is changed."""
    with (
        distributed.session(cfg.device, cfg.parallel, cfg.seed, cfg.deterministic) as world,
        checkpoint.open_run(cfg, world) as run,
    ):
        # --- Input. All input is read and checked before the run's folder is made or changed.
        training.check_settings(cfg, world)
        base = checkpoint.read_base(cfg.model.path, world.print)  # only headers; weights are read by run.load
        model = base.build_on_meta(freeze=cfg.freeze)
        plan = linear.convert(model, cfg.precision, device=world.device, num_tokens=cfg.tokens_per_forward)
        run.find_checkpoint()
        tokenizer = data.load_tokenizer(base.folder, cfg.data.chat_template, date=run.started_on)
        with distributed.machine_first(world):  # one rank tokenizes; the others read its cache
            prepare = partial(data.prepare_preferences, seed=cfg.seed, vocab_size=base.config.vocab_size)
            train, held_out, report = prepare(cfg.data, tokenizer)
        loader = data.Loader.for_run(train, cfg, rank=world.data_rank, num_ranks=world.data_size)
        num_steps = cfg.num_steps or loader.num_steps(cfg.num_epochs)
        stops = data.learned_stops(train, tokenizer)  # the tokens that end answers, for the export
        run.check_continues(plan, num_steps, train.digest, tokenizer.chat_template, stops=stops)
        num_steps = run.last_step(run.step, num_steps, cfg.early_stop_after)
        if run.is_finished(num_steps):
            return

        # --- Model. It is cut, checkpointed, compiled and sharded; then it gets storage and weights.
        distributed.parallelize(model, world, cfg)
        distributed.materialize(model, world, cfg)
        optimizer = training.build_optimizer(model, cfg.optimizer, cfg.seed)
        dtype = getattr(torch, cfg.compute_dtype)
        watch = partial(distributed.verify_collectives, model, world.mesh, dtype, world.print)
        # What low precision keeps from step to step. It verifies the first step against the plan.
        low = linear.LowPrecision(
            model, plan, optimizer, world=world, seed=cfg.seed, verify=cfg.precision.verify, watch=watch
        )
        update = training.Update(model, optimizer, world, cfg.max_grad_norm, low, run.skipped)
        kept = run.reference(held_out.digest if held_out else "")
        reference = kept.read(train, held_out) if cfg.preference.has_reference else {}
        if reference is None:  # of the weights before training, also where the run continues a checkpoint
            run.load_base(base, model)
            reference = training.reference_log_p(model, {"train": train, "held_out": held_out}, cfg, world)
        step = run.load(base, model, optimizer, low)
        report += training.describe_run(model, plan, cfg, world, step, num_steps, train.one_document_per_row)
        run.begin(plan, report)
        kept.keep(reference)
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
                found = evaluate(model, held_out, reference.get("held_out"), cfg, world)
                metrics.write({"step": step} | found)
                num_steps = run.last_step(step, num_steps, cfg.early_stop_after)
            if stopped := world.stop_requested():  # later signals let the step end, and its state is saved
                raise run.stopped(stopped)
            is_save_due = False
            while step < num_steps:
                with meter.timed():
                    world.seed(cfg.seed, step)  # so dropout, added to a copy of this file, resumes exactly
                    batches, num_preferences = loader.micro_batches(step), loader.num_preferences(step)
                    with low.step(step, num_passes=len(batches)):
                        sums_M = torch.zeros(len(training.METRICS), device=world.device)
                        for batch in distributed.accumulate(model, batches, world, cfg, low):
                            loss, metrics_M = batch_loss(model, batch, reference.get("train"), cfg, world)
                            (loss * (world.data_size / num_preferences)).backward()  # FSDP averages
                            sums_M += metrics_M
                    lr = training.learning_rate(step, num_steps, cfg.optimizer.lr, cfg.schedule)
                    training.set_learning_rate(optimizer, lr)
                    # Clips, steps, clears gradients. If the loss or a gradient is not finite, only clears.
                    updated = update(sums_M[0], num_preferences)  # METRICS[0] is the loss
                lengths, num_targets = loader.document_lengths(step), loader.num_targets(step)
                step += 1
                record = meter.record(step, updated, num_targets, lr, lengths, update, low)
                record |= training.mean_metrics(sums_M, num_preferences, world)
                is_last = step == num_steps
                stopped, is_overdue = world.at_boundary(writer.is_overdue())
                if held_out is not None and not stopped and is_due(step, cfg.eval_every_steps, is_last):
                    record |= evaluate(model, held_out, reference.get("held_out"), cfg, world)
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
    model: models.Backbone,
    batch: data.Batch,
    reference_N: Tensor | None,
    cfg: PreferenceConfig,
    world: distributed.World,
) -> tuple[Tensor, Tensor]:
    """The preference loss and METRICS (M,), summed over the preferences of the batch, float32."""
    batch = batch.to(world.device)
    documents = models.DocumentBounds.of(batch)
    log_p_BS = model(batch.tokens_BS, documents, batch.labels_BS, loss=models.log_probabilities)
    answers = training.answers_of(log_p_BS, batch, reference_N)
    return training.preference_loss(answers, cfg.preference)


@training.evaluating  # without gradients and without dropout; then the model trains on
def evaluate(
    model: models.Backbone,
    rows: data.Rows,
    reference_N: Tensor | None,
    cfg: PreferenceConfig,
    world: distributed.World,
) -> dict[str, float]:
    """The means of METRICS over held-out preferences, over all ranks, in the precision of training."""
    sums_M = torch.zeros(len(training.METRICS), device=world.device)
    for batch in data.evaluation_batches(
        rows, cfg.micro_batch_size, rank=world.data_rank, num_ranks=world.data_size
    ):
        sums_M += batch_loss(model, batch, reference_N, cfg, world)[1]
    return training.mean_metrics(sums_M, rows.num_preferences, world, "eval_")
