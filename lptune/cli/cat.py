"""`lptune cat`: show a recipe or a config."""

import click

from lptune.cli import catalog


@click.command()
@click.argument("name")
def cat(name: str) -> None:
    """Print the recipe or config NAME."""
    click.echo(catalog.find_any(name).read_text(encoding="utf-8"), nl=False)
