"""Answers a file of prompts, or chats, with any model folder or checkpoint in any precision.

    lptune run generate --config generation model.path=runs/finetune
    lptune run generate --config generation model.path=runs/finetune prompts.source=x.jsonl output=y.jsonl

The first command answers what is typed. The second command writes each row of x.jsonl with its answer, on
1..N ranks, and continues where it was stopped. To try an idea, copy this file (`lptune cp generate
my_recipe.py`) and edit the copy. The recipe decides what is answered and when; inference.decode has the loop
over tokens.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

import lptune
from lptune import data, distributed, inference
from lptune.base.errors import UserError
from lptune.base.text import printable
from lptune.config import GenerateConfig
from lptune.launch import preemption


def main(cfg: GenerateConfig) -> None:
    """Runs the job that `cfg` describes. Wrong input raises UserError before an answer is written."""
    with distributed.session(cfg.device) as world:

        def say(line: str) -> None:  # stdout is for answers
            if world.is_main:
                print(printable(line), file=sys.stderr, flush=True)

        # --- Input: all of it is checked before weights are read.
        opened = inference.open_model(cfg.model.path, say, cfg.prompts.chat_template, "prompts.chat_template")
        config, tokenizer = opened.config, opened.tokenizer
        if cfg.prompts.source is not None:
            prompts = data.read_prompts(cfg.prompts, tokenizer, config.vocab_size)
        else:
            writer = data.PromptWriter(cfg.prompts, tokenizer, config.vocab_size)
            if world.size > 1:
                raise UserError(
                    f"generate: typed prompts need one rank, found {world.size}; set prompts.source"
                )

        # --- Model. Each rank has all of it.
        num_tokens = cfg.batch_size  # of all forwards but the first, which runs the prompts
        loaded = opened.load(cfg.precision, cfg.compute_dtype, world, num_tokens=num_tokens)
        say(f"{loaded.trained.folder}: {loaded.plan.headline()}")

        # --- Chat: one prompt at a time. Its answer is printed while it grows.
        if cfg.prompts.source is None:
            for number, prompt in enumerate(chat := inference.Chat(writer)):
                (answer,), tokens = answer_batch(loaded, [prompt], number, cfg)
                for _ in tokens:
                    chat.show(answer)
            return

        # --- A file: in each round, every rank answers a batch. The round is written when all are done.
        assert cfg.output is not None
        num_cut = num_beyond = 0
        with inference.AnswerFile(Path(cfg.output), cfg.answer_column, settings(cfg, loaded), world) as file:
            for batches in file.rounds(prompts, cfg.batch_size):
                first = file.num_answers + world.data_rank * cfg.batch_size
                answers, tokens = answer_batch(loaded, batches[world.data_rank], first, cfg)
                for _ in tokens:
                    if preemption.requested():
                        break
                finished = inference.gather_answers(answers, world)
                if stopped := world.stop_requested():  # the answers of this round are dropped
                    raise file.stopped(stopped)
                file.write(batches, finished)
                for prompt, done in zip(chain(*batches), chain(*finished), strict=True):
                    num_cut += done.ended_by == "length"
                    num_beyond += len(prompt.ids) + done.num_tokens > config.max_position_embeddings
                say(f"{file.num_answers:,} answers")
            say(f"{file.path}: {file.num_answers:,} answers; {num_cut:,} new ones end at max_new_tokens")
            if num_beyond:
                most = config.max_position_embeddings
                say(f"note: {num_beyond:,} rows are longer than the model was trained for ({most:,} tokens)")


def answer_batch(
    loaded: inference.LoadedModel, batch: Sequence[data.Prompt], first: int, cfg: GenerateConfig
) -> tuple[list[inference.Answer], Iterator[None]]:
    """The answers to a batch of prompts, still empty, and an iterator that adds a token to each of them.

    first: the number of the first prompt in the job, on which its random choices depend.
    """
    sampling, end_ids = cfg.sampling, data.end_ids(loaded.tokenizer)
    answers = [
        inference.Answer(
            loaded.tokenizer,
            end_ids,
            sampling.stop,
            sampling.max_new_tokens,
            after=prompt.ids if prompt.is_text else (),
        )
        for prompt in batch
    ]
    sample = inference.Sampler(sampling, cfg.seed, range(first, first + len(batch)))
    return answers, inference.decode(loaded.model, [prompt.ids for prompt in batch], answers, sample)


def settings(cfg: GenerateConfig, loaded: inference.LoadedModel) -> dict[str, Any]:
    """What decides the answers. A job continues a file only with equal settings."""
    return {
        "model": loaded.trained.digest(),
        "chat_template": loaded.tokenizer.chat_template,
        "prompts": asdict(replace(cfg.prompts, source=None, max_rows=None)),  # rows themselves are compared
        "sampling": asdict(cfg.sampling),
        "precision": asdict(cfg.precision),
        "compute_dtype": cfg.compute_dtype,
        "seed": cfg.seed,
        "versions": {"lptune": lptune.__version__, "torch": str(torch.__version__)},
    }
