"""The report of a migration for a terminal of 80 columns, and the YAML whose lines name their source."""

import math
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import yaml  # type: ignore[import-untyped]

from lptune.base.text import printable, size_text, wrapped
from lptune.cli import catalog, ls
from lptune.config import OPTIMIZER_KINDS
from lptune.config.load import Dumper
from lptune.tools.migrate.draft import REASONS, UNKNOWN, Draft, Setting, leaves

_SECTIONS = (
    "model", "data", "precision", "parallel", "optimizer", "schedule", "preference", "kto", "checkpoint",
    "export", "logging", "",
)  # fmt: skip


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


class _OneLine(Dumper):
    """Text with line breaks has quotes and escapes, so that each value has one line."""


def _represent_text(dumper: Any, text: str) -> Any:
    node = Dumper.yaml_representers[str](dumper, text)
    if not text.isprintable():
        node.style = '"'
    return node


_OneLine.add_representer(str, _represent_text)


def _scalar(value: Any) -> str:
    """`value` in one line of YAML."""
    text: str = yaml.dump(
        value, Dumper=_OneLine, sort_keys=False, allow_unicode=True, default_flow_style=True, width=math.inf
    )
    return text.removesuffix("...\n").strip()


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
    for text in _memory_lines(draft, config):
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


# ---- memory

_VARIANT = re.compile(r"^meta-|-(instruct|base|it|chat|hf|v0\.\d)\b")


def _memory_lines(draft: Draft, config: str) -> Iterator[str]:
    """The bytes there and here over all ranks, and the command that finds what fits; none where the size of
    the model is not known, by the name of a checkpoint that a config of lptune downloads.

    Tools that hold weights in bf16 alone have gradients and AdamW's moments in bf16, too: 2 + 2 + 4 bytes of
    each weight, where float32 takes 4 + 4 + 8. The notes of the draft say which it was.
    """
    named = {_plain(ls.hub_id(file)): name for name, file in catalog.configs().items()}
    number = ls.num_weights(named.get(_plain(str(draft.value_of("model.path", "?"))), ""))
    if number is None:
        return
    in_bf16 = any(each.ours == "compute_dtype" and each.note for each in draft.settings)
    there, here, rounded = (
        size_text(int(number * _bytes(draft, *widths)))
        for widths in ((2, 2) if in_bf16 else (4, 4), (4, 4), (2, 4))
    )
    without = f", with optimizer.master=none {rounded}" if in_bf16 else ""
    yield (
        f"weights, gradients and optimizer over all ranks: there about {there}{' in bf16' * in_bf16}, here "
        f"{here}{without}; activations come on top."
    )
    yield f"`lptune plan --config {config} --device GPU --world-size N --write FILE` finds what fits."


def _bytes(draft: Draft, of_weight: int, of_moment: int) -> int:
    """Of each weight, with its gradient and moments; those of 8 bits take 2, those of sgd one at most."""
    kind = str(draft.value_of("optimizer.kind", "adamw"))
    of_kind = OPTIMIZER_KINDS[kind]
    moments = of_kind.num_moments * (1 if of_kind.num_bits == 8 else of_moment)
    if kind == "sgd" and not draft.value_of("optimizer.momentum"):
        moments = 0
    return of_weight + moments + (0 if draft.value_of("optimizer.in_backward") else of_weight)


def _plain(name: str) -> str:
    """The last part of a path or an id without what does not change the size."""
    return _VARIANT.sub("", name.rstrip("/").rpartition("/")[2].lower())
