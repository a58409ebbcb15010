"""Preference tuning (DPO, IPO, SimPO, ORPO) of a Hugging Face checkpoint, all weights trained, on 1..N ranks.

    lptune run full_dpo --config llama3_2/1b_dpo data.source=preferences.jsonl precision.kind=int8_rowcol

Like full_finetune, but for the data (a prompt, a chosen and a rejected answer), the loss and the metrics. The
reference of DPO and IPO is no second model: its log-probabilities are computed once, before training.
"""

import torch
from torch import Tensor

from lptune import checkpoint, data, distributed, linear, models, training
from lptune.config import PreferenceConfig


def main(cfg: PreferenceConfig) -> None:
    """Runs the training that `cfg` describes. Wrong input raises UserError before output_dir is changed."""
    with (
        distributed.session(cfg.device, cfg.parallel, cfg.seed, cfg.deterministic) as world,
        checkpoint.open_run(cfg, world) as run,
    ):
        # --- Input. All input is read and checked before the run's folder is made or changed.
        training.check_settings(cfg, world)
        base = run.read_base()  # only headers; weights are read by run.load
        model = base.build_on_meta(freeze=cfg.freeze)
        plan = linear.convert(model, cfg.precision, device=world.device, num_tokens=cfg.tokens_per_forward)
        training.check_memory(model, cfg, world)  # before anything is loaded or tokenized
        tokenizer = data.load_tokenizer(base.folder, cfg.data.chat_template, date=run.started_on)
        with distributed.machine_first(world):  # one rank tokenizes; the others read its cache
            rows = data.prepare_preferences(
                cfg.data, tokenizer, seed=cfg.seed, vocab_size=base.config.vocab_size
            )
        # Which steps are left? Model, data and seed must be those of the checkpoint that the run continues.
        steps = training.plan_steps(run, plan, rows, tokenizer, loss_per="preference")
        if not steps:
            return

        # --- Model. It is cut, checkpointed, compiled and sharded; then it gets storage and weights.
        distributed.parallelize(model, world, cfg)
        distributed.materialize(model, world, cfg)
        optimizer = training.build_optimizer(model, cfg.optimizer, cfg.seed)
        # With what low precision keeps from step to step. The first step is verified against the plan.
        state = training.State(model, plan, optimizer, cfg, world)
        reference = dict[str, Tensor]()
        if cfg.preference.has_reference:
            reference = training.reference_log_p(run, base, model, rows)
        run.load(base, state)

        # --- Training. The library seeds, times and verifies each step, saves, and stops where it must.
        steps.start(state)
        if steps.eval_due:  # before the first step, or because a signal left this evaluation out
            steps.record(**evaluate(model, rows.held_out, reference.get("held_out"), cfg, world))
        for step in steps:
            for batch in step.shadow_batches():
                loss, _ = batch_loss(model, batch, reference.get("train"), cfg, world)
                step.add(loss)
                (loss * step.loss_factor).backward()
            sums_M = torch.zeros(len(training.METRICS), device=world.device)
            for batch in step.batches():
                loss, metrics_M = batch_loss(model, batch, reference.get("train"), cfg, world)
                step.add(loss)
                (loss * step.loss_factor).backward()
                sums_M += metrics_M
            step.update()
            step.record(**training.mean_metrics(sums_M, step.count, world))
            if step.eval_due:
                step.record(**evaluate(model, rows.held_out, reference.get("held_out"), cfg, world))

        # --- Result. The export comes before the samples, because generating can run out of memory.
        run.export(base)
        steps.show_samples()


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


def planned_step(cfg: PreferenceConfig) -> training.PlannedStep:
    """For `lptune plan`: what forward and backward compute."""
    return training.PlannedStep("log_probabilities")
