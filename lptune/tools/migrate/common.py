"""What the three tables share: optimizers, batches, precision, and the sentences about them."""

from lptune.base.errors import UserError
from lptune.tools.migrate.draft import Draft

ADAM = "Adam adds the decay to the gradient; AdamW does not"
DECAY = "here on matrices only, not on norms and biases"
EIGHT_BIT = "8-bit moments there, 2 bytes per parameter; here float32, 8 bytes"
MASTER = (
    "pure bf16 there; here weights, gradients and moments are float32 (16 bytes per parameter, not 8) and "
    "matmuls bf16, so that small updates are not lost"
)
PROMPTS = (
    "the text around a prompt is the tokenizer's chat template (or data.chat_template, "
    "data.prompt_template); look at rows with `lptune data`"
)
ROWS = "rows per step over all ranks"
WARMUP = "the first step has lr / warmup_steps, and 0 there"
PAGED = "paged to host memory there; here moments stay on the GPU (parallel.cpu_offload moves them)"


def set_batches(
    draft: Draft,
    micro: tuple[int, list[str]],
    whole: tuple[int | None, list[str]],
    model_ranks: int,
    steps: int = 1,
) -> None:
    """micro_batch_size and global_batch_size, for `draft.num_ranks` ranks.

    micro: rows per forward, and the keys that say so. whole: rows per step, None where they follow from the
    number of ranks, and their keys. model_ranks: ranks that share a row (tensor, context and pipeline
    parallelism). steps: of accumulation.
    """
    size, keys = micro
    total, total_keys = whole
    if draft.num_ranks % model_ranks:
        raise UserError(
            f"{draft.file}: {draft.num_ranks} ranks (--world-size) do not divide among {model_ranks} that "
            "share a model; give the number of ranks that the config ran on"
        )
    if total is None:
        data_ranks = draft.num_ranks // model_ranks
        total = size * steps * data_ranks
        draft.assumed.append(
            f"{draft.num_ranks} rank{'s' * (draft.num_ranks > 1)} (--world-size)"
            f"{f', {model_ranks} for each row' * (model_ranks > 1)}: a step has {size} x {steps} x "
            f"{data_ranks} = {total} rows. Here global_batch_size does not change with the number of ranks."
        )
    if total % size:
        raise UserError(f"{draft.file}: {total} rows per step are no multiple of {size} rows per forward")
    draft.set("micro_batch_size", size, *keys)
    draft.set("global_batch_size", total, *total_keys)


def set_defaults(draft: Draft, defaults: dict[str, object]) -> None:
    """Writes out what the other tool takes for keys that its file does not name, where ours differs."""
    for ours, value in defaults.items():
        if draft.value_of(ours) is None:
            draft.set(ours, value)
