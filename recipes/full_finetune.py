"""Full fine-tuning of a Hugging Face checkpoint, all weights trained, on 1..N ranks.

    lptune run full_finetune --config llama3_2/1b data.source=rows.jsonl precision.kind=int8_rowcol

The file is the whole story: check the input, build and shard the model, step, evaluate, save, export. Copy it
(`lptune cp full_finetune my_recipe.py`) and edit it to try an idea; the library owns how, this file owns when.
"""

import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from lptune import checkpoint, data, distributed, linear, models, training
from lptune.config import DivergedError, FinetuneConfig


def main(cfg: FinetuneConfig) -> None:
    """Runs the training that `cfg` describes. Raises UserError before anything is written if the input is wrong."""
    training.check_logging(cfg.logging)
    with distributed.session(cfg.device) as world:
        # --- Input. All of it is checked before the run's folder is made.
        source = checkpoint.read_index(Path(cfg.model.path))
        model_config = models.read_config(source.folder)
        model = models.build_on_meta(model_config)
        checkpoint.match_tensors(model, source)
        plan = linear.convert(model, cfg.precision)
        tokenizer = data.load_tokenizer(source.folder, cfg.data.chat_template)
        rows = data.prepare(cfg.data, tokenizer, seed=cfg.seed, vocab_size=model_config.vocab_size)
        loader = data.Loader(
            rows.train,
            seed=cfg.seed,
            global_batch_size=cfg.global_batch_size,
            micro_batch_size=cfg.micro_batch_size,
            rank=world.rank,
            num_ranks=world.data_size,
        )
        num_steps = cfg.num_steps or loader.num_steps(cfg.num_epochs)
        fingerprint = checkpoint.fingerprint(cfg, rows.train.digest)
        output_dir = Path(cfg.output_dir)
        saved = checkpoint.find_checkpoint(output_dir / "checkpoints", cfg.resume, world.print)
        if saved is not None:
            checkpoint.check_fingerprint(saved, fingerprint)
            if saved.step >= num_steps and (output_dir / "export").exists():
                world.print(f"already finished: {saved.folder} is step {saved.step} of {num_steps}")
                return

        # --- Model: checkpointing, compilation, sharding, then real storage and weights.
        distributed.parallelize(model, world, cfg)
        model.to_empty(device=world.device)
        model.reset_buffers(world.device)
        optimizer = training.build_optimizer(model, cfg.optimizer)
        if saved is None:
            checkpoint.load_hf(model, source)
        else:
            checkpoint.load_state(saved, model, optimizer)

        with checkpoint.open_run_folder(output_dir, cfg.resume, saved, world) as run:
            step = saved.step if saved else 0
            if world.is_main:
                run.write_config(cfg)
                run.write_plan(plan.to_json())
            world.print("\n".join([*rows.report, plan.table()]))
            world.print(
                f"{num_steps} steps of {cfg.global_batch_size} rows x {cfg.data.seq_len} tokens on {world.size} x {world.device.type}, "
                f"attention {model.attention_backend(world.device, getattr(torch, cfg.compute_dtype))}"
                + (f", continuing {saved.folder}" if saved else "")
            )
            metrics = training.MetricsWriter(
                run.metrics, cfg.logging, enabled=world.is_main, num_steps=num_steps, first_step=step, name=run.path.name
            )
            with metrics:
                evaluates = rows.evaluation is not None and cfg.eval_every_steps > 0
                if step == 0:
                    show_samples(model, tokenizer, rows.evaluation, cfg, world, "before training")
                    if evaluates:
                        metrics.write({"step": 0, "eval_loss": evaluate(model, rows.evaluation, cfg, world)})

                # --- Training.
                low_precision_fraction = None if plan.converted else 0.0
                while step < num_steps:
                    started = time.perf_counter()
                    batches = loader.micro_batches(step)
                    num_targets = max(1.0, world.sum(sum(batch.num_targets for batch in batches)))
                    unverified = low_precision_fraction is None and cfg.precision.verify
                    loss_sum = torch.zeros((), device=world.device)
                    with linear.verify_step(model, plan, len(batches)) if unverified else nullcontext() as verified:
                        for number, batch in enumerate(batches, start=1):
                            model.set_requires_gradient_sync(number == len(batches))
                            loss = batch_loss(model, batch.to(world.device))
                            # FSDP averages gradients over ranks; the loss is a mean over all targets of the step.
                            (loss * (world.data_size / num_targets)).backward()
                            loss_sum += loss.detach()
                    if verified is not None:
                        low_precision_fraction = verified.low_precision_flops_fraction
                        world.print(f"verified: {verified.num_gemms} low-precision GEMMs ran in the first step, as planned")

                    grad_norm = training.clip_grad_norm(model, cfg.max_grad_norm)
                    mean_loss = world.sum(loss_sum) / num_targets
                    if not (torch.isfinite(grad_norm) and torch.isfinite(torch.tensor(mean_loss))):
                        raise DivergedError(
                            f"step {step + 1}: loss {mean_loss}, gradient norm {float(grad_norm)}; weights were not updated. "
                            f"Lower optimizer.lr, or continue from a checkpoint in {run.checkpoints}"
                        )
                    lr = training.learning_rate(step, num_steps, cfg.optimizer.lr, cfg.schedule)
                    training.set_learning_rate(optimizer, lr)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                    step += 1

                    step_time_s = time.perf_counter() - started
                    tokens_per_s = cfg.global_batch_size * cfg.data.seq_len / step_time_s
                    used = training.utilization(
                        tokens_per_s * plan.flops_per_token, low_precision_fraction or 0.0, world.device, world.size
                    )
                    record = {
                        "step": step,
                        "loss": mean_loss,
                        "num_target_tokens": int(num_targets),
                        "lr": lr,
                        "grad_norm": float(grad_norm),
                        "tokens_per_s": tokens_per_s,
                        "step_time_s": step_time_s,
                        "peak_memory_gib": training.peak_memory_gib(world.device),
                        "low_precision_flops_fraction": low_precision_fraction,
                        "mfu": used.mfu,
                        "bf16_mfu": used.bf16_mfu,
                    }
                    if evaluates and (step % cfg.eval_every_steps == 0 or step == num_steps):
                        record["eval_loss"] = evaluate(model, rows.evaluation, cfg, world)
                    metrics.write(record)
                    every = cfg.checkpoint.every_steps
                    if step == num_steps or (every and step % every == 0):
                        checkpoint.save_state(
                            run.checkpoints, step, model, optimizer, fingerprint, world, cfg.checkpoint.keep_last
                        )

            # --- Result.
            show_samples(model, tokenizer, rows.evaluation, cfg, world, "after training")
            checkpoint.export_hf(
                model,
                source,
                run.export,
                cfg.export.dtype,
                world,
                card={
                    "name": run.path.name,
                    "base": cfg.model.path,
                    "data": cfg.data.source,
                    "precision of training": cfg.precision.kind,
                    "steps": step,
                },
                chat_template=tokenizer.chat_template if cfg.data.chat_template else None,
            )
            world.print(f"export: {run.export} (reloaded and compared tensor by tensor)")


def batch_loss(model: torch.nn.Module, batch: data.Batch) -> Tensor:
    """Sum of the cross-entropy over the batch's target tokens, float32."""
    documents = models.Documents(batch.positions_BS, batch.document_BS, batch.offsets)
    loss: Tensor = model(batch.tokens_BS, documents, batch.labels_BS)
    return loss


@torch.no_grad()
def evaluate(model: torch.nn.Module, rows: data.Rows, cfg: FinetuneConfig, world: distributed.World) -> float:
    """Mean loss per held-out target token, over all ranks."""
    loss_sum, num_targets = torch.zeros((), device=world.device), 0
    for batch in data.evaluation_batches(rows, cfg.micro_batch_size, rank=world.rank, num_ranks=world.data_size):
        loss_sum += batch_loss(model, batch.to(world.device))
        num_targets += batch.num_targets
    return world.sum(loss_sum) / max(1.0, world.sum(num_targets))


def show_samples(
    model: torch.nn.Module,
    tokenizer: data.Tokenizer,
    rows: data.Rows | None,
    cfg: FinetuneConfig,
    world: distributed.World,
    when: str,
) -> None:
    """Answers the first held-out prompts greedily and prints them beside the reference."""
    if rows is None or not cfg.num_samples:
        return
    samples = [rows.prompt_and_answer(i) for i in range(min(cfg.num_samples, rows.num_documents))]
    # A turn may end with a token of its own (<|im_end|>): a special token at the end of a reference stops too.
    ends = {answer[-1] for _, answer in samples if not tokenizer.decode(answer[-1:])}
    stop_ids = sorted(ends | {token for token in (tokenizer.eos_id, tokenizer.pad_id) if token is not None})
    answers = training.greedy(
        model,
        [prompt for prompt, _ in samples],
        max_new_tokens=min(64, max(len(answer) for _, answer in samples)),
        stop_ids=stop_ids,
        pad_id=stop_ids[0] if stop_ids else 0,
    )
    wanted = [tokenizer.decode(answer) for _, answer in samples]
    given = [tokenizer.decode(answer) for answer in answers]
    num_exact = sum(a.strip() == b.strip() for a, b in zip(given, wanted, strict=True))
    world.print(f"samples {when}: {num_exact} of {len(samples)} held-out prompts answered exactly")
    for (prompt, _), got, want in list(zip(samples, given, wanted, strict=True))[:5]:
        world.print(f"  {tokenizer.decode(prompt)[-100:]!r} -> {got[:100]!r} (reference {want[:100]!r})")
