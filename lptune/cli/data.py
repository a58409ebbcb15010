"""`lptune data`: the rows of a run as the model will see them, before there is a run.

It reads what a run reads of model and data, with the same errors: the tokenizer and config.json of
model.path, and the files of `data`. It needs no weights, no torch and no GPU.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lptune.base.errors import UserError
from lptune.base.model_folder import check_model_folder
from lptune.base.text import printable
from lptune.cli import recipe
from lptune.config import RunConfig

if TYPE_CHECKING:
    from lptune.data import Rows, Tokenizer


@click.command()
@click.option("--config", "config_name", metavar="CONFIG", help="Name or path of a config.  [required]")
@click.option(
    "--rows",
    "num_rows",
    type=click.IntRange(min=0),
    help="Show so many rows, as training begins.  [default: 1]",
)
@click.option("--row", type=click.IntRange(min=0), help="Show this packed row.")
@click.option("--document", type=click.IntRange(min=0), help="Show this document.")
@click.option("--held-out", is_flag=True, help="Show the held-out rows, not those to train on.")
@click.option("--ids", is_flag=True, help="Show the tokens one by one, with their ids.")
@click.option("--color/--no-color", default=None, help="[default: on a terminal, unless NO_COLOR is set]")
@click.argument("arguments", nargs=-1, metavar="[RECIPE] [key=value …]")
def data(
    config_name: str | None,
    num_rows: int | None,
    row: int | None,
    document: int | None,
    held_out: bool,
    ids: bool,
    color: bool | None,
    arguments: tuple[str, ...],
) -> None:
    """Show packed rows of CONFIG as the model will see them: text, with the targets of the loss marked.

    Takes RECIPE, --config and keys as `lptune run` does. Prints the report of the data and the lengths of the
    documents as well. Reads the tokenizer in model.path and the data, no weights.
    """
    if sum(choice is not None for choice in (num_rows, row, document)) > 1:
        raise click.UsageError("--rows, --row and --document exclude each other")
    if config_name is None:
        raise UserError("data: --config is required: lptune data --config CONFIG; `lptune ls` shows them")
    recipe_path, config_path, overrides = recipe.split(config_name, arguments)
    cfg = recipe.load(recipe_path, config_path, overrides)
    if not isinstance(cfg, RunConfig):
        raise UserError(f"data: {recipe_path.stem} does not train: it has no rows to show")
    tokenizer, rows, report = _prepare(cfg, held_out)
    from lptune.data import shown

    marks = shown.COLOURS if (_wants_colour() if color is None else color) else shown.BRACKETS
    for line in report:
        click.echo(printable(line))
    which = "held-out" if held_out else "training"
    click.echo("\n".join([f"{which} documents by length:", *shown.histogram(rows.documents.lengths)]))
    if document is not None:
        _check_number("--document", document, rows.num_documents)
        lines = shown.document_lines(rows, document, tokenizer, marks, ids)
        click.echo("\n".join(["", *([] if ids else [marks.legend]), *lines]), color=True)
        return
    if row is not None:
        _check_number("--row", row, rows.num_rows)
    first = range(min(1 if num_rows is None else num_rows, rows.num_rows))
    # Held-out rows are evaluated in order. The seed decides the order of the others.
    chosen = [each if held_out else rows.row_at(each, cfg.seed) for each in first] if row is None else [row]
    if chosen and not ids:
        click.echo(f"\n{marks.legend}", color=True)
    for number in chosen:
        click.echo("\n".join(["", *shown.row_lines(rows, number, tokenizer, marks, ids)]), color=True)


def _prepare(cfg: RunConfig, held_out: bool) -> "tuple[Tokenizer, Rows, list[str]]":
    """The tokenizer, the rows to show and the report, made as a run makes them."""
    folder = Path(cfg.model.path).expanduser()
    check_model_folder(folder)
    from lptune import data, models

    vocab_size = models.read_config(folder).vocab_size
    tokenizer = data.load_tokenizer(folder, cfg.data.chat_template)
    prepare = getattr(data, cfg.PREPARE)
    train, evaluation, report = prepare(cfg.data, tokenizer, seed=cfg.seed, vocab_size=vocab_size)
    rows = evaluation if held_out else train
    if rows is None:
        raise UserError("--held-out: nothing is held out; set data.eval_fraction or data.eval_source")
    return tokenizer, rows, report


def _check_number(option: str, number: int, count: int) -> None:
    if number >= count:
        raise UserError(f"{option}: {number} is not there; they are numbered 0 to {count - 1:,}")


def _wants_colour() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
