"""`lptune cat`: show a recipe or a config."""

import click

from lptune.cli import catalog
from lptune.config import UserError


@click.command()
@click.argument("name")
def cat(name: str) -> None:
    """Print the recipe or config NAME."""
    path = catalog.find_any(name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: is not text: {error}") from None
    click.echo(text, nl=False)
