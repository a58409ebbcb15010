"""Finds the parts of a conversation that its chat template leaves out.

Many templates silently drop parts that they do not support: a system message, the result of a tool,
reasoning. A part counts as written if the rendered text contains it, or if the text changes when the part
changes.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lptune.data.errors import RowError
from lptune.data.messages import REASONING_KEYS, inline_calls
from lptune.data.templates import ChatTemplate

Message = Mapping[str, Any]

_PROBE = "qzx another text zxq"
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "qzx_tool",
        "description": _PROBE,
        "parameters": {"type": "object", "properties": {}},
        "arguments": {"qzx": 1},
    },
}
"""Used both as a tool call and as the definition of a tool."""
_SURE_CHARACTERS = 16
"""Length from which a text is not contained in a conversation by accident."""
_KINDS = {"system": "system messages", "user": "user messages", "tool": "tool results"}
SYSTEM = _KINDS["system"]
TOOLS = "tool definitions"


class UnwrittenFinder:
    """Finds what one template leaves out of its conversations."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._written: dict[tuple[Any, ...], bool] = {}

    def find(self, messages: Sequence[Message], tools: Any, text: str) -> list[tuple[str, int]]:
        """The parts of `messages` that are missing in `text`, the rendering: (kind such as `system messages`,
        number of the message). Tool definitions have the number -1.
        """
        found = [
            (kind, i)
            for i in range(len(messages))
            for kind, key, probe in _parts(messages[i])
            if not self._is_written(messages, tools, text, i, key, probe)
        ]
        if tools and self._render(messages, [*tools, _PROBE_TOOL]) == text:
            found.append((TOOLS, -1))
        return found

    def with_calls(self, messages: Sequence[dict[str, Any]], tools: Any) -> Sequence[dict[str, Any]]:
        """`messages`, in which each tool call that the template does not write stands in the content, as JSON
        text. Many templates write calls under a condition: with tools, without a content.
        """
        calling = [i for i, message in enumerate(messages) if message.get("tool_calls")]
        if calling and "tool_calls" not in self._template.source(tools):
            return inline_calls(messages)
        text = self._render(messages, tools) if calling else None
        out = [*messages]
        for i in calling if text is not None else ():
            changed = [*messages[:i], {**messages[i], "tool_calls": [_PROBE_TOOL]}, *messages[i + 1 :]]
            if self._render(changed, tools) == text:
                out[i : i + 1] = inline_calls(messages[i : i + 1])
        return out

    def _is_written(
        self, messages: Sequence[Message], tools: Any, text: str, i: int, key: str, probe: Any
    ) -> bool:
        value = messages[i][key]
        is_long = isinstance(value, str) and len(value) >= _SURE_CHARACTERS
        if is_long and value.strip() in text:
            return True
        # How a template treats a short text, or a call, depends on the position of the message.
        around = [messages[j].get("role") if 0 <= j < len(messages) else None for j in (i - 1, i, i + 1)]
        place = (key, bool(tools), i == 0, *around, *sorted(messages[i]))
        if is_long or place not in self._written:
            changed = [*messages]
            changed[i] = {**messages[i], key: probe}
            self._written[place] = self._render(changed, tools) != text
        return self._written[place]

    def _render(self, messages: Sequence[Message], tools: Any) -> str | None:
        try:
            return self._template.render(messages, tools).text
        except RowError:
            return None


def _parts(message: Message) -> Iterator[tuple[str, str, Any]]:
    """The parts of a message that should be written: (name of the part, key, another value for a test)."""
    role, content = message.get("role"), message.get("content")
    if isinstance(content, str) and content.strip():
        yield _KINDS.get(str(role), "texts of assistant messages"), "content", _PROBE
    if role != "assistant":
        return
    key = next((key for key in REASONING_KEYS if message.get(key) is not None), None)
    if key is not None and isinstance(message[key], str) and message[key].strip():
        yield "reasoning texts", key, _PROBE
    if message.get("tool_calls"):
        yield "tool calls", "tool_calls", [_PROBE_TOOL]
