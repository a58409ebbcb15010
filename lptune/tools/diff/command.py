"""Compare two runs or two configs."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from lptune.base.errors import UserError
from lptune.base.text import printable, terminal_columns
from lptune.cli import catalog, recipe
from lptune.config import check_path

if TYPE_CHECKING:
    from lptune.tools.diff.sides import Side


@click.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
def diff(a: str, b: str) -> None:
    """Compare A and B, each the folder of a run, or the name or path of a config.

    Prints the keys whose values differ (with defaults filled in), versions and device, the digest of the
    data, layers whose precision differs, the first step where the losses part, bit for bit and by more than a
    thousandth, and the last losses. Exits with 0 if both could be read, whether they differ or not: two runs
    always differ in something, and which of it matters is not for an exit code to say.
    """
    from lptune.tools.diff.sides import lines

    for line in lines(_side("A", a), _side("B", b), terminal_columns()):
        click.echo(printable(line))


def _side(key: str, name: str) -> "Side":
    check_path(key, name)
    from lptune.tools.diff.sides import Side, side_of_run

    folder = Path(name).expanduser()
    if folder.is_dir():
        return side_of_run(folder)
    from lptune.config import to_dict
    from lptune.tools.report.run import flat

    path = catalog.find_config(name)
    return Side(name, flat(to_dict(_load(path))))


def _load(path: Path) -> object:
    """The config at `path`, by its own recipe, or, since the config.yaml of a run does not name it, by the
    first recipe whose keys it has.
    """
    own = catalog.find_recipe(catalog.recipe_of(path))
    try:
        return recipe.load(own, path, ())
    except UserError as error:
        for other in catalog.recipes().values():
            if other != own:
                try:
                    return recipe.load(other, path, ())
                except UserError:
                    continue
        raise error from None
