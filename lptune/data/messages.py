"""Reads chat messages of two dialects, and transcripts, into the common form that chat templates read.

OpenAI: `messages` of {"role", "content"}, with `tool_calls`, role `tool`, content in parts, `weight` 0 for an
answer that is context only. ShareGPT: `conversations` of {"from", "value"} with human, gpt, system,
function_call, observation. The common form is transformers': roles system, user, assistant, tool; a call is
`{"type": "function", "function": {"name": …, "arguments": {…}}}` with its arguments as an object, not as a
string of JSON, because most templates write them with `tojson` (`ChatTemplate` gives the text to those that
take text); a tool is `{"type": "function", "function": {…}}`.
Several keys are in use to mark an answer as not learned; the common form has `weight` 0 for all of them.

A transcript is a conversation that is stored as one text, as in Anthropic's hh-rlhf:

    ⏎⏎Human: What is two?⏎⏎Assistant: A number.⏎⏎Human: And three?⏎⏎Assistant: Another one.

A turn begins with a blank line and its speaker. White space around the turn's words belongs to the notation.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lptune.base.errors import closest
from lptune.data.errors import RowError

_ROLES = {
    "system": "system", "developer": "developer", "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "model": "assistant", "bot": "assistant",
    "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "tool": "tool", "observation": "tool", "function": "tool", "function_response": "tool",
    "tool_response": "tool", "ipython": "tool",
}  # fmt: skip
_CALL_ROLES = ("function_call", "tool_call", "function-call", "tool_calls")
_LEARNED_KEYS = (
    "weight", "loss_weight", "loss", "loss_mask", "loss_scale", "train", "training", "trainable", "learn",
    "train_on_turn",
)  # fmt: skip
HIDDEN_KEYS = ("masked", "mask")
LOSS_KEYS = (*_LEARNED_KEYS, *HIDDEN_KEYS)
"""Keys that say whether a message is learned: 0, 1, false, true. The last two mean the opposite."""
ANSWER_ROLES = {*_CALL_ROLES, *(role for role, common in _ROLES.items() if common == "assistant")}
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
TOOLS_NAMES = ("tools", "functions")
_TEXT_KEYS = ("text", "value", "content")
_THOUGHT_KEYS = (*_TEXT_KEYS, "thinking", "reasoning", "summary")
PART_KEYS = ("type", *_THOUGHT_KEYS)
_THOUGHT_TYPES = ("reasoning", "thinking", "reasoning_text", "summary_text")
_ABOUT_LOSS = re.compile(r"(?:^|_)(?:loss|train\w*|learn\w*|mask\w*|weights?)(?:_|$)", re.IGNORECASE)
_TEXT_TYPES = (None, "text", "input_text", "output_text")


class Arguments(dict[str, Any]):
    """The arguments of a tool call that the row has as JSON text, in `text`."""

    def __init__(self, values: dict[str, Any], text: str) -> None:
        super().__init__(values)
        self.text = text


def is_missing(value: Any) -> bool:
    """Whether `value` counts as missing: null, or NaN, which pandas writes for null."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def is_learned(values: Mapping[str, Any], where: str) -> bool | None:
    """Whether `values` say by one of LOSS_KEYS that they are learned; None if they do not say.

    Raises RowError for a value that is neither yes nor no, for contradicting keys, and for an unknown key
    that may say so, like axolotl's `train_detail`.
    """
    for key, value in values.items():
        says_no = isinstance(value, (bool, int, float)) and value == ("mask" in key.lower())
        may_say_no = says_no or (isinstance(value, (list, dict)) and value)
        if may_say_no and key not in LOSS_KEYS and _ABOUT_LOSS.search(key):
            raise RowError(
                f"{where} has {key}: {_short(value)}, which may say that it, or a part of it, is not "
                "learned; remove the key, or write weight 0 for a message that is not learned"
            )
    said = {}
    for key in LOSS_KEYS:
        value = values.get(key)
        if is_missing(value):
            continue
        if value not in (0, 1):
            raise RowError(
                f"{where} has the {key} {_short(value)}; only 0 (not learned) and 1 are known"
                if key in _LEARNED_KEYS
                else f"{where} has {key}: {_short(value)}; only true (not learned) and false are known"
            )
        said[key] = bool(value) == (key in _LEARNED_KEYS)
    if len(set(said.values())) > 1:
        raise RowError(f"{where} is both learned and not learned, by {' and '.join(said)}; keep one of them")
    return next(iter(said.values()), None)


def is_messages(value: Any) -> bool:
    """Whether `value` looks like a list of chat messages of either dialect."""
    return (
        isinstance(value, (list, tuple))
        and bool(value)
        and isinstance(value[0], dict)
        and ("role" in value[0] or "from" in value[0])
    )


def read_messages(value: Any, column: str) -> list[dict[str, Any]]:
    """The messages of `column` in the common form. A RowError names the message and its problem."""
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, (list, tuple)):
        raise RowError(f"column {column!r} must hold a list of messages, found {_short(value)}")
    if not value:
        raise RowError(f"column {column!r} holds no messages")
    return [
        _read_message(message, f"message {number} of {column!r}") for number, message in enumerate(value, 1)
    ]


def read_tools(value: Any, column: str) -> list[dict[str, Any]] | None:
    """The tools of a conversation (a list, or JSON text of a list) in the common form; None if there are
    none.
    """
    if isinstance(value, str):
        value = _parse(value, f"column {column!r}") if value.strip() else None
    if not value or is_missing(value):
        return None
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, (list, tuple)) or not all(isinstance(tool, dict) for tool in value):
        raise RowError(f"column {column!r} must hold a list of tool objects, found {_short(value)}")
    return [
        dict(tool)
        if "function" in tool or "name" not in tool
        else {"type": "function", "function": dict(tool)}
        for tool in value
    ]


def _read_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RowError(f"{where} must be an object with role and content, found {_short(message)}")
    role_key, content_key = (
        ("from", "value") if "from" in message and "role" not in message else ("role", "content")
    )
    if role_key not in message:
        raise RowError(f"{where} has no {role_key!r} (keys: {', '.join(map(str, message))})")
    role, content = message[role_key], message.get(content_key)
    if not isinstance(role, str) or (role.lower() not in _ROLES and role.lower() not in _CALL_ROLES):
        hint = closest(role, (*_ROLES, *_CALL_ROLES)) if isinstance(role, str) else ""
        raise RowError(f"{where} has the unknown role {role!r}{hint}; known: system, user, assistant, tool")
    is_call = role.lower() in _CALL_ROLES
    is_answer = role.lower() in ANSWER_ROLES
    weight = {"weight": 0} if is_answer and is_learned(message, where) is False else {}
    if is_call:
        calls = {"tool_calls": _read_calls(content, where)}
        return {"role": "assistant", "content": "", **calls, **weight}
    used = (role_key, content_key, "function_call", "tool_calls", *LOSS_KEYS)
    rest = {key: value for key, value in message.items() if key not in used and not is_missing(value)}
    if is_answer and isinstance(content, (list, tuple)):
        content, thoughts = _without_thoughts(content)
        if thoughts and any(rest.get(key) for key in REASONING_KEYS):
            raise RowError(f"{where} has reasoning as a part of its content and as a key; keep one of them")
        rest |= {"reasoning_content": thoughts} if thoughts else {}
    text = _read_content(content, content_key, message, where)
    out = {"role": _ROLES[role.lower()], "content": text, **rest, **weight}
    if found := message.get("tool_calls") or message.get("function_call"):
        out["tool_calls"] = _read_calls(found, where)
    elif is_answer and not weight and not text.strip() and not any(out.get(key) for key in REASONING_KEYS):
        raise RowError(f"{where} is an empty assistant message; give it text or remove it")
    return out


def _read_content(content: Any, key: str, message: dict[str, Any], where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        if message.get("tool_calls") or message.get("function_call"):
            return ""
        if key in message:
            raise RowError(f"{where} has no text: {key!r} is null")
        raise RowError(f"{where} has no {key!r} (keys: {', '.join(map(str, message))})")
    if isinstance(content, (list, tuple)):
        texts = [_part_text(part) for part in content]
        if all(text is not None for text in texts):
            return "".join(str(text) for text in texts)
        kinds = {
            str(part.get("type"))
            for part, text in zip(content, texts, strict=True)
            if text is None and isinstance(part, dict)
        }
        raise RowError(
            f"{where} has content parts that are not text ({', '.join(sorted(kinds)) or 'unknown'}); only "
            "text can be trained on"
        )
    raise RowError(f"{where} must have text as its {key!r}, found {_short(content)}")


def _without_thoughts(parts: Sequence[Any]) -> tuple[Sequence[Any], str]:
    """Content parts without the reasoning at their beginning, and that reasoning."""
    thoughts: list[str] = []
    for part in parts:
        text = _part_text(part, _THOUGHT_TYPES, _THOUGHT_KEYS)
        if isinstance(part, str) or text is None:
            break
        thoughts.append(text)
    return parts[len(thoughts) :], "".join(thoughts)


def _part_text(
    part: Any, types: Sequence[str | None] = _TEXT_TYPES, keys: Sequence[str] = _TEXT_KEYS
) -> str | None:
    """The text of a content part: a string, or an object of one of `types`; None for anything else."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or part.get("type") not in types:
        return None
    texts = [part[key] for key in keys if not is_missing(part.get(key)) and part[key] != []]
    if len(texts) == 1 and isinstance(texts[0], list) and types is _THOUGHT_TYPES:
        inner = [_part_text(each, (*_TEXT_TYPES, *_THOUGHT_TYPES)) for each in texts[0]]
        return None if None in inner else "".join(map(str, inner))
    return texts[0] if len(texts) == 1 and isinstance(texts[0], str) else None


def _read_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(calls, str):
        calls = _parse(calls, where)
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, (list, tuple)) or not calls:
        raise RowError(
            f"{where} must hold a function call as an object with name and arguments, found {_short(calls)}"
        )
    return [_read_call(call, where) for call in calls]


def _read_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError(f"{where} has a function call without a name: {_short(call)}")
    arguments = _read_arguments(function.get("arguments", function.get("parameters")), where)
    extra = {
        key: value
        for key, value in call.items()
        if key not in ("function", "name", "arguments", "parameters", "type")
    }
    return {**extra, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _read_arguments(value: Any, where: str) -> dict[str, Any]:
    """The arguments of a call as an object; empty if they are missing. Raises RowError if they are no object
    of JSON.
    """
    if is_missing(value) or (isinstance(value, str) and not value.strip()):
        return {}
    arguments = value
    try:
        if isinstance(value, str):
            arguments = json.loads(value)
        json.dumps(arguments, allow_nan=False)  # NaN, Infinity and 1e400 would be written as no JSON
    except (TypeError, ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise RowError(
            f"{where} has a function call whose arguments are no JSON object: {_short(value)}; write "
            '{"name": value, …}'
        )
    return Arguments(arguments, value) if isinstance(value, str) else arguments


def arguments_text(arguments: Any) -> str:
    """The arguments of a call as JSON text: the row's own text if it has one."""
    if isinstance(arguments, str):
        return arguments
    text: str | None = getattr(arguments, "text", None)
    return json.dumps(arguments, ensure_ascii=False) if text is None else text


def call_text(call: dict[str, Any]) -> str:
    """A call as one JSON object, for templates that do not support `tool_calls`."""
    return json.dumps(call["function"], ensure_ascii=False)


def inline_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`messages` with every tool call written into its message's content."""
    out = []
    for message in messages:
        calls = message.get("tool_calls")
        if calls:
            lines = [message.get("content") or "", *(call_text(call) for call in calls)]
            message = {**message, "content": "\n".join(line for line in lines if line)}
            del message["tool_calls"]
        out.append(message)
    return out


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise RowError(f"{where} is not valid JSON: {_short(text)}") from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


_SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant):")
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}


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
        value = [{"role": _SPEAKERS[speaker], "content": words.strip()} for speaker, words in turns]
    return read_messages(value, column)
