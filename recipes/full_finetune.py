"""Full fine-tuning of a Hugging Face checkpoint, all weights trained, on 1..N ranks.

    lptune run full_finetune --config llama3_2/1b data.source=rows.jsonl precision.kind=int8_rowcol

The file is the whole story: check the input, build and shard the model, step, evaluate, save, export. Copy it
(`lptune cp full_finetune my_recipe.py`) and edit it to try an idea; the library owns how, this file owns
when.
"""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lptune import checkpoint, data, distributed, linear, models, training
from lptune.config import FinetuneConfig


def main(cfg: FinetuneConfig) -> None:
    """Runs the training that `cfg` describes. Wrong input raises UserError before anything is written."""
    with (
        distributed.session(cfg.device, cfg.parallel, cfg.seed, cfg.deterministic) as world,
        checkpoint.open_run_folder(cfg, world) as run,
    ):
        # --- Input: all of it is read and checked before the run's folder is made or changed.
        training.check_logging(cfg.logging)
        distributed.check_compiler(cfg.compile)
        data.check_batches(cfg.global_batch_size, cfg.micro_batch_size, world.data_size)
        source = checkpoint.read_index(Path(cfg.model.path).expanduser())
        model_config = checkpoint.read_config(source, world.print)
        model = models.build_on_meta(model_config)
        checkpoint.match_tensors(model, source)
        num_tokens = cfg.micro_batch_size * cfg.data.seq_len
        plan = linear.convert(model, cfg.precision, device=world.device, num_tokens=num_tokens)
        saved = checkpoint.find_checkpoint(run.checkpoints, cfg.resume, world, world.print)
        step, last_saved = (saved.step, saved.folder) if saved else (0, None)

        started_on = checkpoint.started_on(saved)
        tokenizer = data.load_tokenizer(source.folder, cfg.data.chat_template, date=started_on)
        with distributed.machine_first(world):  # the other ranks map what it has tokenized
            vocab_size = model_config.vocab_size
            train, held_out, report = data.prepare(cfg.data, tokenizer, seed=cfg.seed, vocab_size=vocab_size)
        loader = data.Loader(
            train,
            seed=cfg.seed,
            global_batch_size=cfg.global_batch_size,
            micro_batch_size=cfg.micro_batch_size,
            rank=world.data_rank,
            num_ranks=world.data_size,
        )
        num_steps = cfg.num_steps or loader.num_steps(cfg.num_epochs)
        facts = checkpoint.run_facts(
            cfg, plan, saved, num_steps, train.digest, started_on, tokenizer.chat_template
        )
        checkpoint.check_fingerprint(saved, facts, world)
        if saved is not None and step >= num_steps:
            checkpoint.check_unchanged(saved, facts, world.print)
            if not cfg.export.enabled or run.is_exported(step, cfg.export):
                and_exported = " and exported" if cfg.export.enabled else ""
                done = f"{saved.folder} is step {step}{and_exported}, precision {plan.kind}"
                world.print(f"already finished: {done}; for more raise num_steps or change output_dir")
                return

        # --- Model: checkpointing, compilation, gathers and sharding; then real storage and weights.
        distributed.parallelize(model, world, cfg)
        distributed.materialize(model, world, cfg)
        optimizer = training.build_optimizer(model, cfg.optimizer, cfg.seed)
        compute_dtype = getattr(torch, cfg.compute_dtype)
        watch = partial(distributed.verify_collectives, model, world.mesh, compute_dtype, world.print)
        verify = cfg.precision.verify
        low = linear.LowPrecision(
            model, plan, optimizer, world=world, seed=cfg.seed, verify=verify, watch=watch
        )
        if saved is None:
            checkpoint.load_hf(model, source, world)
        else:
            checkpoint.load_state(saved, model, optimizer, low.state())
        skipped = checkpoint.skipped_steps(saved)
        update = training.Update(model, optimizer, world, cfg.max_grad_norm, low, skipped)
        run.create(saved, world.print)
        if world.is_main:
            run.write_config(cfg)
            run.write_plan(plan.to_json())
        one_per_row = train.one_document_per_row
        attention = model.attention_backend(world.device, compute_dtype, one_document_per_row=one_per_row)
        world.print("\n".join([plan.table(), *report]))
        meter = training.UtilizationMeter(plan, model_config, world, compute_dtype, say=world.print)
        if cfg.data.seq_len > model_config.max_position_embeddings:
            world.print(
                f"note: data.seq_len={cfg.data.seq_len} is longer than what the model was made for "
                f"(max_position_embeddings {model_config.max_position_embeddings})"
            )
        world.print(
            f"steps {step} to {num_steps} of {cfg.global_batch_size} rows x {cfg.data.seq_len} tokens on "
            f"{distributed.describe_mesh(model, world)}, attention by {attention}"
            + (f", 8-bit GEMMs by {backend}" if (backend := plan.backend(world.device.type)) else "")
            + (f", continuing {saved.folder}" if saved else "")
        )
        if step == 0 and held_out is not None:
            show_samples(model, tokenizer, held_out, cfg, world, "before training")

        # --- Training.
        with (
            checkpoint.CheckpointWriter(run.checkpoints, model, optimizer, world, cfg.checkpoint) as writer,
            training.MetricsWriter(
                run.metrics, cfg.logging, enabled=world.is_main, first_step=step, num_steps=num_steps
            ) as metrics,
        ):
            # Before the first step, and after one that was saved for a stop and left unevaluated.
            is_eval_due = is_due(step, cfg.eval_every_steps, step == num_steps)
            if held_out is not None and is_eval_due and not run.has_evaluation(step):
                metrics.write({"step": step, "eval_loss": evaluate(model, held_out, cfg, world)})
            stopped = world.stop_requested()  # from here on a signal lets the step end and be saved
            if stopped:
                world.print(f"stopped by {stopped.name}: nothing new to save")
                raise SystemExit(143)
            while step < num_steps:
                started = time.perf_counter()
                world.seed(cfg.seed, step)  # for what a copy of this file draws: a resumed run draws the same
                batches, num_targets = loader.micro_batches(step), max(1, loader.num_targets(step))
                with low.step(step, num_passes=len(batches)):
                    loss_sum = forward_backward(model, batches, num_targets, cfg, world, low)
                lr = training.learning_rate(step, num_steps, cfg.optimizer.lr, cfg.schedule)
                training.set_learning_rate(optimizer, lr)
                # Clips, steps, clears gradients; updates nothing where the loss or a gradient is not finite.
                loss, grad_norm = update(loss_sum, num_targets)
                step += 1

                step_time_s = time.perf_counter() - started
                tokens_per_s = cfg.global_batch_size * cfg.data.seq_len / step_time_s
                low_fraction = low.verified.low_precision_flops_fraction
                used = meter(step_time_s, loader.document_lengths(step - 1), low_fraction)
                record = {
                    "step": step,
                    "loss": loss,
                    "num_target_tokens": num_targets,
                    "lr": lr,
                    "grad_norm": grad_norm,
                    "num_skipped": update.num_skipped,
                    "tokens_per_s": tokens_per_s,
                    "step_time_s": step_time_s,
                    "peak_memory_gib": training.peak_memory_gib(world.device),
                    "low_precision_flops_fraction": low_fraction,
                    "mfu": used.mfu,
                    "bf16_mfu": used.bf16_mfu,
                }
                is_last = step == num_steps
                stopped, is_overdue = world.at_boundary(writer.is_overdue())
                if held_out is not None and not stopped and is_due(step, cfg.eval_every_steps, is_last):
                    record["eval_loss"] = evaluate(model, held_out, cfg, world)
                metrics.write(record)
                if update.num_skipped_in_a_row >= cfg.diverged_after_steps:
                    raise update.diverged(step, writer.wait() or last_saved, run.path)
                writer.check()
                # A skipped step has nothing new, and its checkpoint would drive out one that may be good.
                is_new = not update.num_skipped_in_a_row
                at_end = bool(stopped) or (is_last and cfg.checkpoint.at_end)
                if at_end or (is_new and (is_overdue or is_due(step, cfg.checkpoint.every_steps, False))):
                    now, eval_loss = {**facts, **update.counts()}, record.get("eval_loss")
                    last_saved = writer.save(step, now, low.state(), eval_loss=eval_loss, wait=at_end)
                if stopped:
                    how = "" if cfg.resume == "auto" else " with resume=auto"
                    world.print(
                        f"stopped by {stopped.name} after step {step}, saved; run again{how} to continue"
                    )
                    raise SystemExit(143)

        # --- Result. The export comes before the samples, whose memory can run out.
        if cfg.export.enabled:
            assert last_saved is not None  # the last step's, or the one that this run continues
            checkpoint.export_hf(last_saved, source, run.export, cfg.export, world)
            if world.is_main:
                run.write_exported(step, cfg.export)
            world.print(f"export: {run.export} (read back and compared with {last_saved})")
        else:
            newest = f"the newest checkpoint is {last_saved}" if last_saved else "there is no checkpoint"
            world.print(f"no export (export.enabled: false); {newest}")
        if held_out is not None:
            show_samples(model, tokenizer, held_out, cfg, world, "after training")


def forward_backward(
    model: models.Decoder,
    batches: Sequence[data.Batch],
    num_targets: float,
    cfg: FinetuneConfig,
    world: distributed.World,
    low: linear.LowPrecision,
) -> Tensor:
    """Gradients of the mean loss over all targets of the step, all ranks; returns this rank's summed loss."""
    loss_sum = torch.zeros((), device=world.device)
    for number, batch in enumerate(batches):
        is_last = number == len(batches) - 1
        low.micro_batch(world.data_rank * len(batches) + number)  # counted as the loader deals them out
        distributed.sync_gradients(model, is_last, each=cfg.parallel.reduce_every_micro_batch)
        loss = batch_loss(model, batch, world)
        # FSDP averages gradients over ranks, hence the factor.
        (loss * (world.data_size / num_targets)).backward()
        loss_sum += loss.detach()
    return loss_sum


def batch_loss(model: models.Decoder, batch: data.Batch, world: distributed.World) -> Tensor:
    """Sum of the cross-entropy over the batch's target tokens, float32."""
    batch = batch.to(world.device)
    # None, each row is one document: plain causal attention.
    packed = models.Documents(batch.positions_BS, batch.document_BS, batch.offsets)
    documents = None if batch.one_document_per_row else packed
    loss: Tensor = model(batch.tokens_BS, documents, batch.labels_BS)
    return loss


@torch.no_grad()
def evaluate(model: models.Decoder, rows: data.Rows, cfg: FinetuneConfig, world: distributed.World) -> float:
    """Mean loss per held-out target token, over all ranks, in the precision of training."""
    loss_sum, num_targets = torch.zeros((), device=world.device), 0
    for batch in data.evaluation_batches(
        rows, cfg.micro_batch_size, rank=world.data_rank, num_ranks=world.data_size
    ):
        loss_sum += batch_loss(model, batch, world)
        num_targets += batch.num_targets
    return world.sum(loss_sum) / max(1.0, world.sum(num_targets))


def is_due(step: int, every_steps: int, is_last: bool) -> bool:
    """Every so many steps and at the last; never for 0."""
    return every_steps > 0 and (is_last or step % every_steps == 0)


def show_samples(
    model: models.Decoder,
    tokenizer: data.Tokenizer,
    rows: data.Rows,
    cfg: FinetuneConfig,
    world: distributed.World,
    when: str,
) -> None:
    """Answers the first `num_samples` held-out prompts greedily, prints some beside the reference and
    counts.
    """
    pairs = (rows.prompt_and_answer(i) for i in range(min(cfg.num_samples, rows.num_documents)))
    samples = [(prompt, answer) for prompt, answer in pairs if len(answer)]  # a long prompt leaves none
    if not samples:
        return
    # A turn may end with a token of its own (<|im_end|>): a special token at a reference's end stops too.
    ends = {answer[-1] for _, answer in samples if not tokenizer.decode(answer[-1:])}
    stop_ids = sorted(ends | {token for token in (tokenizer.eos_id, tokenizer.pad_id) if token is not None})
    answers = training.greedy(
        model,
        [prompt for prompt, _ in samples],
        max_new_tokens=min(128, max(len(answer) for _, answer in samples)),
        stop_ids=stop_ids,
        pad_id=stop_ids[0],
        multiple_of=world.tensor_size,
    )
    texts = [
        (tokenizer.decode(prompt).strip(), tokenizer.decode(given).strip(), tokenizer.decode(wanted).strip())
        for (prompt, wanted), given in zip(samples, answers, strict=True)
    ]
    num_exact = sum(given == wanted for _, given, wanted in texts)
    world.print(f"samples {when}: {num_exact} of {len(texts)} held-out prompts answered exactly")
    for prompt, given, wanted in texts[:5]:
        world.print(f"  {prompt[-100:]!r} -> {given[:100]!r} (reference {wanted[:100]!r})")
