"""The process in which transformers works: it loads tokenizers and renders chat templates for hf.py.

Files and templates come from other people, and transformers is large. In a process of its own, a template
that takes all memory or hours is ended from outside, and no process that trains imports transformers. This
file is run, not imported, and imports nothing of lptune.

A question is a line of JSON on stdin. An answer is a line of JSON on stdout, followed by bodies, whose sizes
in bytes the line tells in `sizes`. Limits of a question: `cpu_s`, after which the kernel kills the process
with SIGPROF, and `memory`, the bytes that it may add to its address space, after which Python raises
MemoryError. The process ends with its stdin, and by SIGALRM after IDLE_S without a question.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from datetime import date, datetime
from functools import cache
from typing import Any

IDLE_S = 20
Answer = tuple[dict[str, Any], list[bytes]]


def main() -> None:
    """Answers the questions on stdin."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group; stdin ends with its owner
        signal.signal(number, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    try:
        sys.modules["torch"] = None  # type: ignore[assignment]  # half of the time of the import
        import transformers.utils.chat_template_utils  # noqa: F401 - AutoTokenizer only to load one: 0.5 s
    except Exception as error:  # of a broken installation
        _write(answers, {"error": "import", "message": _text(error)}, [])
        return
    operations: dict[str, Callable[[dict[str, Any]], Answer]] = {"load": _load, "render": _render}
    for line in sys.stdin.buffer:
        signal.alarm(0)
        question = json.loads(line)
        _limit_memory(question["memory"])
        signal.setitimer(signal.ITIMER_PROF, question["cpu_s"])
        try:
            facts, bodies = operations[question["operation"]](question)
        except Exception as error:  # files and templates can fail in any way
            facts, bodies = {"error": "failed", "message": _text(error)}, []
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(answers, facts, bodies)
        del facts, bodies, question
        signal.alarm(IDLE_S)


def _write(answers: Any, facts: dict[str, Any], bodies: list[bytes]) -> None:
    line = json.dumps({**facts, "sizes": [len(body) for body in bodies]})
    answers.write(b"".join([line.encode(), b"\n", *bodies]))
    answers.flush()


def _limit_memory(amount: int) -> None:
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = size + amount
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard < 0 else min(limit, hard), hard))


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _load(question: dict[str, Any]) -> Answer:
    """The tokenizer of a folder as AutoTokenizer loads it. The body is its tokenizer.json, changed so that
    the offsets of a token include its leading space.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = AutoTokenizer.from_pretrained(
        question["folder"], local_files_only=True, trust_remote_code=False
    )
    name = type(tokenizer).__name__
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return {"error": "class", "message": f"{name} does not read tokenizer.json"}, []
    changed = [
        method
        for method in ("__call__", "encode", "_encode_plus")
        if getattr(type(tokenizer), method) is not getattr(PreTrainedTokenizerFast, method)
    ]
    infill = getattr(tokenizer, "fill_token", None) if changed else None  # Code Llama's is known
    if changed and not infill:
        return {"error": "class", "message": f"{name} does more than tokenizer.json says"}, []
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    facts = {
        "special_tokens": {key: str(text) for key, text in tokenizer.special_tokens_map.items()},
        "infill_token": str(infill or ""),
        "splits_special": bool(tokenizer.split_special_tokens),
    }
    spec = json.loads(backend.to_str())
    _untrim_offsets(spec["post_processor"])
    _untrim_offsets(spec["pre_tokenizer"])
    return facts, [json.dumps(spec, ensure_ascii=False).encode("utf-8", "surrogatepass")]


def _untrim_offsets(node: Any) -> None:
    """Switches `trim_offsets` off everywhere in `node`. Ids stay the same."""
    if isinstance(node, dict):
        if "trim_offsets" in node:
            node["trim_offsets"] = False
        for child in node.values():
            _untrim_offsets(child)
    elif isinstance(node, list):
        for child in node:
            _untrim_offsets(child)


def _render(question: dict[str, Any]) -> Answer:
    """Renders beginnings of conversations. A conversation is messages, tools and parts; a part is (number of
    messages, with generation prompt).

    Each body is the text of a part, up to `max_characters` for all of them. `counts` has the number of bodies
    of each conversation: after a part that fails, none of its parts follows. `error` is the last failure.
    """
    import jinja2

    try:
        template = _compiled(question["source"], *question["marks"])
    except jinja2.TemplateSyntaxError as error:
        return {"error": "syntax", "line": error.lineno, "message": error.message or ""}, []
    except Exception as error:  # nesting too deep for jinja, or for the Python that it writes
        return {"error": "compile", "message": _text(error)}, []
    today = date.fromisoformat(question["today"])

    def strftime_now(pattern: str) -> str:
        return datetime.combine(today, datetime.now().time()).strftime(pattern)

    facts: dict[str, Any] = {"counts": []}
    bodies: list[bytes] = []
    left = question["max_characters"]
    for messages, tools, parts in question["conversations"]:
        signal.setitimer(signal.ITIMER_PROF, question["cpu_s"])
        variables = {**question["variables"], "strftime_now": strftime_now, "tools": tools}
        texts, failed = _texts(template, variables, messages, parts, left)
        left -= sum(map(len, texts))
        facts |= failed
        facts["counts"].append(len(texts))
        bodies += [text.encode("utf-8", "surrogatepass") for text in texts]
    return facts, bodies


def _texts(
    template: Any, variables: dict[str, Any], messages: list[Any], parts: list[Any], left: int
) -> tuple[list[str], dict[str, str]]:
    """The texts of the parts up to the first that fails, of at most `left` characters; and that failure."""
    import jinja2

    texts: list[str] = []
    for upto, prompt in parts:
        own = {**variables, "messages": messages[:upto], "add_generation_prompt": prompt}
        pieces = []
        try:
            for piece in template.generate(own):
                pieces.append(piece)
                left -= len(piece)
                if left < 0:
                    return texts, {"error": "long", "message": ""}
            texts.append("".join(pieces))
        except jinja2.TemplateError as error:
            return texts, {"error": "refused", "message": str(error.message or error)}
        except Exception as error:  # a template is a program and can fail in any way
            del pieces
            return texts, {"error": "failed", "message": _text(error)}
    return texts, {}


@cache
def _compiled(source: str, opening: str, closing: str) -> Any:
    """The template in the environment of transformers. `{% generation %}` blocks write two marks around what
    they hold, which is exact in macros, loops and `{% set %}`, too.
    """
    from jinja2 import nodes, pass_context
    from jinja2.ext import Extension
    from transformers.utils.chat_template_utils import _compile_jinja_template

    class Marks(Extension):
        tags = {"generation"}  # noqa: RUF012 - the base class declares it so
        priority = 200  # after the extension of transformers, whose tag it takes over

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Callable[[], str]) -> str:
            return f"{opening}{caller()}{closing}"

    environment = _compile_jinja_template("").environment
    # Constants are computed when the template is rendered: their errors are not errors of its syntax.
    environment = environment.overlay(
        optimized=False, finalize=pass_context(lambda context, value: value), extensions=[Marks]
    )
    return environment.from_string(source)


if __name__ == "__main__":
    main()
