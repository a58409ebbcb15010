"""Lines of the report on the data: what was cut, dropped or skipped, and how full the packed rows are."""

import numpy as np

from lptune.config import DataConfig
from lptune.data.errors import BadRows
from lptune.data.rows import Rows
from lptune.data.tokenization import Counts


def losses(cfg: DataConfig, counts: Counts, bad: BadRows) -> list[str]:
    """What was lost or is odd in the rows of a source."""
    lines = []
    for key, text in (("prompt_template", cfg.prompt_template), ("system_prompt", cfg.system_prompt)):
        if text is not None and "\\n" in text:
            lines.append(
                f"data.{key} holds a backslash and an n, not a line break; a shell makes one of $'…\\n…'"
            )
    if bad.count:
        lines.append(f"skipped {bad.count:,} bad rows, the first: {bad.first}")
    if counts.num_truncated_documents:
        lines.append(
            f"cut {counts.num_truncated_tokens:,} tokens off {counts.num_truncated_documents:,} documents "
            "longer than "
            f"data.seq_len={cfg.seq_len}"
        )
    if counts.num_dropped_documents:
        lines.append(
            f"dropped {counts.num_dropped_documents:,} documents without a token for the loss in their first "
            f"{cfg.seq_len} tokens"
        )
    if counts.num_unlearned_documents:
        lines.append(
            f"dropped {counts.num_unlearned_documents:,} documents of which no answer is learned: weight 0, "
            "or outside the chat template's marks"
        )
    if counts.num_joined_answers:
        lines.append(
            f"the tokenizer would join the beginning of {counts.num_joined_answers:,} answers with the white "
            "space before them: prompt and answer are encoded apart, as in generation"
        )
    lines += answer_losses(cfg, counts)
    if counts.num_null_fields:
        lines.append(
            f"left out {counts.num_null_fields:,} null fields within messages and tools: Arrow stores in "
            "each row the keys of all rows"
        )
    if counts.num_unknown_tokens:
        lines.append(f"{counts.num_unknown_tokens:,} tokens are unknown to the tokenizer (<unk>)")
    if counts.num_placeholder_rows:
        lines.append(
            f"{counts.num_placeholder_rows:,} rows hold placeholders such as {{{{name}}}}, learned as they "
            "stand"
        )
    return lines


def answer_losses(cfg: DataConfig, counts: Counts) -> list[str]:
    """The preferences and the answers with a label that were dropped."""
    lines = []
    if counts.num_long_preferences:
        lines.append(
            f"dropped {counts.num_long_preferences:,} preferences whose two documents have more than "
            f"data.seq_len={cfg.seq_len} tokens together: a part of an answer has another probability; raise "
            "data.seq_len to use them"
        )
    if counts.num_equal_preferences:
        lines.append(
            f"dropped {counts.num_equal_preferences:,} preferences whose two answers are equal: there is "
            "nothing to prefer"
        )
    if counts.num_long_answers:
        lines.append(
            f"dropped {counts.num_long_answers:,} answers whose documents have more than "
            f"data.seq_len={cfg.seq_len} tokens: a part of an answer has another probability; raise "
            "data.seq_len to use them"
        )
    return lines


def describe(name: str, rows: Rows, reading: str) -> str:
    """How many documents, tokens and packed rows there are. reading: as in `prepare.py`."""
    of_answers = ""
    if reading == "preferences":
        of_answers = f"{rows.num_preferences:,} preferences, "
    elif reading == "labelled":
        num_desirable = int(np.count_nonzero(rows.documents.is_desirable_N))
        of_answers = (
            f"{num_desirable:,} desirable and {rows.num_documents - num_desirable:,} undesirable answers, "
        )
    return (
        f"{name}: {of_answers}{rows.num_documents:,} documents, {rows.num_tokens:,} tokens, "
        f"{rows.num_target_tokens:,} of them in the loss\n"
        f"  {rows.num_rows:,} rows of {rows.seq_len} tokens, {rows.fill:.1%} full"
    )
