"""`lptune ls`: what this installation can run."""

import click

from lptune.cli import catalog


@click.command()
def ls() -> None:
    """List the recipes, and below each the configs that are for it."""
    configs = {
        name: (catalog.recipe_of(path), catalog.comment(path)) for name, path in catalog.configs().items()
    }
    width = max(map(len, configs), default=0)
    for recipe, path in catalog.recipes().items():
        click.echo(f"{recipe}  {catalog.summary(path)}".rstrip())
        for name, (of, comment) in configs.items():
            if of == recipe:
                click.echo(f"  {name:<{width}}  {comment}".rstrip())
