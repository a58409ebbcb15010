"""Turn a config of another trainer into one of lptune."""

from pathlib import Path

import click

from lptune.base.errors import UserError
from lptune.base.files import write_errors, write_text
from lptune.cli import catalog, interrupts, recipe
from lptune.cli.places import PathArgument, check_new_config


@click.command()
@click.argument("file", type=PathArgument())
@click.option("--output", type=PathArgument(), metavar="FILE", help="The new config.  [default: printed]")
@click.option(
    "--world-size",
    type=click.IntRange(min=1),
    metavar="N",
    help="Ranks that FILE ran on: rows per step follow from it.  [default: as a script's launcher, else 1]",
)
@click.option(
    "--num-steps",
    type=click.IntRange(min=1),
    metavar="N",
    help="Optimizer steps of the run of FILE, where it gives only shares of them.",
)
def migrate(file: Path, output: Path | None, world_size: int | None, num_steps: int | None) -> None:
    """Turn FILE, a full fine-tuning config of torchtune, torchtitan, axolotl, LLaMA-Factory or TRL, into one
    of lptune. FILE may be a shell script with a command line of the last two.

    Nothing in FILE is executed. The report names every key of FILE: kept, changed, or without an equivalent.
    Without --output the config goes to stdout and the report to stderr.
    """
    from lptune.tools.migrate.reading import migrate  # slow to import
    from lptune.tools.migrate.report import to_text, to_yaml

    if output is not None:
        check_new_config(output)
    draft = migrate(file, num_ranks=world_size, num_steps=num_steps)
    name = "my.yaml" if output is None else str(output)
    text = to_yaml(draft, name)
    if output is not None:
        _write(output, text)
        if problem := _problem(output, draft.recipe):
            draft.ask("config", problem)
    click.echo(to_text(draft, name), err=output is None)
    if output is None:
        click.echo(text, nl=False)


def _write(output: Path, text: str) -> None:
    with interrupts.Undoing(), write_errors(f"{output}:", "choose another --output"):
        output.parent.mkdir(parents=True, exist_ok=True)
        write_text(output, text, shared=True)


def _problem(output: Path, recipe_name: str) -> str:
    """What `lptune validate` would say against the new config."""
    try:
        recipe.load(catalog.find_recipe(recipe_name), output, ())
    except UserError as error:
        return str(error).removeprefix(f"{output}: ")
    return ""
