"""`lptune ls`: what this installation can run."""

import click

from lptune.cli import catalog


@click.command()
def ls() -> None:
    """List all recipes and configs."""
    recipes = catalog.recipes()
    width = max(map(len, recipes), default=0)
    click.echo("recipes")
    for name, path in recipes.items():
        click.echo(f"  {name:<{width}}  {catalog.summary(path)}".rstrip())
    click.echo("configs")
    for name in catalog.configs():
        click.echo(f"  {name}")
