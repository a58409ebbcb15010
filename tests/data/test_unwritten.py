"""What a chat template leaves out of a conversation is named, and nothing else is."""

from pathlib import Path
from typing import Any

import pytest

from lptune.base.errors import UserError
from lptune.config import DataConfig, PromptsConfig
from lptune.data import ChatTemplate, Prepared, PromptWriter, load_tokenizer, prepare
from lptune.data.sources import Row
from lptune.data.turns import UnwrittenFinder
from tests.helpers.chat_templates import CONVERSATIONS, TEMPLATES, TOOL_CONVERSATION, TOOLS, config
from tests.helpers.documents import Make, Write

ONLY_LAST = "{{ messages[-1].content }}{{ '' if messages[-1].tool_calls is defined }}"


def unwritten(name: str, messages: list[dict[str, Any]], tools: Any = None) -> list[tuple[str, int]]:
    chat = ChatTemplate({"default": TEMPLATES.get(name, name)}, {"bos_token": "<s>", "eos_token": "</s>"})
    return UnwrittenFinder(chat).find(messages, tools, chat.render(messages, tools).text)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize("title", sorted(CONVERSATIONS))
def test_what_is_written_is_not_named(name: str, title: str) -> None:
    if title == "system" and name in ("gemma", "user_and_assistant", "loops_and_dates"):
        return
    assert unwritten(name, CONVERSATIONS[title]) == []


def test_what_is_left_out_is_named_with_its_message() -> None:
    assert unwritten("user_and_assistant", CONVERSATIONS["system"]) == [("system messages", 0)]
    assert unwritten("loops_and_dates", CONVERSATIONS["system"]) == [("system messages", 0)]
    # A text as short as these stands in the conversation by accident.
    short = [{"role": "system", "content": "Hi"}, *CONVERSATIONS["three turns"]]
    assert unwritten("user_and_assistant", short) == [("system messages", 0)]
    assert unwritten("chatml", short) == []
    assert unwritten("user_and_assistant", TOOL_CONVERSATION, TOOLS) == [
        ("tool calls", 1),
        ("tool results", 2),
        ("reasoning texts", 5),
        ("tool definitions", -1),
    ]
    assert unwritten("qwen3", TOOL_CONVERSATION, TOOLS) == []
    assert unwritten(ONLY_LAST, CONVERSATIONS["one turn"]) == [("user messages", 0)]


def run(folder: Path, source: str, **keys: Any) -> Prepared:
    cfg = DataConfig(source=source, seq_len=256, cache="none", **keys)
    return prepare(cfg, load_tokenizer(folder), seed=0, vocab_size=600)


def test_the_report_counts_what_is_left_out(tokenizer_folder: Make, jsonl: Write) -> None:
    folder = tokenizer_folder(**config("user_and_assistant"))
    asked, said = CONVERSATIONS["one turn"]
    tool = {"messages": [asked, {"role": "tool", "content": "it rains"}, said]}
    system = {"messages": CONVERSATIONS["system"]}
    report = run(folder, jsonl(system, system, tool)).report
    line = "note: the chat template does not write 2 system messages, 1 tool results: they are left out"
    assert line in report
    report = run(tokenizer_folder("chatml", **config("chatml")), jsonl(system)).report
    assert not any("does not write" in line for line in report)


def test_a_system_prompt_that_is_never_written_is_an_error(tokenizer_folder: Make, jsonl: Write) -> None:
    silent = tokenizer_folder("silent", **config("user_and_assistant"))
    chatml = tokenizer_folder("chatml", **config("chatml"))
    plain, own = ({"messages": CONVERSATIONS[title]} for title in ("one turn", "system"))
    for folder, rows, message in (
        (silent, [plain, own], "the chat template never writes it"),
        (chatml, [own], "every row of .* has a system message of its own"),
    ):
        with pytest.raises(UserError, match=f"data.system_prompt: {message}"):
            run(folder, jsonl(*rows), system_prompt="Be brief.")
    run(chatml, jsonl(plain, own), system_prompt="Be brief.")


@pytest.mark.parametrize("condition", ["tools and m.tool_calls", "m.tool_calls and not m.content"])
def test_each_call_that_a_condition_leaves_out_is_text_in_training_and_in_prompts(
    condition: str, tokenizer_folder: Make, jsonl: Write
) -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        f"{{% if {condition} %}}CALL{{{{ m.tool_calls | tojson }}}}{{% endif %}}<|im_end|>\n{{% endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    folder = tokenizer_folder(**config("chatml") | {"chat_template": source})
    tokenizer = load_tokenizer(folder)
    silent, spoken = TOOL_CONVERSATION[:4], [*TOOL_CONVERSATION[:4]]
    spoken[1] = {**spoken[1], "content": "Let me see."}
    rows = [
        {"messages": messages, "tools": tools} for tools in (TOOLS, None) for messages in (silent, spoken)
    ]
    prepared = run(folder, jsonl(*rows))
    assert "does not write the tool calls of 2 conversations: they are" in "\n".join(prepared.report)
    writer = PromptWriter(PromptsConfig(), tokenizer, 600, [Row("x", row) for row in rows])
    for i, row in enumerate(rows):
        start, stop = prepared.train.documents.place(i)
        tokens = prepared.train.documents.tokens_T[start:stop].tolist()
        text = tokenizer.backend.decode(tokens, skip_special_tokens=False)
        is_written = row["tools"] is not None if "tools and" in condition else row["messages"] is silent
        assert text.count("CALL") == is_written
        assert '"name": "add", "arguments": {"a": 2, "b": 2}}' in text
        prompt = writer.of_row(Row("x", row)).ids
        assert tokens[: len(prompt)] == prompt
