"""Data: files and hub datasets -> documents -> tokens -> packed rows -> batches.

    tokenizer = load_tokenizer(checkpoint_folder, cfg.data.chat_template)
    train, evaluation, report = prepare(cfg.data, tokenizer, seed=cfg.seed, vocab_size=base.config.vocab_size)
    loader = Loader(train, seed=cfg.seed, global_batch_size=32, micro_batch_size=4, rank=0, num_ranks=1)
    batches = loader.micro_batches(step)

The result is a function of the files, the config and the seed: rows, order and batches are the same in every
process, on any number of ranks.
"""

from lptune.data.packing import Packing, pack
from lptune.data.prepare import (
    EvaluationRows,
    Prepared,
    prepare,
    prepare_evaluation,
    prepare_labelled,
    prepare_preferences,
    prepare_texts,
)
from lptune.data.prompts import Prompt, PromptWriter, read_prompts
from lptune.data.rows import Batch, Loader, Rows, evaluation_batches
from lptune.data.templates import ChatTemplate
from lptune.data.tokenizer import Tokenizer, check_same_tokens, load_tokenizer
from lptune.data.turns import end_ids, learned_stops

__all__ = [
    "Batch",
    "ChatTemplate",
    "EvaluationRows",
    "Loader",
    "Packing",
    "Prepared",
    "Prompt",
    "PromptWriter",
    "Rows",
    "Tokenizer",
    "check_same_tokens",
    "end_ids",
    "evaluation_batches",
    "learned_stops",
    "load_tokenizer",
    "pack",
    "prepare",
    "prepare_evaluation",
    "prepare_labelled",
    "prepare_preferences",
    "prepare_texts",
    "read_prompts",
]
