"""`lptune ls`: what this installation can run, how large it is, and which GPU could hold it. Needs no torch.

A config is named after its model, whose config.json is a preset: that gives the number of weights. The id on
the hub is that of the `lptune download` in the config's first comment.
"""

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click

from lptune.base.errors import UserError, closest
from lptune.base.files import read_text
from lptune.base.text import cut, line_width, table, text_width, wrapped
from lptune.cli import catalog
from lptune.config import OPTIMIZER_KINDS

_BYTES_PER_WEIGHT = 16
"""float32 weight and gradient, and the two moments of AdamW: what a config takes that names no other."""
_COPY_BYTES = 2
"""One GPU keeps a copy of each weight in compute dtype for its GEMMs."""
_GPUS_GB = (24, 48, 80)
"""Sizes of memory that many GPUs have. Of larger runs the number of GPUs with the last one is told."""
_USABLE = 0.9
"""Share of a GPU's memory that a plan may take, as in lptune/plan/fit.py."""
_HUB_ID = re.compile(r"^# {1,9}lptune download ([\w.-]{1,96}/[\w.-]{1,96})", re.MULTILINE)
# Not the value of another key: no precision.kind begins so.
_KIND = re.compile(r"^[^#\n]{0,100}\bkind: (adamw\w{0,20})\b", re.MULTILINE)
_NO_MASTER = re.compile(r"^[^#\n]{0,100}\bmaster: none\b", re.MULTILINE)
_IN_BACKWARD = re.compile(r"^[^#\n]{0,100}\bin_backward: true\b", re.MULTILINE)
_OFFLOADS = re.compile(r"^[^#\n]{0,100}\bcpu_offload: true\b", re.MULTILINE)
_NOTE = (
    "Number of weights; memory of the weights, gradients and AdamW state over all GPUs, with the config's "
    "optimizer; the GPUs of 24, 48 or 80 GB that this takes at least (host: host memory); the id on the hub. "
    "Activations come on top: `lptune plan --config CONFIG` counts them. optimizer.kind=adamw_8bit with "
    "optimizer.master=none takes 6 bytes of each weight, AdamW in float32 16."
)


class Row(NamedTuple):
    """A config in the list."""

    name: str
    recipe: str
    comment: str
    num_weights: int | None
    """None: the config is not named after a preset."""
    hub_id: str
    bytes_per_weight: float
    copy_bytes: int | None
    """See `bytes_of`."""

    @property
    def cells(self) -> tuple[str, ...]:
        """Weights, memory, the GPUs that it needs, and the hub id; empty without a preset."""
        if self.num_weights is None:
            return ()
        memory = f"{self.num_weights * self.bytes_per_weight / 1e9:.0f} GB"
        gpus = needs(self.num_weights, self.bytes_per_weight, self.copy_bytes)
        return count_text(self.num_weights), memory, gpus.removeprefix("≥ "), self.hub_id


@click.command()
@click.argument("words", nargs=-1, metavar="[RECIPE|WORD …]")
def ls(words: tuple[str, ...]) -> None:
    """List the recipes, and below each the configs that are for it.

    With a word, only the recipe with this name, or the configs whose name or hub id holds it: `lptune ls
    full_dpo`, `lptune ls gemma`.
    """
    rows = [row(name, path) for name, path in catalog.configs().items()]
    recipes = catalog.recipes()
    shown = [each for each in rows if all(_is_meant(word, each) for word in words)]
    named = [name for name in recipes if not words or all(word == name for word in words)]
    if not shown and not named:
        known = {*recipes, *(part for each in rows for part in (each.name, each.name.partition("/")[0]))}
        hint = closest(words[0], known) or "; `lptune ls` shows what there is"
        raise UserError(f"ls: {' '.join(words)}: no recipe and no config has this in its name{hint}")
    width = line_width()
    for name, path in recipes.items():
        of_recipe = [each for each in shown if each.recipe == name]
        if of_recipe or name in named:
            click.echo(cut(f"{name}  {catalog.summary(path)}".rstrip(), width))
            for line in _table(of_recipe):
                click.echo(cut(line, width))
    if any(each.cells for each in shown):
        click.echo("\n".join(["", *(wrapped(_NOTE, text_width()) if width else [_NOTE])]))


def row(name: str, path: Path) -> Row:
    """What is known of a config."""
    kind, comment = catalog.recipe_of(path), catalog.comment(path)
    return Row(name, kind, comment, num_weights(name), hub_id(path), *bytes_of(path))


def bytes_of(config: Path) -> tuple[float, int | None]:
    """For each weight: the bytes of weight, gradient and moments with the optimizer that the config names,
    and those of the copy in compute dtype that one GPU keeps beside a float32 weight; None: all of them are
    in host memory.
    """
    try:
        text = read_text(config, 2**20)
    except (OSError, ValueError):  # reported where the config is loaded
        text = ""
    named = _KIND.search(text)
    kind = OPTIMIZER_KINDS.get(named[1] if named else "", OPTIMIZER_KINDS["adamw"])
    kept = kind.num_moments * (kind.num_bits / 8 + (4 / 128 if kind.num_bits == 8 else 0))  # scales of blocks
    weight, copy = (2, 0) if _NO_MASTER.search(text) else (4, _COPY_BYTES)
    gradient = 0 if _IN_BACKWARD.search(text) else weight  # freed block by block
    return weight + gradient + kept, None if _OFFLOADS.search(text) else copy


def hub_id(config: Path) -> str:
    """The id on the hub that the first comment of a config downloads; empty if it downloads nothing."""
    try:
        found = _HUB_ID.search(read_text(config, 2**20))
    except (OSError, ValueError):  # reported where the config is loaded
        return ""
    return found[1] if found else ""


def num_weights(name: str) -> int | None:
    """The number of weights of the model that the config is named after; None if it is no preset."""
    from lptune import models  # slow to import: 30 ms

    # Configs of other recipes than full_finetune have a suffix: llama3_2/1b_distill.
    family, _, size = name.partition("/")
    size = size.partition("_")[0]
    if f"{family}/{size}" not in models.preset_names():
        return None
    if family in models.HF_PRESETS:
        return models.HF_PRESETS[family][size].num_weights
    return models.config_from_dict(models.PRESETS[family][size], name).num_parameters


def count_text(number: int) -> str:
    """A number of weights with three digits: `1.24 B`, `268 M`."""
    scaled, unit = (number / 1e9, "B") if number >= 0.9995e9 else (number / 1e6, "M")
    return f"{scaled:.{max(0, 2 - int(math.log10(max(scaled, 1)) + 1e-9))}f} {unit}"


def needs(
    number: int, bytes_per_weight: float = _BYTES_PER_WEIGHT, copy_bytes: int | None = _COPY_BYTES
) -> str:
    """The smallest memory that holds so many weights and their state: `≥ 48 GB`, `≥ 2x80 GB`, `host`. The
    bytes: as `bytes_of` has them.
    """
    if copy_bytes is None:
        return "host"
    for size in _GPUS_GB:
        if number * (bytes_per_weight + copy_bytes) <= _USABLE * size * 1e9:
            return f"≥ {size} GB"
    # Several GPUs share the state, and gather the weights of a block at a time.
    count = math.ceil(number * bytes_per_weight / (_USABLE * _GPUS_GB[-1] * 1e9))
    return f"≥ {max(2, count)}x{_GPUS_GB[-1]} GB"


def _is_meant(word: str, of: Row) -> bool:
    return word == of.recipe or (
        word not in catalog.recipes() and word.lower() in f"{of.name} {of.hub_id}".lower()
    )


def _table(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each row: its cells in columns, or its comment."""
    lines = iter(table([each.cells for each in rows if each.cells], ">>><"))
    start = max((len(each.name) for each in rows), default=0)
    for each in rows:
        yield f" {each.name:<{start}}  {next(lines) if each.cells else each.comment}".rstrip()
