"""Prints the answers of the model to held-out prompts beside the reference answers."""

from lptune.data import Rows, Tokenizer
from lptune.distributed import World
from lptune.models import Decoder
from lptune.training.generate import greedy

_MOST_TOKENS = 128
_NUM_PRINTED = 5


def show_samples(
    model: Decoder, tokenizer: Tokenizer, rows: Rows | None, num_samples: int, world: World, when: str
) -> None:
    """Answers the first `num_samples` prompts of `rows` greedily; prints how many answers equal the
    reference, and some of the answers. A collective.

    when: for example "before training". Does nothing if `rows` is None or has no answer.
    """
    if rows is None:
        return
    pairs = (rows.prompt_and_answer(i) for i in range(min(num_samples, rows.num_documents)))
    samples = [(prompt, answer) for prompt, answer in pairs if len(answer)]  # empty after a long prompt
    if not samples:
        return
    # A turn may end with a special token (<|im_end|>): such a token at the end of a reference stops, too.
    ends = {answer[-1] for _, answer in samples if not tokenizer.decode(answer[-1:])}
    stop_ids = sorted(ends | {token for token in (tokenizer.eos_id, tokenizer.pad_id) if token is not None})
    with world.phase(f"answering {len(samples)} held-out prompts"):
        answers = greedy(
            model,
            [prompt for prompt, _ in samples],
            max_new_tokens=min(_MOST_TOKENS, max(len(answer) for _, answer in samples)),
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
    for prompt, given, wanted in texts[:_NUM_PRINTED]:
        world.print(f"  {prompt[-100:]!r} -> {given[:100]!r} (reference {wanted[:100]!r})")
