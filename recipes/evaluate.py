"""Evaluates any model folder or checkpoint in any precision: loss, exact match of answers, tasks of lm_eval.

    lptune run evaluate --config evaluation model.path=runs/finetune data.source=rows.jsonl
    lptune run evaluate --config evaluation prompts.source=questions.jsonl answers.extract=gsm8k
    lptune run evaluate --config evaluation harness.tasks=[hellaswag,arc_easy]

The first command measures the loss of rows. The second command answers questions greedily and compares the
answers with those of the rows. The third command runs tasks of EleutherAI's evaluation harness. One command
can do all of it, on 1..N ranks. The result is a table and one JSON file. Two commands that differ in
precision.kind alone measure what a precision costs.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lptune import checkpoint, data, distributed, inference, models
from lptune.config import EvaluateConfig, SamplingConfig


def main(cfg: EvaluateConfig) -> None:
    """Runs the evaluation that `cfg` describes. Wrong input raises UserError before a file is written."""
    with distributed.session(cfg.device) as world:
        # --- Input: all of it is read and checked before weights are read.
        inference.check_evaluation(cfg)
        opened = inference.open_model(cfg.model.path, world.print, cfg.chat_template, cfg.chat_template_key)
        tokenizer, vocab_size = opened.tokenizer, opened.config.vocab_size
        held_out: data.EvaluationRows | None = None
        questions = []
        if cfg.prompts.source is not None:
            questions = inference.read_questions(cfg.prompts, cfg.answers, tokenizer, vocab_size)
        tasks = inference.read_tasks(cfg.harness, tokenizer, world)
        if cfg.data.source:
            with distributed.machine_first(world):  # one rank tokenizes; the others read its cache
                held_out = data.prepare_evaluation(cfg.data, tokenizer, seed=cfg.seed, vocab_size=vocab_size)
            digests = {name: rows.digest for name, rows in held_out.of_source.items()}
            checkpoint.check_same("data.source", repr(digests), world)

        # --- Model. Each rank has all of it.
        loaded = opened.load(cfg.precision, cfg.compute_dtype, world, num_tokens=cfg.tokens_per_forward)
        world.print(f"{loaded.trained.folder}: {loaded.plan.headline()}")
        parts: dict[str, Any] = {}

        # --- Loss and perplexity.
        if held_out is not None:
            for line in held_out.report:
                world.print(line)
            by_source = held_out.of_source.items()
            num_batches = sum(
                -(-rows.num_rows // (cfg.batch_size * world.data_size)) for _, rows in by_source
            )
            with world.phase("measuring the loss", total=num_batches) as advance:
                sums = {name: evaluate(loaded.model, rows, cfg, world, advance) for name, rows in by_source}
            parts["held_out"] = inference.loss_result(sums)

        # --- Answers to questions. In each round, every rank answers one batch.
        if questions:
            match = inference.ExactMatch(cfg.answers.extract)
            num_done = 0
            for batches in inference.rounds(inference.in_batches(questions, cfg.batch_size), world):
                answers = answer_batch(loaded, batches[world.data_rank], cfg)
                finished = inference.gather_answers(answers, world)
                for question, answer in zip(chain(*batches), chain(*finished), strict=True):
                    match.add(question, answer)
                num_done += sum(map(len, batches))
                world.print(f"{num_done:,} of {len(questions):,} questions")
            parts["questions"] = match.result()
            if cfg.answers.output is not None and world.is_main:
                match.write(Path(cfg.answers.output).expanduser())

        # --- Tasks of EleutherAI's harness.
        if tasks is not None:
            parts["harness"] = tasks.run(loaded, cfg, world)

        # --- Result.
        world.print(inference.result_table(parts))
        inference.write_result(parts, cfg, loaded, world)


def batch_loss(model: models.Backbone, batch: data.Batch, world: distributed.World) -> Tensor:
    """The cross-entropy, summed over the targets of the batch, float32."""
    batch = batch.to(world.device)
    return model.summed_loss(batch.tokens_BS, models.DocumentBounds.of(batch), batch.labels_BS)


@torch.no_grad()
def evaluate(
    model: models.Backbone,
    rows: data.Rows,
    cfg: EvaluateConfig,
    world: distributed.World,
    advance: Callable[[float], object],
) -> tuple[float, int]:
    """The summed loss of the rows and the number of their targets, over all ranks. A collective. advance: is
    told of each batch.
    """
    loss_sum = torch.zeros((), device=world.device, dtype=torch.float64)  # of any number of batches
    for batch in data.evaluation_batches(
        rows, cfg.batch_size, rank=world.data_rank, num_ranks=world.data_size
    ):
        loss_sum += batch_loss(model, batch, world)
        advance(1)
    return world.sum(loss_sum), rows.num_target_tokens


def answer_batch(
    loaded: inference.LoadedModel, batch: Sequence[inference.Question], cfg: EvaluateConfig
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
