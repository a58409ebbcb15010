"""What of a conversation its chat template leaves out.

Many templates pass over what they do not know: a system message, a tool's result, reasoning. The rendered
text then lacks it without a word. A part is written if it stands in the text, or else if the text changes
with it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lptune.data.errors import RowError
from lptune.data.messages import REASONING_KEYS
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
"""A call, or the definition of what it calls."""
_SURE_CHARACTERS = 16
"""A text so long does not stand in a conversation by accident."""
_KINDS = {"system": "system messages", "user": "user messages", "tool": "tool results"}
SYSTEM = _KINDS["system"]
TOOLS = "tool definitions"


class UnwrittenFinder:
    """Finds what one template leaves out of its conversations."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._written: dict[tuple[Any, ...], bool] = {}

    def find(self, messages: Sequence[Message], tools: Any, text: str) -> list[tuple[str, int]]:
        """What of `messages`, rendered as `text`, is left out: its kind (`system messages`, …) and the number
        of its message. Tool definitions stand at -1.
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

    def _is_written(
        self, messages: Sequence[Message], tools: Any, text: str, i: int, key: str, probe: Any
    ) -> bool:
        value = messages[i][key]
        is_long = isinstance(value, str) and len(value) >= _SURE_CHARACTERS
        if is_long and value.strip() in text:
            return True
        # What a template does with a short text, or a call, depends on where its message stands.
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
    """The parts of a message that should be written: what to call it, its key, another value for it."""
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
