"""The report of a migration for a terminal of 80 columns, and the YAML whose lines name their source."""

import json
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from lptune.base.text import printable, wrapped
from lptune.tools.migrate.draft import REASONS, UNKNOWN, Draft, Setting, leaves
from lptune.tools.migrate.memory import memory_lines

_SECTIONS = (
    *(
        "model",
        "data",
        "precision",
        "parallel",
        "optimizer",
        "schedule",
        "preference",
        "kto",
        "checkpoint",
        "export",
        "logging",
    ),
    "",
)


def to_text(draft: Draft, config: str) -> str:
    """The report: what was migrated, what changed its meaning, what has no equivalent, what to fill in.

    config: the file that was written, for the commands at the end. Control characters are escaped.
    """
    return printable("\n".join(_lines(draft, config)))


def counts(draft: Draft) -> dict[str, int]:
    """Number of keys of the old file: in all, migrated with the same meaning, changed, without equivalent,
    off or empty, unknown. Every key is in exactly one of these.
    """
    keys = set(leaves(draft.values))
    same = {key for each in draft.settings if not each.note for key in each.theirs}
    changed = {key for each in draft.settings if each.note for key in each.theirs}
    found = {"keys": len(keys)}
    for name, group in (("same", same - changed), ("changed", changed)):
        group = _below(keys, group)
        found[name] = len(group)
        keys -= group
    for why in REASONS:
        group = _below(keys, {each.theirs for each in draft.dropped if each.why == why})
        found[why] = len(group)
        keys -= group
    return found | {"lost": len(keys)}


def _below(keys: set[str], named: set[str]) -> set[str]:
    """The keys that are in `named`, or below a section in `named`."""
    return {key for key in keys if any(key == n or key.startswith((f"{n}.", f"{n}[")) for n in named)}


def to_yaml(draft: Draft, config: str) -> str:
    """The new config. Each line's comment names the key that it comes from.

    config: the name under which the file will lie, for the command in its first comment.
    """
    head = [
        f"# Migrated by `lptune migrate` from a config of {draft.tool}, {_one_line(draft.file.name)}.",
        "#",
        f"#   lptune run {draft.recipe} --config {_one_line(shlex.quote(config))}",
        *(f"# to fill in: {_one_line(f'{ours}: {text}')}" for ours, text in draft.to_fill),
        "",
    ]
    sections: dict[str, list[Setting]] = defaultdict(list)
    for setting in draft.settings:
        sections[setting.ours.rpartition(".")[0]].append(setting)
    body = []
    for section in sorted(sections, key=_SECTIONS.index):
        body += [f"{section}:"] * bool(section)
        for each in sections[section]:
            value = each.value if draft.tool == "torchtune" else _literal(each.value)
            line = f"{'  ' * bool(section)}{each.ours.rpartition('.')[2]}: {_scalar(value)}"
            body.append(f"{line}   # {', '.join(each.theirs) or f'default of {draft.tool}'}")
    return "\n".join([*head, *body]) + "\n"


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def _literal(value: Any) -> Any:
    """`value` of a tool without interpolations: its `${…}` is text, and would be a variable here."""
    if isinstance(value, dict):
        return {key: _literal(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_literal(each) for each in value]
    # OmegaConf: a backslash escapes `${`, and one before it escapes the backslash.
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _scalar(value: Any) -> str:
    """`value` in one line of YAML: JSON, which YAML includes, but plain for words and short for numbers."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_scalar(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_scalar, value)) + "]"
    if isinstance(value, float):
        digits, power, exponent = repr(value).partition("e")
        # 2e-05 -> 2.0e-05: YAML 1.1 takes a number without a dot for text.
        return f"{digits if '.' in digits else f'{digits}.0'}{power}{exponent}" if power else digits
    is_plain = isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _NO_WORDS
    if is_plain:
        return str(value)
    return _NOT_IN_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))


_NOT_IN_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
"""Characters that JSON leaves as they are in quotes, and YAML refuses or takes for the end of a line."""
_PLAIN = re.compile(r"(\./|/)?[A-Za-z][\w./-]*", re.ASCII)
"""Text that YAML takes for text without quotes, but for `_NO_WORDS`."""
_NO_WORDS = ("null", "true", "false", "yes", "no", "on", "off", "nan", "inf", "y", "n")


def _lines(draft: Draft, config: str) -> Iterator[str]:
    yield f"{draft.tool}: {draft.file} -> {config} (recipe {draft.recipe})"
    for text in draft.assumed:
        yield from wrapped(f"assumed: {text}", indent=2, hang=2)
    same = [each for each in draft.settings if each.theirs and not each.note]
    changed = [each for each in draft.settings if each.note and each.theirs]
    defaults = [each for each in draft.settings if not each.theirs]
    for title, group in (
        ("same meaning (theirs -> ours = value)", same),
        ("changed meaning", changed),
        (f"defaults of {draft.tool}, written out because ours differ", defaults),
    ):
        if group:
            yield from ("", title)
        for each in group:
            arrow = f"{', '.join(each.theirs)} -> " if each.theirs else ""
            yield from wrapped(f"{arrow}{each.ours} = {_scalar(each.value)}", indent=2, hang=2)
            yield from wrapped(each.note, indent=6, hang=2)
    if draft.dropped:
        yield from ("", "no equivalent")
    for why in REASONS:
        yield from _dropped(draft, why)
    if draft.to_fill:
        yield from ("", "to fill in")
    for ours, text in draft.to_fill:
        yield from wrapped(f"{ours}: {text}", indent=2, hang=2)
    number = counts(draft)
    gone = sum(number[why] for why in REASONS)
    yield ""
    yield from wrapped(
        f"{number['keys']} keys: {number['same']} with the same meaning, {number['changed']} with a changed "
        f"one, {gone} without an equivalent ({number[UNKNOWN]} of them unknown); to fill in: "
        f"{len(draft.to_fill)}.",
        hang=2,
    )
    if all(each.ours != "precision.kind" for each in draft.settings):
        yield from wrapped(
            "It trains without low precision, as there. `lptune advise` tells what each precision.kind would "
            "gain on your device.",
            hang=2,
        )
    for text in memory_lines(draft, config):
        yield from wrapped(text, hang=2)
    yield f"next: lptune validate {config}"


def _dropped(draft: Draft, why: str) -> Iterator[str]:
    """One line for each key with a text of its own, one for all others."""
    group = [each for each in draft.dropped if each.why == why]
    if group:
        yield f"  {why}"
    by_text: dict[str, list[str]] = defaultdict(list)
    for each in group:
        by_text[each.text].append(each.theirs + (f" ({each.num_keys} keys)" if each.num_keys > 1 else ""))
    for text, names in by_text.items():
        yield from wrapped(", ".join(names) + (f": {text}" if text else ""), indent=4, hang=2)
