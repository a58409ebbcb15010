"""KTO of a Hugging Face checkpoint, all weights trained, on 1..N ranks: answers labelled desirable or not.

    lptune run full_kto --config llama3_2/1b_kto data.source=labelled.jsonl precision.kind=int8_rowcol

Like full_dpo, but for the data (a prompt, one answer and its label) and the loss, which compares the answer's
log-ratio to the model before training with z, the mean log-ratio of answers to other prompts in this step.
"""

import torch
from torch import Tensor

from lptune import checkpoint, data, distributed, linear, models, training
from lptune.config import KtoConfig


def main(cfg: KtoConfig) -> None:
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
            rows = data.prepare_labelled(
                cfg.data, tokenizer, seed=cfg.seed, vocab_size=base.config.vocab_size
            )
        # Which steps are left? Model, data and seed must be those of the checkpoint that the run continues.
        steps = training.plan_steps(run, plan, rows, tokenizer, loss_per="answer")
        if not steps:
            return

        # --- Model. It is cut, checkpointed, compiled and sharded; then it gets storage and weights.
        distributed.parallelize(model, world, cfg)
        distributed.materialize(model, world, cfg)
        optimizer = training.build_optimizer(model, cfg.optimizer, cfg.seed)
        # With what low precision keeps from step to step. The first step is verified against the plan.
        state = training.State(model, plan, optimizer, cfg, world)
        reference = training.reference_log_p(run, base, model, rows, mismatched=True)
        run.load(base, state)

        # --- Training. The library seeds, times and verifies each step, saves, and stops where it must.
        steps.start(state)
        if steps.eval_due:  # before the first step, or because a signal left this evaluation out
            steps.record(**evaluate(model, rows.held_out, reference["held_out"], cfg, world))
        for step in steps:
            # z comes first, over the whole step: the loss of every answer depends on it.
            z = training.unrelated_ratio(model, step.mismatched_batches(), reference["train"], world)
            for batch in step.shadow_batches():
                loss, _ = batch_loss(model, batch, rows.train, reference["train"], z, cfg)
                step.add(loss)
                (loss * step.loss_factor).backward()
            sums_M = torch.zeros(len(training.SUMS), device=world.device)
            for batch in step.batches():
                loss, found_M = batch_loss(model, batch, rows.train, reference["train"], z, cfg)
                step.add(loss)
                (loss * step.loss_factor).backward()
                sums_M += found_M
            step.update()
            step.record(**training.kto_metrics(sums_M, z, world))
            if step.eval_due:
                step.record(**evaluate(model, rows.held_out, reference["held_out"], cfg, world))

        # --- Result. The export comes before the samples, because generating can run out of memory.
        run.export(base)
        steps.show_samples()


def batch_loss(
    model: models.Backbone,
    batch: data.Batch,
    rows: data.Rows,
    reference_N2: Tensor,
    z: Tensor,
    cfg: KtoConfig,
) -> tuple[Tensor, Tensor]:
    """The loss and SUMS (M,), summed over the answers of the batch, float32. rows: the data of the batch."""
    batch = batch.to(z.device)
    documents = models.DocumentBounds.of(batch)
    log_p_BS = model(batch.tokens_BS, documents, batch.labels_BS, loss=models.log_probabilities)
    return training.kto_loss(log_p_BS, batch, rows, reference_N2, z, cfg.kto)


@training.evaluating  # without gradients and without dropout; then the model trains on
def evaluate(
    model: models.Backbone, rows: data.Rows, reference_N2: Tensor, cfg: KtoConfig, world: distributed.World
) -> dict[str, float]:
    """The metrics of all held-out answers, with one z over all of them, in the precision of training."""
    share = {"rank": world.data_rank, "num_ranks": world.data_size}
    mismatched = data.evaluation_batches(rows.mismatched, cfg.micro_batch_size, **share)
    z = training.unrelated_ratio(model, mismatched, reference_N2, world)
    sums_M = torch.zeros(len(training.SUMS), device=world.device)
    for batch in data.evaluation_batches(rows, cfg.micro_batch_size, **share):
        sums_M += batch_loss(model, batch, rows, reference_N2, z, cfg)[1]
    return training.kto_metrics(sums_M, z, world, "eval_")


def planned_step(cfg: KtoConfig) -> training.PlannedStep:
    """For `lptune plan`: what forward and backward compute."""
    return training.PlannedStep("log_probabilities")
