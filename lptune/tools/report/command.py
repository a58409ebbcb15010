"""Draw runs in one HTML file."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lptune.base.errors import UserError
from lptune.base.files import kind_of, write_errors, write_text
from lptune.base.text import printable
from lptune.cli.places import PathArgument

if TYPE_CHECKING:
    from lptune.tools.report.run import Run

_MAX_RUNS = 50


@click.command()
@click.argument("runs", nargs=-1, type=PathArgument(), metavar="RUN...")
@click.option("--open", "opens", is_flag=True, help="Show it in the browser.")
@click.option(
    "--output",
    type=PathArgument(),
    metavar="FILE",
    help="Where to write.  [default: RUN/report.html; of several RUNs ./report.html]",
)
@click.option(
    "--reference",
    type=PathArgument(),
    metavar="RUN",
    help="Draw this run neutral, and the differences from it.",
)
@click.option(
    "--svg", "svg_folder", type=PathArgument(), metavar="FOLDER", help="Also each chart as an SVG file."
)
def report(
    runs: tuple[Path, ...],
    opens: bool,
    output: Path | None,
    reference: Path | None,
    svg_folder: Path | None,
) -> None:
    """Write one HTML file with the curves, samples, precision plan and config of each RUN (its folder).

    RUN may also be a folder of runs, such as that of a sweep. Several runs are laid over each other and
    sorted by their final held-out loss. A run may be going on. The page fetches nothing, so the file can be
    sent and kept.
    """
    folders, base = _folders([each for run in runs for each in _runs_of(run)], reference)
    home = folders[0] if len(folders) == 1 else runs[0] if len(runs) == 1 and reference is None else Path()
    path = output or home / "report.html"
    if kind_of(path) == "a folder":
        raise UserError(f"--output: {path} is a folder; give a file, such as {path / 'report.html'}")
    if not path.parent.is_dir():
        raise UserError(f"--output: there is no folder {path.parent}; make it first")
    read = _write(folders, base, path)
    click.echo(f"report: {path.absolute()}")
    if svg_folder is not None:
        _write_charts(svg_folder, read, base)
    if opens:
        import webbrowser

        if not webbrowser.open(path.absolute().as_uri()):
            click.echo("note: there is no browser here; open that file yourself", err=True)


def _runs_of(folder: Path) -> list[Path]:
    """The folder of a run itself; the runs in a folder that is none, such as that of a sweep."""
    if not folder.is_dir() or any(kind_of(folder / name) for name in ("metrics.jsonl", "config.yaml")):
        return [folder]
    return sorted(each.parent for each in folder.glob("*/metrics.jsonl")) or [folder]


def _folders(runs: Sequence[Path], reference: Path | None) -> tuple[list[Path], int | None]:
    """The folders, each once, and the place of the reference among them."""
    if not runs and reference is None:
        raise UserError("report: give the folder of a run, its output_dir: lptune report runs/my-run")
    folders = dict[str, Path]()
    for folder in [*runs, *([] if reference is None else [reference])]:
        if not folder.is_dir():
            found = kind_of(folder, follow=True)
            what = f"is {found}" if found else "no such folder"
            raise UserError(f"{folder}: {what}; give the folder of a run, its output_dir")
        folders.setdefault(os.path.realpath(folder), folder)
    if len(folders) > _MAX_RUNS:
        raise UserError(
            f"report: {len(folders)} runs are more than lines in one chart; give at most {_MAX_RUNS}"
        )
    place = None if reference is None else list(folders).index(os.path.realpath(reference))
    return list(folders.values()), place


def _write(folders: Sequence[Path], reference: int | None, path: Path) -> "list[Run]":
    from lptune.tools.report.page import write_page
    from lptune.tools.report.run import read_run

    runs = [read_run(folder) for folder in folders]
    write_page(path, runs, reference)
    for folder, run in zip(folders, runs, strict=True):
        for note in run.notes:
            click.echo(printable(f"note: {folder}: {note}"), err=True)
    return runs


def _write_charts(folder: Path, runs: "Sequence[Run]", reference: int | None) -> None:
    from lptune.tools.report import svg
    from lptune.tools.report.page import arrange

    shown = arrange(runs, reference)
    charts = [*shown.main, *shown.others]
    with write_errors(f"{folder}:", "choose another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        for chart in charts:
            text = svg.standalone(chart, shown.names, shown.looks)
            write_text(folder / f"{chart.slug}.svg", text, shared=True)
    click.echo(f"{len(charts)} charts as SVG: {folder.absolute()}")
