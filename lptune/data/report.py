"""Lines of the report on the data: what was cut, dropped or left out, and how full the packed rows are.

What is worth a line is counted where it happens, in a `Counts`, by the names in _NOTES. Columns that
nothing reads are counted over all rows: a column that is ignored silently may be the most important one of
the dataset.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np

from lptune.data.messages import ANSWER_ROLES, HIDDEN_KEYS, LOSS_KEYS, PART_KEYS, REASONING_KEYS, is_missing
from lptune.data.rows import Rows
from lptune.data.sources import Row

Counts = Counter[str]
"""How often something happened in the rows of a source, by its name."""
_NOTES = {
    "num_truncated_documents": (
        "cut {num_truncated_tokens:,} tokens off {num_truncated_documents:,} documents longer than "
        "data.seq_len={seq_len}"
    ),
    "num_dropped_documents": (
        "dropped {num_dropped_documents:,} documents without a token for the loss in their first {seq_len} "
        "tokens"
    ),
    "num_unlearned_documents": (
        "dropped {num_unlearned_documents:,} documents of which no answer is learned: weight 0, or outside "
        "the chat template's marks"
    ),
    "num_joined_answers": (
        "the tokenizer would join the beginning of {num_joined_answers:,} answers with the white space "
        "before them: prompt and answer are encoded apart, as in generation"
    ),
    "num_long_preferences": (
        "dropped {num_long_preferences:,} preferences whose two documents have more than "
        "data.seq_len={seq_len} tokens together: a part of an answer has another probability; raise "
        "data.seq_len to use them"
    ),
    "num_equal_preferences": (
        "dropped {num_equal_preferences:,} preferences whose two answers are equal: there is nothing to "
        "prefer"
    ),
    "num_long_answers": (
        "dropped {num_long_answers:,} answers whose documents have more than data.seq_len={seq_len} tokens: "
        "a part of an answer has another probability; raise data.seq_len to use them"
    ),
    "num_null_fields": (
        "left out {num_null_fields:,} null fields within messages and tools: Arrow stores in each row the "
        "keys of all rows"
    ),
    "num_unknown_tokens": "{num_unknown_tokens:,} tokens are unknown to the tokenizer (<unk>)",
    "num_placeholder_rows": (
        "{num_placeholder_rows:,} rows hold placeholders such as {{{{name}}}}, learned as they stand"
    ),
    "num_rewritten_turns": (
        "the chat template rewrites {num_rewritten_turns:,} earlier assistant turns (drops their reasoning, "
        "for instance); they are learned as the whole conversation shows them"
    ),
    "num_unknown_characters": (
        "the tokenizer drops {num_unknown_characters:,} characters that it does not know ({examples} …)"
    ),
    "num_inlined_calls": (
        "the chat template does not write the tool calls of {num_inlined_calls:,} conversations: they are "
        "written as JSON text"
    ),
    "num_unwritten": "the chat template does not write {unwritten}: they are left out",
    "num_open_chats": (
        "no special token is learned at the end of the last answer of {num_open_chats:,} of {num_chats:,} "
        "conversations: there the model will not learn where to stop"
    ),
}
OF_ANSWERS = ("num_long_preferences", "num_equal_preferences", "num_long_answers")
"""Preferences, and answers with a label, that were dropped."""


def counted(counts: Counts, names: Iterable[str] = _NOTES, **values: object) -> list[str]:
    """The lines for those of `names` that were counted. values: what their texts name beside counts."""
    return [_NOTES[name].format_map({**counts, **values}) for name in names if counts[name]]


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


_CALL_KEYS = ("tool_calls", "function_call")
_MAX_NAMES = 1000
"""Number of different names that are counted. Keys may be data, a new one in each row."""
_MAX_NAMED = 40
"""Number of names in the report, the most frequent first."""


@dataclass(frozen=True)
class Tally:
    """All that is counted of some rows. Tallies of chunks add up, in order, to that of the source."""

    counts: Counts = field(default_factory=Counter)
    unwritten: Counter[str] = field(default_factory=Counter)
    """By kind, the parts of conversations that the chat template does not write."""
    characters: Counter[str] = field(default_factory=Counter)
    """The first characters that the tokenizer does not know."""
    columns: Counter[str] = field(default_factory=Counter)
    keys: Counter[str] = field(default_factory=Counter)
    """Columns, and keys of messages, that nothing reads."""

    def add(self, other: Mapping[str, Mapping[str, int]]) -> None:
        """Adds the tally of the rows that follow, as `vars` makes it."""
        for name, counts in other.items():
            for each, count in counts.items():
                _count(getattr(self, name), each, count)

    def notes_on_unused(self, todo: str = "") -> list[str]:
        """Lines for the report on unused columns and keys. todo: what to do about a column."""
        notes, num_asking = [], self.counts["num_asking"]
        if self.columns:
            notes.append(f"columns that are not used, with their rows: {_counted(self.columns)}{todo}")
        if self.keys:
            notes.append(f"message keys that are not used, with their messages: {_counted(self.keys)}")
        if num_asking:
            notes.append(
                f"{num_asking:,} messages of system, user or tool say that they are learned; only the "
                "assistant's are"
            )
        return notes


def count_unused(
    rows: Iterable[Row], is_used: Callable[[str], bool], messages: Sequence[str], template: str, tally: Tally
) -> None:
    """Counts `rows`, and in them the columns and message keys that are not empty and that nothing reads.

    is_used: whether a column of this name is read. messages: the columns that hold messages. template: the
    text of the chat template; a message key that it names counts as read.
    """
    is_used, is_read = cache(is_used), cache(partial(_is_read, template))
    for row in rows:
        tally.counts["num_rows"] += 1
        for name, value in row.values.items():
            if not is_used(name) and not is_missing(value):
                _count(tally.columns, name)
        for name in messages:
            value = row.values.get(name)
            said = [value] if isinstance(value, dict) else value
            for message in said if isinstance(said, (list, tuple)) else ():
                if isinstance(message, dict):
                    _count_keys(message, is_read, tally)


def _count_keys(message: dict[str, Any], is_read: Callable[[str], bool], tally: Tally) -> None:
    role, content = ("from", "value") if "role" not in message else ("role", "content")
    is_answer = str(message.get(role)).lower() in ANSWER_ROLES
    for key, value in message.items():
        if is_missing(value) or key in (role, content):
            continue
        if key in LOSS_KEYS:
            tally.counts["num_asking"] += not is_answer and value == (key not in HIDDEN_KEYS)
        elif key not in _CALL_KEYS and not is_read(key):
            _count(tally.keys, key)
    parts = message.get(content)
    for part in parts if isinstance(parts, list) else ():
        for key in part if isinstance(part, dict) else ():
            if key not in PART_KEYS and not is_missing(part[key]):
                _count(tally.keys, f"{content}[].{key}")


def _is_read(template: str, key: str) -> bool:
    names = REASONING_KEYS if key in REASONING_KEYS else (key,)  # the template gets all of them
    return any(re.search(rf"[.'\"]{re.escape(name)}\b", template) for name in names)


def _count(counter: Counter[str], name: str, count: int = 1) -> None:
    if name in counter or len(counter) < _MAX_NAMES:
        counter[name] += count


def _counted(counter: Counter[str]) -> str:
    """Names with their counts: `id (7,473), source (12)`."""
    named = [f"{name:.60} ({count:,})" for name, count in counter.most_common(_MAX_NAMED)]
    more = len(counter) - len(named)
    most = " or more" * (len(counter) == _MAX_NAMES)
    return ", ".join(named) + (f" and {more:,}{most} others" if more else "")
