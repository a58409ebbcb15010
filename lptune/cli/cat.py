"""`lptune cat`: show a recipe or a config."""

import click

from lptune.base.errors import UserError
from lptune.base.files import read_text
from lptune.cli import catalog, recipe


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
