"""Continued pre-training of a Hugging Face checkpoint on raw text from several sources, on 1..N ranks.

    lptune run continued_pretrain --config llama3_2/1b_pretrain data.source=texts.jsonl

It differs from full_finetune in two things: `num_tokens` can give the length of the run, and the loss is also
computed for each data source, in training and on held-out text. The loss of a token does not depend on its
source, so all sources have the same weight per token; data.source gives each source its share of the tokens.
"""

import torch
from torch import Tensor

from lptune import checkpoint, data, distributed, linear, models, training
from lptune.config import PretrainConfig


def main(cfg: PretrainConfig) -> None:
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
            rows = data.prepare_texts(
                cfg.data, tokenizer, seed=cfg.seed, vocab_size=base.config.vocab_size, cuts=run.cuts_text
            )
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
            steps.record(**evaluate(model, rows.held_out, cfg, world))
        for step in steps:
            for batch in step.shadow_batches():
                loss_N = batch_losses(model, batch, rows.train.num_sources, world)
                step.add(loss_N)
                (loss_N.sum() * step.loss_factor).backward()
            for batch in step.batches():
                loss_N = batch_losses(model, batch, rows.train.num_sources, world)
                step.add(loss_N)
                (loss_N.sum() * step.loss_factor).backward()
            step.update()
            sums_N, targets_N = step.loss_sum, step.num_targets_by_source()
            step.record(**training.losses_by_source("loss", sums_N, targets_N, cfg.source_names, world))
            if step.eval_due:
                step.record(**evaluate(model, rows.held_out, cfg, world))

        # --- Result. The export comes before the samples, because generating can run out of memory.
        run.export(base)
        steps.show_samples()


def batch_losses(
    model: models.Backbone, batch: data.Batch, num_sources: int, world: distributed.World
) -> Tensor:
    """The cross-entropy, summed over the targets of each source in the batch, float32 (num_sources,)."""
    batch = batch.to(world.device)
    documents = models.DocumentBounds.of(batch)
    log_p_BS = model(batch.tokens_BS, documents, batch.labels_BS, loss=models.log_probabilities)
    source_BS = batch.source_BS.to(world.device)
    return torch.stack([-log_p_BS.where(source_BS == i, 0.0).sum() for i in range(num_sources)])


@training.evaluating  # without gradients and without dropout; then the model trains on
def evaluate(
    model: models.Backbone, rows: data.Rows, cfg: PretrainConfig, world: distributed.World
) -> dict[str, float]:
    """`eval_loss`, the mean loss over all held-out targets, and `eval_loss/NAME` over those of each source.

    Over all ranks, in the precision of training. A collective.
    """
    sums_N = torch.zeros(rows.num_sources, device=world.device)
    for batch in data.evaluation_batches(
        rows, cfg.micro_batch_size, rank=world.data_rank, num_ranks=world.data_size
    ):
        sums_N += batch_losses(model, batch, rows.num_sources, world)
    targets_N = rows.num_targets_by_source(range(rows.num_rows))
    record = {"eval_loss": world.sum(sums_N.sum()) / max(1, sum(targets_N))}
    return record | training.losses_by_source("eval_loss", sums_N, targets_N, cfg.held_out_names, world)


def planned_step(cfg: PretrainConfig) -> training.PlannedStep:
    """For `lptune plan`: what forward and backward compute."""
    return training.PlannedStep("log_probabilities")
