"""Conversations that are stored as one text, as in Anthropic's hh-rlhf:

    ⏎⏎Human: What is two?⏎⏎Assistant: A number.⏎⏎Human: And three?⏎⏎Assistant: Another one.

A turn begins with a blank line and its speaker. White space around the turn's words belongs to the notation.
"""

import re
from typing import Any

from lptune.data.messages import is_messages, read_messages

_SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def is_transcript(value: Any) -> bool:
    """Whether `value` is a text that begins with a turn of the human and has one of the assistant."""
    return isinstance(value, str) and value.lstrip().startswith("Human:") and "\n\nAssistant:" in value


def is_chat(value: Any) -> bool:
    """Whether `value` holds chat messages: a list of them, or a transcript."""
    return is_messages(value) or is_transcript(value)


def read_chat(value: Any, column: str) -> list[dict[str, Any]]:
    """`read_messages`, also of a transcript."""
    if is_transcript(value):
        _, *parts = _SPEAKER.split(value.strip())
        turns = zip(parts[::2], parts[1::2], strict=True)
        value = [{"role": _ROLES[speaker], "content": words.strip()} for speaker, words in turns]
    return read_messages(value, column)
