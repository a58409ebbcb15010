"""Columns other than prompt, response, messages and text: which are used, refused or only counted.

A system message and earlier turns belong to the document. A row that is marked as not to be learned, or that
has images, is refused. All other columns are counted over all rows and named in the report, since a column
that is ignored silently may be the most important one of the dataset.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from lptune.data.errors import RowError
from lptune.data.messages import (
    ANSWER_ROLES,
    HIDDEN_KEYS,
    LOSS_KEYS,
    PART_KEYS,
    REASONING_KEYS,
    is_missing,
)
from lptune.data.sources import Row

SYSTEM_NAMES = ("system", "system_prompt", "system_message")
HISTORY_NAMES = ("history",)
MEDIA_NAMES = ("images", "image", "videos", "video", "audios", "audio")
ROW_LOSS_KEYS = ("loss_weight", "loss_mask", "train", "trainable", "masked")
"""Those of LOSS_KEYS with only one meaning as a column: `weight` may be the weight of a patient."""
_CALL_KEYS = ("tool_calls", "function_call")
_MAX_NAMES = 1000
"""Number of different names that are counted. Keys may be data, a new one in each row."""
_MAX_NAMED = 40
"""Number of names in the report, the most frequent first."""


def refuse_unlearnable(values: Mapping[str, Any], used: Collection[str]) -> None:
    """Raises RowError for a pair that is marked as not to be learned, or that is not text alone.

    values: the row. used: the columns that are part of the document; their values are content.
    """
    for name, value in values.items():
        if name in used or is_missing(value):
            continue
        lower = name.lower()
        if lower in ("label", "kto_tag") and (value is False or str(value).lower() == "false"):
            raise RowError(
                f"column {name!r} is false, which marks a bad answer (KTO), and every answer is learned; "
                "remove the row"
            )
        if lower in MEDIA_NAMES and value not in ("", [], {}):
            raise RowError(f"column {name!r} holds {lower}, and only text can be trained on; remove the row")
        hides = ("true", "1", "1.0") if lower in HIDDEN_KEYS else ("false", "0", "0.0")
        if lower in ROW_LOSS_KEYS and str(value).lower() in hides:
            raise RowError(f"column {name!r} says that the row is not learned ({value}); remove the row")


def earlier_turns(value: Any, column: str) -> list[dict[str, str]]:
    """The messages of `history`, a list of [prompt, response]. These turns are learned like the last one."""
    if is_missing(value) or value in ("", []):
        return []
    turns: list[dict[str, str]] = []
    for pair in value if isinstance(value, (list, tuple)) else [None]:
        if not isinstance(pair, (list, tuple)) or [type(text) for text in pair] != [str, str]:
            raise RowError(f"column {column!r} must hold a list of [prompt, response]; write it as messages")
        prompt, response = pair
        if not response.strip():
            raise RowError(f"column {column!r} holds an empty response; give it text or remove the turn")
        turns += [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
    return turns


class Unused:
    """Counts the columns and message keys that are not empty and that nothing reads, over all rows."""

    def __init__(self, is_used: Callable[[str], bool], messages: Sequence[str], template: str) -> None:
        """is_used: whether a column of this name is read. messages: the columns that hold messages. template:
        the text of the chat template; a message key that it names counts as read.
        """
        self.num_rows = 0
        self._is_used = is_used
        self._messages = messages
        self._template = template
        self._columns: Counter[str] = Counter()
        self._keys: Counter[str] = Counter()
        self._num_asking = 0

    def watch(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Passes `rows` through and counts them."""
        is_used, is_read = cache(self._is_used), cache(self._is_read)
        for row in rows:
            self.num_rows += 1
            for name, value in row.values.items():
                if not is_used(name) and not is_missing(value):
                    _count(self._columns, name)
            for name in self._messages:
                value = row.values.get(name)
                messages = [value] if isinstance(value, dict) else value
                for message in messages if isinstance(messages, (list, tuple)) else ():
                    if isinstance(message, dict):
                        self._count_keys(message, is_read)
            yield row

    def _count_keys(self, message: dict[str, Any], is_read: Callable[[str], bool]) -> None:
        role, content = ("from", "value") if "role" not in message else ("role", "content")
        is_answer = str(message.get(role)).lower() in ANSWER_ROLES
        for key, value in message.items():
            if is_missing(value) or key in (role, content):
                continue
            if key in LOSS_KEYS:
                self._num_asking += not is_answer and value == (key not in HIDDEN_KEYS)
            elif key not in _CALL_KEYS and not is_read(key):
                _count(self._keys, key)
        parts = message.get(content)
        for part in parts if isinstance(parts, list) else ():
            for key in part if isinstance(part, dict) else ():
                if key not in PART_KEYS and not is_missing(part[key]):
                    _count(self._keys, f"{content}[].{key}")

    def _is_read(self, key: str) -> bool:
        names = REASONING_KEYS if key in REASONING_KEYS else (key,)  # the template gets all of them
        return any(re.search(rf"[.'\"]{re.escape(name)}\b", self._template) for name in names)

    def notes(self) -> list[str]:
        """Lines for the report on unused columns and keys."""
        notes = []
        if self._columns:
            notes.append(f"columns that are not used, with their rows: {_listed(self._columns)}")
        if self._keys:
            notes.append(f"message keys that are not used, with their messages: {_listed(self._keys)}")
        if self._num_asking:
            notes.append(
                f"{self._num_asking:,} messages of system, user or tool say that they are learned; only the "
                "assistant's are"
            )
        return notes


def _count(counter: Counter[str], name: str) -> None:
    if name in counter or len(counter) < _MAX_NAMES:
        counter[name] += 1


def _listed(counter: Counter[str]) -> str:
    """Names with their counts: `id (7,473), source (12)`."""
    named = [f"{name:.60} ({count:,})" for name, count in counter.most_common(_MAX_NAMED)]
    more = len(counter) - len(named)
    most = " or more" * (len(counter) == _MAX_NAMES)
    return ", ".join(named) + (f" and {more:,}{most} others" if more else "")
