"""Chat templates in use, against transformers' apply_chat_template, text for text, and the assistant's turns.

    python -m tests.proofs.fuzz_templates FILE… [--verbose]

A FILE is a .jinja template or a tokenizer_config.json that holds one. Each is rendered on every conversation,
with and without generation prompt: the text is transformers', or both refuse. Then the assistant's turns are
told: each holds its message's text, none holds another message's, and nothing of the generation prompt. Exits
with 1 at a difference. The templates of the project's own tests are always among them.
"""

import argparse
import json
import logging
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lptune.base.errors import UserError
from lptune.data import ChatTemplate
from lptune.data.errors import RowError
from lptune.data.templates import _with_arguments
from lptune.data.turns import TurnFinder
from tests.helpers.chat_templates import CONVERSATIONS, SPECIAL, TEMPLATES, TOOL_CONVERSATION, TOOLS

DEFAULT_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
CLOSINGS = ("<|im_end|>", "<|eot_id|>", "</s>", "<end_of_turn>", "<turn|>", "<|end|>", "<|endoftext|>")
HEADERS = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|turn>", "[/INST]", "<|assistant|>")
SPECIAL_TEXTS = (*CLOSINGS, "<|eom_id|>", "<|tool_response>", "<tool_call|>")


def _named(*roles: str, **more: dict[str, Any]) -> list[dict[str, Any]]:
    """A conversation in which no two messages share a text."""
    words = ("azure", "birch", "cedar", "dunes", "ember", "fjord", "glade", "heron")
    messages = [
        {"role": role, "content": f"The word is {word}."} for role, word in zip(roles, words, strict=False)
    ]
    for i, message in enumerate(messages):
        message.update(more.get(f"m{i}", {}))
    return messages


CALL = {
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
}
TOLD: dict[str, list[dict[str, Any]]] = {
    "two turns": _named("user", "assistant", "user", "assistant"),
    "four turns": _named(*["user", "assistant"] * 4),
    "with a system message": _named("system", "user", "assistant", "user", "assistant"),
    "with reasoning": _named(
        "user", "assistant", "user", "assistant",
        m1={"reasoning_content": "I think of trees."}, m3={"reasoning_content": "I think of sand."},
    ),
    "with reasoning inline": _named(
        "user", "assistant", "user", "assistant",
        m1={"content": "<think>\nI think of trees.\n</think>\n\nThe word is birch."},
    ),
    "with a call": _named("user", "assistant", "tool", "assistant", "user", "assistant", m1=CALL),
    "with its closing text": _named(
        "user", "assistant", "user", "assistant", m1={"content": f"Not {' '.join(CLOSINGS)} here."}
    ),
}  # fmt: skip
"""Those whose turns are checked."""


def read_template(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The templates in a file by name, and the special tokens beside them."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".json":
        return {"default": text}, DEFAULT_TOKENS
    config = json.loads(text)
    value, tokens = config.get("chat_template") or [], {}
    for key in DEFAULT_TOKENS:
        token = config.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None:
            tokens[key] = token
    return {"default": value} if isinstance(value, str) else {t["name"]: t["template"] for t in value}, tokens


def compare(sources: dict[str, str], tokens: dict[str, str], theirs: Any) -> Counter[str]:
    """How many renderings are equal, refused by both, refused by lptune alone, or differ."""
    counts: Counter[str] = Counter()
    try:
        ours = ChatTemplate(sources, tokens, SPECIAL_TEXTS)
    except UserError:
        return Counter({"refused as a whole": 1})
    theirs.chat_template = sources
    for key in DEFAULT_TOKENS:
        setattr(theirs, key, tokens.get(key))
    cases = [(messages, None) for messages in (*CONVERSATIONS.values(), *TOLD.values())]
    cases += [(TOOL_CONVERSATION, TOOLS), (TOLD["with a call"], TOOLS), (TOLD["two turns"], TOOLS)]
    for messages, tools in cases:
        for prompt in (False, True):
            counts[_outcome(ours, theirs, messages, tools, prompt)] += 1
    return counts


def _outcome(ours: ChatTemplate, theirs: Any, messages: Any, tools: Any, prompt: bool) -> str:
    expected = None
    for given in (messages, [_with_arguments(message, json.dumps) for message in messages]):
        try:
            expected = theirs.apply_chat_template(
                given, tools=tools, add_generation_prompt=prompt, tokenize=False
            )
            break
        except Exception:  # a template that takes the arguments of calls as text refuses an object
            continue
    try:
        text = ours.render(messages, tools, add_generation_prompt=prompt).text
    except (RowError, UserError) as error:
        return "refused by both" if expected is None else f"DIFFERS: refused: {error}"
    return "equal" if text == expected else "DIFFERS"


def check_turns(sources: dict[str, str], tokens: dict[str, str]) -> Counter[str]:
    """How many conversations' turns are told rightly, refused, or wrong."""
    counts: Counter[str] = Counter()
    try:
        template = ChatTemplate(sources, tokens, SPECIAL_TEXTS)
    except UserError:
        return counts
    finder = TurnFinder(template)
    for title, messages in TOLD.items():
        tools = TOOLS if title == "with a call" else None
        try:
            template.render(messages, tools)
        except (RowError, UserError):
            counts["not renderable"] += 1
            continue
        try:
            turns = finder.find(messages, tools)
        except RowError as error:
            counts[f"refused: {str(error)[:70]}"] += 1
            continue
        if template.has_marks(tools):
            counts["marked by the template"] += 1
            continue
        learned = [turns.text[start:stop] for start, stop in turns.spans]
        answers = [message for message in messages if message["role"] == "assistant"]
        counts[_judge(learned, answers, messages, turns.text)] += 1
    return counts


def _judge(
    learned: Sequence[str], answers: Sequence[dict[str, Any]], messages: Sequence[dict[str, Any]], text: str
) -> str:
    if len(learned) != len(answers):
        return f"WRONG: {len(learned)} turns for {len(answers)} answers"
    for span, answer in zip(learned, answers, strict=True):
        own = answer["content"].split("</think>")[-1].strip()
        if own in text and own not in span:
            return f"WRONG: {span!r} lacks {own!r}"
        others = [m["content"] for m in messages if m is not answer and m["content"]]
        if any(other in span for other in others):
            return f"WRONG: {span!r} holds another message"
        before = span.split(own)[0] if own else ""
        if any(header in before for header in HEADERS):
            return f"WRONG: {span!r} begins with a header"
    return "told"


def main() -> int:
    """Compare what the command line names."""
    import transformers

    from tests.proofs.fuzz_tokenizers import byte_level

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--verbose", action="store_true", help="a line per template")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level())
    templates = {
        name: ({"default": source}, DEFAULT_TOKENS | SPECIAL.get(name, {}))
        for name, source in TEMPLATES.items()
    }
    # Two files of different folders may have one name.
    templates |= {str(path): found for path in arguments.files if (found := read_template(path))[0]}
    rendered: Counter[str] = Counter()
    told: Counter[str] = Counter()
    for name, (sources, tokens) in templates.items():
        counts, turns = compare(sources, tokens, theirs), check_turns(sources, tokens)
        rendered += counts
        told += turns
        if arguments.verbose or any(key.startswith(("DIFFERS", "WRONG")) for key in (*counts, *turns)):
            print(f"{name}: {dict(counts)} {dict(turns)}")
    print(f"{len(templates)} templates, {sum(rendered.values())} renderings: {dict(rendered)}")
    print(f"{sum(told.values())} conversations: {dict(told)}")
    return int(any(key.startswith(("DIFFERS", "WRONG")) for key in (*rendered, *told)))


if __name__ == "__main__":
    sys.exit(main())
