"""Full fine-tuning of a Hugging Face checkpoint, all weights trained, on 1..N ranks.

    lptune run full_finetune --config llama3_2/1b data.source=rows.jsonl precision.kind=int8_rowcol

This file shows the whole training: check the input, build and shard the model, train, evaluate, export. To
try an idea, copy it (`lptune cp full_finetune my_recipe.py`) and edit the copy. The recipe has forward, loss,
backward and evaluation; what is around them is the same for all recipes (lptune/training/loop.py).
"""

import torch
from torch import Tensor

from lptune import checkpoint, data, distributed, linear, models, training
from lptune.config import FinetuneConfig


def main(cfg: FinetuneConfig) -> None:
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
            rows = data.prepare(cfg.data, tokenizer, seed=cfg.seed, vocab_size=base.config.vocab_size)
        # Which steps are left? Model, data and seed must be those of the checkpoint that the run continues.
        steps = training.plan_steps(run, plan, rows, tokenizer)
        if not steps:
            return

        # --- Model. It is cut, checkpointed, compiled and sharded; then it gets storage and weights.
        distributed.parallelize(model, world, cfg)
        distributed.materialize(model, world, cfg)
        optimizer = training.build_optimizer(model, cfg.optimizer, cfg.seed)
        # With what low precision keeps from step to step. The first step is verified against the plan.
        state = training.State(model, plan, optimizer, cfg, world)
        run.load(base, state)

        # --- Training. The library seeds, times and verifies each step, saves, and stops where it must.
        steps.start(state)
        if steps.eval_due:  # before the first step, or because a signal left this evaluation out
            steps.record(eval_loss=evaluate(model, rows.held_out, cfg, world))
        for step in steps:
            # If a check is due: one micro-batch in 8 bits and in high precision, which trains nothing.
            for batch in step.shadow_batches():
                loss = batch_loss(model, batch, world, step.loss_factor)
                step.add(loss)
                (loss * step.loss_factor).backward()
            for batch in step.batches():
                loss = batch_loss(model, batch, world, step.loss_factor)
                step.add(loss)
                (loss * step.loss_factor).backward()
            step.update()  # clips, steps, clears gradients; if one or the loss is not finite, only clears
            if step.eval_due:
                step.record(eval_loss=evaluate(model, rows.held_out, cfg, world))

        # --- Result. The export comes before the samples, because generating can run out of memory.
        run.export(base)
        steps.show_samples()


def batch_loss(
    model: models.Backbone, batch: data.Batch, world: distributed.World, loss_factor: float = 1.0
) -> Tensor:
    """The cross-entropy, summed over the targets of the batch, float32. loss_factor: that of backward."""
    batch = batch.to(world.device)
    documents = models.DocumentBounds.of(batch)
    loss: Tensor = model(batch.tokens_BS, documents, batch.labels_BS, expected_gradient=loss_factor)
    return loss


@training.evaluating  # without gradients and without dropout; then the model trains on
def evaluate(model: models.Backbone, rows: data.Rows, cfg: FinetuneConfig, world: distributed.World) -> float:
    """The mean loss over held-out targets, over all ranks, in the precision of training. A collective."""
    loss_sum, num_targets = torch.zeros((), device=world.device), 0
    for batch in data.evaluation_batches(
        rows, cfg.micro_batch_size, rank=world.data_rank, num_ranks=world.data_size
    ):
        loss_sum += batch_loss(model, batch, world)
        num_targets += batch.num_targets
    return world.sum(loss_sum) / max(1.0, world.sum(num_targets))


def planned_step(cfg: FinetuneConfig) -> training.PlannedStep:
    """For `lptune plan`: what forward and backward compute."""
    return training.PlannedStep("summed_cross_entropy")
