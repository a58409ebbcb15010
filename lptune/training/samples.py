"""Prints the answers of the model to held-out prompts beside the reference answers.

Each new token runs the whole row again, without a key-value cache, so a sample costs one forward of its
length for each token. This is good enough for twenty short prompts. For more there is inference.decode, which
has a cache. It does not serve a model in training: that is compiled for rows of one length, FSDP gathers its
weights by hooks on `forward`, and sequence parallelism cuts rows over ranks, where a new token is one.
"""

import re
import textwrap
from collections.abc import Sequence
from typing import TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lptune.base.errors import UserError
from lptune.data import Rows, Tokenizer
from lptune.data.errors import RowError
from lptune.distributed import World
from lptune.models import Backbone
from lptune.training.evaluating import evaluating

_MOST_TOKENS = 128
_NUM_PRINTED = 5
_COLUMNS = 76
_QUESTION = "Is this the question?"


class Sample(TypedDict):
    """The answer to one held-out prompt, as samples.jsonl stores it. prompt: the last question, without the
    words that the chat template writes around it.
    """

    step: int
    when: str
    prompt: str
    answer: str
    reference: str


def show_samples(
    model: Backbone,
    tokenizer: Tokenizer,
    rows: Rows | None,
    num_samples: int,
    world: World,
    step: int,
    *,
    every: int = 1,
) -> list[Sample]:
    """Answers the first `num_samples` prompts of `rows`, of several sources in turns, greedily; prints how
    many answers equal the reference, and some of the answers. A collective. (The prompt of raw text is its
    beginning.)

    step: number of finished steps; 0: before training. every: 2 for preferences, whose documents are chosen
    and rejected answers in turns; answers that are labelled undesirable are no reference either. Returns all
    answers, on every rank; none if `rows` is None or has no answer.
    """
    if rows is None:
        return []
    wanted = [i for i in range(0, rows.num_documents, every) if rows.documents.is_desirable_N[i]]
    pairs = (rows.prompt_and_answer(i) for i in rows.in_turns(wanted)[:num_samples])
    prompts = [(prompt, answer) for prompt, answer in pairs if len(answer)]  # empty after a long prompt
    if not prompts:
        return []
    # A turn may end with a special token (<|im_end|>): such a token at the end of a reference stops, too.
    ends = {answer[-1] for _, answer in prompts if not tokenizer.decode(answer[-1:])}
    stop_ids = sorted(ends | {token for token in (tokenizer.eos_id, tokenizer.pad_id) if token is not None})
    with world.phase(f"answering {len(prompts)} held-out prompt{'s' * (len(prompts) > 1)}"):
        answers = greedy(
            model,
            [prompt for prompt, _ in prompts],
            max_new_tokens=min(_MOST_TOKENS, max(len(answer) for _, answer in prompts)),
            stop_ids=stop_ids,
            pad_id=stop_ids[0],
            multiple_of=world.ranks_per_row,
        )
    when = "after training" if step else "before training"
    around = _around_a_question(tokenizer)
    samples = [
        Sample(
            step=step,
            when=when,
            prompt=_question(tokenizer.decode(prompt).strip(), *around),
            answer=tokenizer.decode(given).strip(),
            reference=tokenizer.decode(wanted).strip(),
        )
        for (prompt, wanted), given in zip(prompts, answers, strict=True)
    ]
    num_exact = sum(sample["answer"] == sample["reference"] for sample in samples)
    lines = [f"samples {when}: {num_exact} of {len(samples)} held-out prompts answered exactly"]
    for sample in samples[:_NUM_PRINTED]:
        lines += _lines(sample)
    world.print("\n".join(lines))
    return samples


@evaluating
def greedy(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    pad_id: int,
    multiple_of: int = 1,
) -> list[list[int]]:
    """The greedy continuation of each prompt, up to (without) its first stop token.

    model: called as model(tokens_BS) -> logits (B, S, V). Rows are padded on the right; causal attention
    keeps the padding out of every token that is read. multiple_of: the length of rows is a multiple of it
    (for sequence and context parallelism).
    """
    if not prompts:
        return []
    device = next(model.parameters()).device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    length = -(-(int(lengths.max()) + max_new_tokens) // multiple_of) * multiple_of
    tokens_BS = torch.full((len(prompts), length), pad_id, device=device)
    for row, prompt in enumerate(prompts):
        tokens_BS[row, : len(prompt)] = torch.tensor(prompt, device=device)
    rows = torch.arange(len(prompts), device=device)
    stops = torch.tensor(sorted(set(stop_ids)), device=device)
    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for offset in range(max_new_tokens):
        logits_BSV: Tensor = model(tokens_BS)
        next_B = logits_BSV[rows, lengths + offset - 1].argmax(dim=-1)
        if dist.is_initialized():
            # Ranks that add in another order may break a tie differently, and would diverge here.
            dist.broadcast(next_B, 0)
        tokens_BS[rows, lengths + offset] = next_B
        done |= torch.isin(next_B, stops)
        if done.all():
            break
    answers = []
    for row, start in enumerate(lengths.tolist()):
        answer = tokens_BS[row, start : start + max_new_tokens].tolist()
        ends = [i for i, token in enumerate(answer) if token in set(stop_ids)]
        answers.append(answer[: ends[0]] if ends else answer)
    return answers


def _lines(sample: Sample) -> list[str]:
    is_exact = sample["answer"] == sample["reference"]
    return [
        f"  {_line(sample['prompt'], _COLUMNS)}",
        f"    answer     {_line(sample['answer'], _COLUMNS - 14)}{' (exact)' if is_exact else ''}",
        *([] if is_exact else [f"    reference  {_line(sample['reference'], _COLUMNS - 14)}"]),
    ]


def _line(text: str, width: int) -> str:
    return textwrap.shorten(text, width, placeholder=" ...") or "(nothing)"


def _around_a_question(tokenizer: Tokenizer) -> tuple[str, str]:
    """What the chat template writes in the line before a question and after it, without special tokens; ""
    where it writes nothing, or there is no template.
    """
    if tokenizer.chat_template is None:
        return "", ""
    question = {"role": "user", "content": _QUESTION}
    try:
        text = tokenizer.render_chat([question], add_generation_prompt=True)
    except (RowError, UserError):  # the template wants another conversation
        return "", ""
    before, _, after = tokenizer.decode(tokenizer.encode(text, add_special=False)).partition(_QUESTION)
    return (before.split() or [""])[-1], after.strip()


def _question(prompt: str, before: str, after: str) -> str:
    """The last question of `prompt`, without the words that the chat template writes around it."""
    prompt = prompt.removesuffix(after).strip() if after else prompt
    if before:
        # The template's word stands alone in a line, or opens one.
        *_, prompt = re.split(rf"(?:^|\n){re.escape(before)}\s", prompt)
    return prompt.strip()
