"""`lptune cat`: show a recipe or a config."""

import click

from lptune.cli import catalog, recipe
from lptune.config import UserError, read_text


@click.command()
@click.argument("name")
def cat(name: str) -> None:
    """Print the recipe or config NAME."""
    path = catalog.find_any(name)
    try:
        text = read_text(path, recipe.MAX_CHARS)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: is not text: {error}") from None
    click.echo(text, nl=False)
