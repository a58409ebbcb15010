"""`lptune cp`: copy a recipe or a config, to change the copy. The copy runs by its path."""

from pathlib import Path

import click

from lptune.base.errors import UserError
from lptune.base.files import MAX_BYTES, kind_of, read_bytes, write_bytes, write_errors
from lptune.cli import catalog, interrupts
from lptune.cli.places import PathArgument, check_above


@click.command()
@click.argument("name")
@click.argument("dest", type=PathArgument())
@click.option("--force", is_flag=True, help="Overwrite DEST.")
@click.option("--parents", "--make-parents", is_flag=True, help="Make the folders above DEST.")
def cp(name: str, dest: Path, force: bool, parents: bool) -> None:
    """Copy the recipe or config NAME to the file or folder DEST."""
    source = catalog.find_any(name)
    if dest.is_dir():
        dest = dest / source.name
    if not dest.parent.is_dir():
        if not parents:
            raise UserError(f"{dest.parent}: no such folder; make it, or add --parents")
        check_above(dest)
    if kind_of(dest) and not force:  # a dangling link exists, too
        raise UserError(f"{dest}: exists; add --force to overwrite it")
    if dest.exists() and (not dest.is_file() or dest.samefile(source)):  # /dev/stdout is a link, to a pipe
        raise UserError(f"{dest}: cannot be overwritten by {name}; choose another DEST")
    content = read_bytes(source, MAX_BYTES)
    with interrupts.Undoing(), write_errors(f"{dest}:", "choose another DEST"):
        dest.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(dest, content, shared=True)
    click.echo(f"copied {name} to {dest}")
