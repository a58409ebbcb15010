"""The loss falls on exactly what the assistant writes: its text and the token that closes its turn, never a
header.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from lptune.data import ChatTemplate, load_tokenizer
from lptune.data.errors import RowError
from lptune.data.tokenization import _token_span
from lptune.data.turns import TurnFinder
from tests.helpers.chat_templates import (
    CHATML,
    CONVERSATIONS,
    QWEN3,
    TEMPLATES,
    TOOL_CONVERSATION,
    TOOLS,
    WITHOUT_SPECIAL_TOKENS,
    config,
)
from tests.helpers.documents import Make

# What the assistant writes for a content, by template.
WRITTEN: dict[str, Callable[[str, bool], str]] = {
    "chatml": lambda content, last: content + "<|im_end|>",
    "chatml_without_prompt": lambda content, last: content + "<|im_end|>",
    "chatml_marked": lambda content, last: content + "<|im_end|>",
    "llama3": lambda content, last: content.strip() + "<|eot_id|>",
    "llama3_always_prompts": lambda content, last: content.strip() + "<|eot_id|>",
    "mistral": lambda content, last: " " + content + "</s>",
    "gemma": lambda content, last: content.strip() + "<end_of_turn>",
    "qwen3": lambda content, last: (
        ("<think>\n\n</think>\n\n" + content.lstrip("\n") if last else content) + "<|im_end|>"
    ),
    "qwen3_thinking": lambda content, last: (
        ("\n</think>\n\n" + content.lstrip("\n") if last else content) + "<|im_end|>"
    ),
    "r1": lambda content, last: content + "</s>",
    "user_and_assistant": lambda content, last: content + "<|im_end|>",
    "loops_and_dates": lambda content, last: content + "<|im_end|>",
}


def find(folder: Path, messages: list[dict[str, Any]], tools: Any = None) -> tuple[str, list[str]]:
    template = load_tokenizer(folder).template
    assert template is not None
    turns = TurnFinder(template).find(messages, tools)
    return turns.text, [turns.text[start:stop] for start, stop in turns.spans]


@pytest.mark.parametrize("name", TEMPLATES)
def test_spans_are_the_assistants_text_and_its_closing_token(tokenizer_folder: Make, name: str) -> None:
    folder = tokenizer_folder(**config(name))
    for title, messages in CONVERSATIONS.items():
        if name == "gemma" and title == "system":
            continue
        contents = [m["content"] for m in messages if m["role"] == "assistant"]
        expected = [WRITTEN[name](content, i == len(contents) - 1) for i, content in enumerate(contents)]
        assert find(folder, messages)[1] == expected, title


def mask_of(folder: Path, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.template is not None
    turns = TurnFinder(tokenizer.template).find(messages)
    encoding = tokenizer.encode_batch([turns.text])[0]
    mask = np.zeros(len(encoding.ids), dtype=int)
    for start, stop in turns.spans:
        first, end = _token_span(encoding, start, stop)
        mask[first:end] = 1
    return encoding.ids, mask.tolist()


@pytest.mark.parametrize("title", CONVERSATIONS)
def test_marks_give_the_mask_of_transformers(tokenizer_folder: Make, title: str) -> None:
    folder = tokenizer_folder(**config("chatml_marked"))
    theirs = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(
        CONVERSATIONS[title], return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = mask_of(folder, CONVERSATIONS[title])
    assert ids == theirs["input_ids"]
    assert mask == theirs["assistant_masks"]


@pytest.mark.parametrize("title", CONVERSATIONS)
def test_steps_give_the_mask_of_marks(tokenizer_folder: Make, title: str) -> None:
    marked = mask_of(tokenizer_folder("marked", **config("chatml_marked")), CONVERSATIONS[title])
    stepwise = mask_of(tokenizer_folder("plain", **config("chatml")), CONVERSATIONS[title])
    assert stepwise == marked


@pytest.mark.parametrize("name", ["chatml", "chatml_marked", "qwen3"])
def test_an_answer_of_weight_0_is_context_only(tokenizer_folder: Make, name: str) -> None:
    folder = tokenizer_folder(**config(name))
    messages = [dict(message) for message in CONVERSATIONS["three turns"]]
    text, spans = find(folder, messages)
    answers = [message for message in messages if message["role"] == "assistant"]
    answers[0]["weight"], answers[1]["weight"] = 0, 1
    assert find(folder, messages) == (text, spans[1:])


def test_weights_need_one_mark_per_answer(tokenizer_folder: Make) -> None:
    last_only = (
        "{% for m in messages %}{% if loop.last %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    template = load_tokenizer(tokenizer_folder(), chat_template=last_only).template
    assert template is not None
    messages = [dict(message) for message in CONVERSATIONS["three turns"]]
    TurnFinder(template).find(messages)
    next(message for message in messages if message["role"] == "assistant")["weight"] = 0
    with pytest.raises(RowError, match=r"marks 1 spans in . assistant messages.*remove the weight"):
        TurnFinder(template).find(messages)


def test_a_call_that_ends_otherwise_than_an_answer_ends_there() -> None:
    # As in Llama 3.1, where a call of a built-in tool expects its result.
    source = (
        "{% for m in messages %}<|h|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}"
        "{{ m.tool_calls | tojson }}<|eom_id|>{% else %}<|eot_id|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|h|>assistant\n{% endif %}"
    )
    chat = ChatTemplate({"default": source}, {}, ["<|h|>", "<|eom_id|>", "<|eot_id|>"])
    turns = TurnFinder(chat).find(TOOL_CONVERSATION[:4])
    call, answer = [turns.text[start:stop] for start, stop in turns.spans]
    assert call.startswith("[{")
    assert call.endswith("}]<|eom_id|>")
    assert answer == "It is 4.<|eot_id|>"


@pytest.mark.parametrize("said", ["", "Let me see."])
@pytest.mark.parametrize("before", ["", " ", "  "])
def test_a_call_starts_right_behind_the_prompt_where_answers_start_with_a_space(
    before: str, said: str
) -> None:
    # As in Mistral v0.3, whose prompt has no header.
    source = (
        "{% for m in messages %}{% if m.role != 'assistant' %}[INST]{{ m.content }}[/INST]"
        "{% elif m.tool_calls %}[CALLS]{{ m.tool_calls | tojson }}</s>{% else %}"
        + before
        + "{{ m.content }}</s>{% endif %}"
        "{% endfor %}"
    )
    chat = ChatTemplate({"default": source}, {"eos_token": "</s>"})
    messages = [*TOOL_CONVERSATION[4:], *TOOL_CONVERSATION[:4]]
    messages[3] = {**messages[3], "content": said}
    turns = TurnFinder(chat).find(messages)
    *_, call, answer = [turns.text[start:stop] for start, stop in turns.spans]
    assert call.startswith("[CALLS][{")
    assert call.endswith("}]</s>")
    assert answer == f"{before}It is 4.</s>"
    assert turns.follow_prompt == [True] * 3


def said(*contents: str, **last: str) -> list[dict[str, Any]]:
    """Turns of user and assistant; more keys of the last one."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": each} for i, each in enumerate(contents)]
    return [*turns[:-1], turns[-1] | last]


THOUGHTS = said("a", "<think>\nlong\n</think>\n\nb", "c", "<think>\nmore\n</think>\n\nd")
APART = said("a", "<think>\nlong\n</think>\n\nb", "c", "d", reasoning_content="more")
TWO_CLOSINGS = CONVERSATIONS["three turns"].copy()
TWO_CLOSINGS[1] = {"role": "assistant", "content": "<think>\nx\n</think>\n\nsay <|im_end|> twice"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call><|im_end|>'
SILENT = QWEN3.replace("{%- if enable_thinking is false %}", "{%- if true %}")  # its prompt closes reasoning
SPANS: dict[str, tuple[str, list[dict[str, Any]], list[str]]] = {
    "reasoning that later turns lose": (
        "qwen3", THOUGHTS, ["b<|im_end|>", "<think>\nmore\n</think>\n\nd<|im_end|>"],
    ),
    "a prompt that opens reasoning": (
        "qwen3_thinking", APART, ["b<|im_end|>", "more\n</think>\n\nd<|im_end|>"],
    ),
    "no turn shows reasoning": ("r1", APART, ["\n\nb</s>", "d</s>"]),
    "a prompt that closes its reasoning, and a turn that shows some": (
        SILENT, THOUGHTS, ["b<|im_end|>", "more\n</think>\n\nd<|im_end|>"],
    ),
    "the same, apart": (SILENT, APART, ["b<|im_end|>", "more\n</think>\n\nd<|im_end|>"]),
    "calls, not their results": (
        "qwen3", TOOL_CONVERSATION,
        [CALL, "It is 4.<|im_end|>", "<think>\nThey are polite.\n</think>\n\nYou are welcome.<|im_end|>"],
    ),
    "calls under a prompt that opens reasoning": (
        "qwen3_thinking", TOOL_CONVERSATION,
        [CALL, "It is 4.<|im_end|>", "They are polite.\n</think>\n\nYou are welcome.<|im_end|>"],
    ),
    "a closing token inside a rewritten turn": (
        "qwen3", TWO_CLOSINGS,
        ["say <|im_end|> twice<|im_end|>", "4<|im_end|>", WRITTEN["qwen3"]("It is 6.", True)],
    ),
    "the same under a prompt that opens reasoning": (
        "qwen3_thinking", TWO_CLOSINGS,
        ["say <|im_end|> twice<|im_end|>", "4<|im_end|>", WRITTEN["qwen3_thinking"]("It is 6.", True)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SPANS)
def test_turns_that_the_template_rewrites_are_found_exactly(tokenizer_folder: Make, case: str) -> None:
    name, messages, spans = SPANS[case]
    keys = config(name) if name in TEMPLATES else {"chat_template": name, "eos_token": "<|im_end|>"}
    tools = TOOLS if messages is TOOL_CONVERSATION else None
    assert find(tokenizer_folder(**keys), messages, tools)[1] == spans


def test_rewritten_turns_are_counted(tokenizer_folder: Make) -> None:
    template = load_tokenizer(tokenizer_folder(**config("qwen3"))).template
    assert template is not None
    assert TurnFinder(template).find(THOUGHTS).num_rewritten == 1


def test_a_closing_token_inside_a_rewritten_turn_is_refused_where_no_other_content_fits(
    tokenizer_folder: Make,
) -> None:
    start = "{%- for message in messages %}\n"
    refusing = (
        "{%- if not loop.last and 'assistant probe' in message.content %}"
        "{{ raise_exception('') }}{%- endif %}"
    )
    folder = tokenizer_folder(chat_template=QWEN3.replace(start, start + refusing), eos_token="<|im_end|>")
    with pytest.raises(RowError, match=r"holds the text '<\|im_end\|>'.*\{% generation %\}"):
        find(folder, TWO_CLOSINGS)


@pytest.mark.parametrize("name", ["chatml", "llama3", "chatml_without_prompt"])
def test_a_closing_token_inside_a_turn_does_not_end_it(tokenizer_folder: Make, name: str) -> None:
    messages = CONVERSATIONS["three turns"].copy()
    messages[1] = {"role": "assistant", "content": "say <|im_end|><|eot_id|>\n twice"}
    spans = find(tokenizer_folder(**config(name)), messages)[1]
    assert spans[0] == WRITTEN[name]("say <|im_end|><|eot_id|>\n twice", False)
    assert len(spans) == 3


def test_consecutive_and_leading_assistant_messages(tokenizer_folder: Make) -> None:
    said = (("assistant", "Welcome"), ("user", "hi"), ("assistant", "a"), ("assistant", "b"))
    messages = [{"role": role, "content": content} for role, content in said]
    for name in ("chatml", "llama3", "gemma", "chatml_without_prompt", "llama3_always_prompts"):
        folder = tokenizer_folder(name, **config(name))
        assert find(folder, messages)[1] == [
            WRITTEN[name](content, False) for content in ("Welcome", "a", "b")
        ], name


def test_a_template_that_shuffles_turns_is_refused_with_a_remedy() -> None:
    backwards = "{% for m in messages | reverse %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(RowError, match=r"(start|end) of assistant message . cannot be found .*generation"):
        TurnFinder(ChatTemplate({"default": backwards}, {})).find(CONVERSATIONS["three turns"])


def test_a_template_without_special_tokens_has_no_closing_token() -> None:
    finder = TurnFinder(ChatTemplate({"default": WITHOUT_SPECIAL_TOKENS}, {"eos_token": "</s>"}, ["</s>"]))
    turns = finder.find(CONVERSATIONS["three turns"])
    assert [turns.text[a:b] for a, b in turns.spans] == ["Hello!\n", "4\n", "It is 6.\n"]
    assert finder.closing_token() is None
    assert TurnFinder(ChatTemplate({"default": CHATML}, {}, ["<|im_end|>"])).closing_token() == "<|im_end|>"


@pytest.mark.parametrize(
    ("inside", "behind", "expected"),
    [("</s>", "", True), ("", "</s>", False), ("</s>", "</s>", True), ("", "", False)],
)
def test_a_turn_is_closed_by_the_token_that_closes_turns(inside: str, behind: str, expected: bool) -> None:
    """Also where the answer itself ends with a token of the tokenizer."""
    marked = "{% generation %}{{ m.content }}" + inside + "{% endgeneration %}" + behind
    source = "{% for m in messages %}{{ m.role }}: " + marked + "\n{% endfor %}"
    finder = TurnFinder(ChatTemplate({"default": source}, {}, ["</s>", "</call>"]))
    turns = finder.find([{"role": "user", "content": "q"}, {"role": "assistant", "content": "f(x)</call>"}])
    assert turns.is_closed == expected


def test_a_template_that_closes_the_last_turn_alone_teaches_to_stop() -> None:
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    source += "{% if messages[-1].role == 'assistant' %}</s>{% endif %}"
    finder = TurnFinder(ChatTemplate({"default": source}, {}, ["</s>"]))
    for messages in CONVERSATIONS["one turn"], CONVERSATIONS["three turns"]:
        turns = finder.find(messages)
        written = [m["content"] + "\n" for m in messages if m["role"] == "assistant"]
        assert [turns.text[a:b] for a, b in turns.spans] == [*written[:-1], written[-1] + "</s>"]
        assert turns.is_closed
    assert finder.closing_token() == "</s>"
