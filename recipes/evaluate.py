"""Evaluates any model folder or checkpoint in any precision: loss and perplexity, and exact match of answers.

    lptune run evaluate --config evaluation model.path=runs/finetune data.source=rows.jsonl
    lptune run evaluate --config evaluation prompts.source=questions.jsonl answers.extract=gsm8k

The first command measures the loss of rows, on 1..N ranks. The second command answers questions greedily and
compares the answers with those of the rows. One command can do both. The result is a table and one JSON file.
Two commands that differ in precision.kind alone measure what a precision costs.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lptune import data, distributed, inference, models
from lptune.config import EvaluateConfig, SamplingConfig


def main(cfg: EvaluateConfig) -> None:
    """Runs the evaluation that `cfg` describes. Wrong input raises UserError before a file is written."""
    with distributed.session(cfg.device) as world:
        # --- Model. Each rank has all of it.
        inference.check_evaluation(cfg, world)
        loaded = inference.load_model(
            cfg.model.path,
            cfg.precision,
            cfg.compute_dtype,
            world,
            num_tokens=cfg.tokens_per_forward,
            chat_template=cfg.chat_template,
        )
        model, tokenizer, vocab_size = loaded.model, loaded.tokenizer, loaded.model.config.vocab_size
        summary, *_ = loaded.plan.table().splitlines()
        world.print(f"{loaded.trained.folder}: {summary}")
        parts: dict[str, Any] = {}

        # --- Loss and perplexity. Questions are read first: a bad row is reported before hours of work.
        questions = []
        if cfg.prompts.source is not None:
            questions = inference.read_questions(cfg.prompts, cfg.answers, tokenizer, vocab_size)
        if cfg.data.source:
            with distributed.machine_first(world):  # one rank tokenizes; the others read its cache
                held_out, report = data.prepare_evaluation(
                    cfg.data, tokenizer, seed=cfg.seed, vocab_size=vocab_size
                )
            for line in report:
                world.print(line)
            sums = {name: evaluate(model, rows, cfg, world) for name, rows in held_out.items()}
            parts["held_out"] = inference.loss_result(sums)

        # --- Answers to questions, batch by batch.
        if questions:
            match = inference.ExactMatch(cfg.answers.extract)
            for first in range(0, len(questions), cfg.batch_size):
                batch = questions[first : first + cfg.batch_size]
                for question, answer in zip(batch, answer_batch(loaded, batch, cfg), strict=True):
                    match.add(question, answer)
                world.print(f"{first + len(batch):,} of {len(questions):,} questions")
            parts["questions"] = match.result()
            if cfg.answers.output is not None:
                match.write(Path(cfg.answers.output).expanduser())

        # --- Result.
        world.print(inference.result_table(parts))
        inference.write_result(parts, cfg, loaded, world)


def batch_loss(model: models.Decoder, batch: data.Batch, world: distributed.World) -> Tensor:
    """The cross-entropy, summed over the targets of the batch, float32."""
    batch = batch.to(world.device)
    loss: Tensor = model(batch.tokens_BS, models.DocumentBounds.of(batch), batch.labels_BS)
    return loss


@torch.no_grad()
def evaluate(
    model: models.Decoder, rows: data.Rows, cfg: EvaluateConfig, world: distributed.World
) -> tuple[float, int]:
    """The summed loss of the rows and the number of their targets, over all ranks. A collective."""
    loss_sum = torch.zeros((), device=world.device, dtype=torch.float64)  # of any number of batches
    for batch in data.evaluation_batches(
        rows, cfg.batch_size, rank=world.data_rank, num_ranks=world.data_size
    ):
        loss_sum += batch_loss(model, batch, world)
    return world.sum(loss_sum), rows.num_target_tokens


def answer_batch(
    loaded: inference.LoadedModel, batch: list[inference.Question], cfg: EvaluateConfig
) -> list[inference.Answer]:
    """The greedy answers to a batch of questions."""
    answers = [
        inference.Answer(
            loaded.tokenizer,
            data.end_ids(loaded.tokenizer),
            cfg.answers.stop,
            cfg.answers.max_new_tokens,
            after=question.prompt.ids if question.prompt.is_text else (),
        )
        for question in batch
    ]
    greedy = inference.Sampler(SamplingConfig(temperature=0), cfg.seed, range(len(batch)))
    prompts = [question.prompt.ids for question in batch]
    for _ in inference.decode(loaded.model, prompts, answers, greedy):
        pass
    return answers
