"""Rendering equals transformers' token for token; a template can do no harm and fails in one line."""

import os
import re
import signal
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import transformers

from lptune.base.errors import UserError
from lptune.data import ChatTemplate, hf, load_tokenizer, templates
from lptune.data.errors import RowError
from lptune.data.messages import read_messages
from lptune.data.templates import MAX_OUTPUT_CHARACTERS, MAX_SOURCE_CHARS
from tests.helpers.chat_templates import (
    CHATML,
    CONVERSATIONS,
    SPECIAL,
    TEMPLATES,
    TOOL_CONVERSATION,
    TOOLS,
    config,
)
from tests.helpers.documents import Load, Make
from tests.proofs import fuzz_templates, fuzz_tokenizers


def render_both(
    folder: Path, messages: Any, tools: Any = None, *, prompt: bool
) -> tuple[list[int], list[int]]:
    ours = load_tokenizer(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(
        messages, tools=tools, add_generation_prompt=prompt, return_dict=False
    )
    text = ours.render_chat(messages, tools, add_generation_prompt=prompt)
    return ours.encode(text, add_special=False), expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_conversations_with_tools_and_reasoning_render_and_are_told(name: str) -> None:
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=fuzz_tokenizers.byte_level())
    sources = {"default": TEMPLATES[name]}
    tokens = fuzz_templates.DEFAULT_TOKENS | SPECIAL.get(name, {})
    rendered = fuzz_templates.compare(sources, tokens, theirs)
    assert set(rendered) <= {"equal", "refused by both"}
    told = fuzz_templates.check_turns(sources, tokens)
    assert set(told) <= {"told", "marked by the template", "not renderable"}


def test_named_templates_choose_tool_use_for_tools(tokenizer_folder: Make) -> None:
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": TEMPLATES["qwen3"]}]
    folder = tokenizer_folder(chat_template=named, eos_token="<|im_end|>")
    for messages, tools in ((CONVERSATIONS["system"], None), (TOOL_CONVERSATION, TOOLS)):
        ours, theirs = render_both(folder, messages, tools, prompt=True)
        assert ours == theirs


def test_a_template_file_wins_over_the_config(tokenizer_folder: Make) -> None:
    folder = tokenizer_folder(**config("gemma"))
    (folder / "chat_template.jinja").write_text(CHATML + "\n")
    ours, theirs = render_both(folder, CONVERSATIONS["system"], prompt=True)
    assert ours == theirs
    assert load_tokenizer(folder).chat_template == CHATML + "\n"


@pytest.mark.parametrize("names", [("default",), ("default", "tool_use"), ("rag",)])
def test_templates_in_their_own_folder_win_over_the_config(
    tokenizer_folder: Make, names: tuple[str, ...]
) -> None:
    folder = tokenizer_folder(**config("gemma"))
    (folder / "additional_chat_templates").mkdir()
    for name in names:
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(name + CHATML)
    if "default" not in names:
        with pytest.raises(UserError, match=r"no chat template named 'default' \(found rag\)"):
            load_tokenizer(folder)
        return
    for tools in (None, TOOLS):
        ours, theirs = render_both(folder, CONVERSATIONS["system"], tools, prompt=True)
        assert ours == theirs


@pytest.mark.parametrize("tokenizer", ["qwen2", "mistral_chatml", "titan_2k"])
def test_asset_tokenizers_render_their_own_templates_as_transformers_does(
    assets: Path, asset_tokenizer: Load, tokenizer: str
) -> None:
    folder = assets / "tokenizers" / tokenizer
    ours, theirs = (
        asset_tokenizer(f"tokenizers/{tokenizer}"),
        transformers.AutoTokenizer.from_pretrained(folder),
    )
    lines = (assets / "data" / "multilingual.txt").read_text().splitlines()[:200]
    conversations = [
        *CONVERSATIONS.values(),
        [{"role": "user", "content": "\n".join(lines)}, {"role": "assistant", "content": lines[3]}],
    ]
    for messages in conversations:
        expected = theirs.apply_chat_template(messages, return_dict=False)
        assert ours.encode(ours.render_chat(messages), add_special=False) == expected


def template(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, {}, where="data.chat_template")


ONE = CONVERSATIONS["one turn"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('No tools, please') }}", "No tools, please"),
        ("{{ messages[7].content }}", "no element 7"),
        ("{{ nothing.here }}", "'nothing' is undefined"),
        ("{{ messages + 1 }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ messages[0].__class__.__mro__ }}", "unsafe"),
        ("{% set _ = messages.append(1) %}", "immutable|unsafe|not allowed"),
        ("{{ 'a' * 300000000 }}", f"{MAX_OUTPUT_CHARACTERS:,}"),
        ("{{ ([1] * 100000) * 100000 }}", "MemoryError"),
        ("{{ 'x' * 10 ** 10 }}", "MemoryError"),
        ("{{ 9 ** 99999 }}", "ValueError"),
        ("{% for i in range(10000000) %}x{% endfor %}", "OverflowError|too big"),
        ("{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", f"{MAX_OUTPUT_CHARACTERS:,}"),
    ],
)
def test_what_goes_wrong_inside_a_template_is_one_message_naming_it(source: str, message: str) -> None:
    with pytest.raises(RowError, match=message) as caught:
        template(source).render(ONE)
    assert "data.chat_template" in str(caught.value)


TWICE = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
RUNAWAYS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 9 ** (9 ** 9) }}",  # one call, which Python cannot interrupt
)


def test_a_template_that_would_run_for_hours_is_stopped_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_CPU_S", 0.3)
    for source in RUNAWAYS:
        with pytest.raises(UserError, match=r"data.chat_template: takes more than 0.3 s on a processor for"):
            template(source).render(ONE)
    assert template("{{ messages[0].content }}").render(ONE).text == ONE[0]["content"]  # by a new process


@pytest.mark.parametrize(
    "source",
    [
        "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        TWICE + "{{ ns.x | tojson }}",
        "{% set long = 'x' * 100000 %}{{ long.replace('', long) }}",
        "{% set x %}{{ 'x' | center(9999999999) }}{% endset %}{{ x }}",
    ],
)
def test_a_template_cannot_make_gigabytes(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The limits of a run take 15 seconds to reach.
    monkeypatch.setattr(templates, "MAX_CPU_S", 1.0)
    monkeypatch.setattr(templates, "MAX_MEMORY", 128 * templates.MEBI)
    with pytest.raises((RowError, UserError), match=r"MemoryError|writes more than|takes more than"):
        template(source).render(ONE)


def test_the_process_of_templates_ends_when_idle_and_starts_again() -> None:
    chat = template("{{ messages[0].content }}")
    assert chat.render(ONE).text == ONE[0]["content"]
    child = hf._process()._child
    assert child is not None
    child.send_signal(signal.SIGALRM)
    child.wait()
    assert chat.render(ONE).text == ONE[0]["content"]
    assert hf._process()._child is not child


def test_a_forked_process_asks_a_process_of_its_own() -> None:
    chat = template("{{ messages[0].content }}")
    child = os.fork()
    if child == 0:
        os._exit(int(chat.render(ONE).text != ONE[0]["content"]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert chat.render(ONE).text == ONE[0]["content"]


CALLS = (
    "{% for m in messages %}{{ m.role }}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }}WRITE]{% endfor %};{% endfor %}"
)
WRITE_TEXT = [
    "{{ ' ' + c.function.arguments }}",
    " {{ c.function.arguments }}",
    "{{ ' ' ~ c.function.arguments }}",
]
OWN_TEXT = '{"city":  "Köln", "x": 1.50, "u": null}'


def with_call(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    return [
        ONE[0],
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
    ]


@pytest.mark.parametrize("write", WRITE_TEXT)
def test_a_template_that_takes_arguments_as_text_gets_the_rows_own(
    write: str, tokenizer_folder: Make
) -> None:
    folder = tokenizer_folder(chat_template=CALLS.replace("WRITE", write))
    ours, theirs = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for upto in (1, 2):  # a conversation without a call says nothing of the template
        messages = with_call(OWN_TEXT)[:upto]
        expected = theirs.apply_chat_template(messages, tokenize=False)
        assert ours.render_chat(read_messages(messages, "m")) == expected
    chat = template(CALLS.replace("WRITE", write))
    for arguments, text in ((OWN_TEXT, OWN_TEXT), ("", "{}"), ({"city": "Köln"}, '{"city": "Köln"}')):
        assert f"[f {text}]" in chat.render(read_messages(with_call(arguments), "m")).text


@pytest.mark.parametrize(
    "write",
    [
        " {{ c.function.arguments | tojson }}",
        " {{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}",
        "{% if c.function.arguments is string %}{{ raise_exception('text') }}{% endif %}"
        " {{ c.function.arguments | tojson }}",
    ],
)
def test_a_template_that_takes_arguments_as_an_object_gets_one(write: str) -> None:
    chat = template(CALLS.replace("WRITE", write))
    # The user's text is how Python writes what the probe would be.
    messages = [{"role": "user", "content": str({"city": "Köln"})}, *with_call('{"city":"Köln"}')]
    for _ in range(2):
        assert '[f {"city": "Köln"}]' in chat.render(read_messages(messages, "m")).text


@pytest.mark.parametrize("of", ["''", "messages", "strftime_now", "self._TemplateReference__context"])
def test_nothing_of_python_is_within_reach(of: str) -> None:
    for name in ("__class__", "__init__.__globals__"):
        found = template("{% set found %}{{ " + f"{of}.{name}" + " }}{% endset %}[{{ found }}]")
        try:
            text = found.render(ONE).text
        except RowError as error:
            text = str(error)
        assert re.search(r"^\[\]$|unsafe|undefined", text)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in [1] %}" * 25 + "{% endfor %}" * 25,
        "{{ " + "(" * 999 + "1" + ")" * 999 + " }}",
        "{{ 1" + "+1" * 9999 + " }}",
        "{% if 0 %}" + "{% elif 0 %}" * 9999 + "{% endif %}",
        "x" * (MAX_SOURCE_CHARS + 1),
    ],
)
def test_a_template_too_deep_or_too_long_to_compile_is_refused(source: str) -> None:
    with pytest.raises(UserError, match=r"data.chat_template: (not a jinja template|has [\d,]+ characters)"):
        template(source)


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ 'x }}", "{% nothing %}", "{% generation %}x", "{% endfor %}"]
)
def test_a_template_that_does_not_parse_names_its_line(source: str) -> None:
    with pytest.raises(UserError, match=r"data.chat_template: line 2: not a jinja template"):
        template("\n" + source)


def test_marks_are_positions_in_the_final_text() -> None:
    source = (
        "{% macro say(m) %}{% generation %}<{{ m.content }}>{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}{{ say(m) }}{% else %}{{ "
        "m.content }}{% endif %};{% endfor %}"
    )
    text, marks = template(source).render(CONVERSATIONS["three turns"])
    assert [text[start:stop] for start, stop in marks] == ["<Hello!>", "<4>", "<It is 6.>"]


def test_the_date_in_a_template_can_be_pinned() -> None:
    pinned = ChatTemplate({"default": "{{ strftime_now('%d %b %Y') }}"}, {}, date=date(2024, 7, 26))
    assert pinned.render(ONE).text == "26 Jul 2024"


def test_keys_without_a_value_do_not_reach_the_template() -> None:
    messages = [{"role": "user", "content": "x", "tool_calls": None, "name": None}]
    assert template("{{ messages[0] | tojson }}").render(messages).text == '{"role": "user", "content": "x"}'
