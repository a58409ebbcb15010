"""Run a recipe for each combination of values.

The runs go one after the other. Every config is checked before the first run starts. Each run is a process of
`lptune run`, so a run that fails takes nothing with it, and each begins with a fresh device. The process is a
child and gets the signals of the sweep: a sweep that is stopped lets the run in progress save, and the same
command goes on with it.
"""

import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from lptune.base.errors import UserError
from lptune.base.files import Lock
from lptune.cli import catalog, preflight, recipe
from lptune.cli.places import PathArgument, check_above
from lptune.config import RunConfig
from lptune.launch import bound, flags, launcher, preemption
from lptune.launch.outcome import ERROR_LINE

if TYPE_CHECKING:
    from lptune.tools.sweep.record import Outcome

_OWN_FLAGS = (
    "--config", "--nproc-per-node", "--nnodes", "--output-dir", "--dry-run", "--max-runs", "--help", "-h",
)  # fmt: skip
_STOPPED = preemption.STOPPED
_REPORT_RUNS = 50  # more curves than that cannot be told apart


class _Planned(NamedTuple):
    """A checked run."""

    name: str
    folder: Path
    arguments: tuple[str, ...]
    """Those of `lptune run` after torchrun's flags: RECIPE --config CONFIG key=value …"""
    config_digest: str
    row: str
    """As in Point."""
    why: str
    """Why it cannot start here; empty: it can."""


@click.command(
    context_settings={"ignore_unknown_options": True}, options_metavar="[OPTIONS] [torchrun flags]"
)
@click.option("--config", "config_name", metavar="CONFIG", help="Name or path of a config.  [required]")
@click.option("--nproc-per-node", "--nproc_per_node", metavar="N", help="Ranks of each run.")
@click.option("--nnodes", metavar="N", help="Machines of each run; with --dry-run only.")
@click.option(
    "--output-dir", type=PathArgument(), metavar="FOLDER", help="[default: sweeps/NAME of the config]"
)
@click.option(
    "--dry-run", is_flag=True, help="Check all runs but for devices and print their commands; run nothing."
)
@click.option("--max-runs", type=click.IntRange(min=1), default=100, show_default=True, metavar="N")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[RECIPE] key=value,value… …")
@click.pass_context
def sweep(
    context: click.Context,
    config_name: str | None,
    nproc_per_node: str | None,
    nnodes: str | None,
    output_dir: Path | None,
    dry_run: bool,
    max_runs: int,
    arguments: tuple[str, ...],
) -> int:
    """Run RECIPE once for each combination of the values that keys have, e.g.

    lptune sweep --config my.yaml optimizer.lr=1e-5,3e-5 precision.kind=none,int8_rowcol

    precision.kind=all stands for every kind. Runs that differ in their seed alone (seed=1,2,3) are one row,
    with the difference from the row of the first run, taken seed by seed, and its 95 % interval.

    All runs are checked before the first one starts. Each has its own folder, named by its values. The same
    command continues a sweep that was stopped. Brackets and quotes keep the commas within a value
    (docs/sweep.md).
    """
    if config_name is None:
        raise UserError("sweep: --config is required; `lptune ls` shows what there is")
    if not dry_run and nnodes not in (None, "1"):
        raise UserError(
            "sweep: --nnodes: starts runs on this machine only; add --dry-run, which prints the command of "
            "each run (docs/sweep.md)"
        )
    counts = {"--nproc-per-node": nproc_per_node, "--nnodes": nnodes}
    for name, value in counts.items():
        flags.check_count("sweep", name, value)
    if ":" in (nnodes or ""):
        raise UserError(f"sweep: --nnodes: a run keeps its number of machines, found {nnodes!r}; give one")
    ranks = flags.known_ranks(nnodes, nproc_per_node, here=not dry_run)
    torchrun_flags, positional = flags.split_command("sweep", arguments, _OWN_FLAGS)
    if torchrun_flags:
        ranks = None, None  # only torchrun knows them
    planned = _plan(config_name, positional, output_dir, max_runs, ranks, here=not dry_run)
    folder = planned[0].folder.parent
    click.echo(f"sweep: {len(planned)} runs of {planned[0].arguments[0]} with {config_name} in {folder}")
    torchrun_flags += [f"{name}={value}" for name, value in counts.items() if value is not None]
    if dry_run:
        for each in planned:
            line = shlex.join(["lptune", "run", *torchrun_flags, *each.arguments])
            click.echo(f"# {each.name} cannot run: {each.why}" if each.why else line)
        return 0
    return _run_all(context, folder, planned, torchrun_flags)


# ---- the command line


def _plan(
    config_name: str,
    positional: Sequence[str],
    output_dir: Path | None,
    max_runs: int,
    ranks: tuple[int | None, int | None],
    *,
    here: bool,
) -> list[_Planned]:
    """The runs, all of them checked. here: whether they will start on this machine. Raises UserError if one
    cannot start; of all kinds, only if none can.
    """
    from lptune.tools.sweep.grid import Grid

    recipe_path, config_path, overrides = recipe.split(config_name, positional)
    recipe_name = positional[0] if len(overrides) < len(positional) else recipe_path.stem
    name = config_name.replace("/", "-") if config_name in catalog.configs() else config_path.stem
    folder = output_dir or Path("sweeps", name)
    check_above(folder / "sweep.json")
    planned = []
    grid = Grid(overrides, max_runs)
    for point in grid.points:
        given = (*point.overrides, f"output_dir={folder / point.name}")
        try:
            config_digest, why = _check((recipe_path, config_path), given, ranks, here=here), ""
        except UserError as error:
            if not grid.has_all_kinds:
                raise
            config_digest, why = point.name, str(error)
        arguments = (recipe_name, "--config", config_name, *given)
        planned.append(_Planned(point.name, folder / point.name, arguments, config_digest, point.row, why))
    if all(each.why for each in planned):
        raise UserError(planned[0].why)
    _check_distinct(planned)
    return planned


def _check(
    files: tuple[Path, Path], overrides: Sequence[str], ranks: tuple[int | None, int | None], *, here: bool
) -> str:
    """Checks a run as `lptune run` does; returns a digest of its config."""
    from lptune.config import to_yaml
    from lptune.tools.sweep.record import digest

    recipe_path, config_path = files
    cfg = recipe.load(recipe_path, config_path, overrides)
    if not isinstance(cfg, RunConfig):
        raise UserError(f"sweep: {recipe_path.stem} trains nothing; a sweep is for recipes that train")
    if recipe_path in catalog.recipes().values():
        preflight.check(cfg, *ranks, here=here)
    return digest(to_yaml(cfg))


def _check_distinct(planned: Sequence[_Planned]) -> None:
    """Two values may be spelt differently and mean the same: 1e-5 and 0.00001."""
    first: dict[str, str] = {}
    for each in planned:
        if each.config_digest in first:
            raise UserError(f"sweep: {first[each.config_digest]} and {each.name} are the same; take one out")
        first[each.config_digest] = each.name


# ---- one run after the other


def _run_all(
    context: click.Context, folder: Path, planned: Sequence[_Planned], torchrun_flags: Sequence[str]
) -> int:
    from lptune.tools.sweep.record import RESULTS, Ended, Outcome, Record, is_of, table

    lock = _locked(folder)
    record = Record(folder, Path(planned[0].arguments[0]).stem)
    names = {each.name for each in planned}
    if others := record.drawn - names:
        click.echo(
            f"note: {folder}: this sweep replaces the table and report.html of another, which has "
            f"{len(others)} run(s) that are not in this one; another --output-dir keeps both, `lptune report "
            f"{shlex.quote(str(folder))}` shows all runs",
            err=True,
        )
    launcher.let_ranks_find_lptune()
    runner, error = bound.Runner(), folder / ".error"
    environment = {ERROR_LINE: str(error.absolute())}
    ended = {
        each.name: record.ended[each.name].exit_code
        for each in planned
        if record.has(each.name, each.config_digest)
    }
    codes = dict(ended)
    for number, each in enumerate(planned, 1):
        if runner.stopped.is_set() or _STOPPED in codes.values():
            break
        where = f"[{number}/{len(planned)}] {each.name}"
        if each.name in ended:
            click.echo(f"{where}: already finished")
            continue
        if each.why:
            click.echo(f"{where}: cannot run here: {each.why}")
            continue
        click.echo(f"{where}: {each.folder}")
        sys.stdout.flush()
        started_s = time.monotonic()
        code = codes[each.name] = runner.run(["run", *torchrun_flags, *each.arguments], environment)
        time_s = round(time.monotonic() - started_s, 1)
        line = error.read_text("utf-8") if error.is_file() else ""
        error.unlink(missing_ok=True)
        record.add(each.name, Ended(each.config_digest, code, time_s, line))
        if code not in (0, 3, _STOPPED):
            click.echo(f"{where}: failed with exit code {code}; the sweep goes on", err=True)
    runs = []
    for each in planned:
        found = codes.get(each.name)
        line = each.why if found is None else record.ended[each.name].line
        is_own = found in RESULTS or is_of(each.folder, each.config_digest)
        runs.append(Outcome(each.name, each.folder, found, each.row, line, is_own))
    click.echo(f"\n{table(runs)}")
    if lines := record.compare(runs):
        click.echo("\n" + "\n".join(lines))
    if drawn := _report(context, folder, runs):
        record.drew(drawn)
    lock.close()
    failed = [code for code in codes.values() if code not in (0, 3, _STOPPED)]
    if runner.stopped.is_set() or _STOPPED in codes.values():
        click.echo("sweep: stopped; the same command goes on with it", err=True)
        return _STOPPED
    if failed:
        click.echo(
            f"sweep: {len(failed)} of {len(planned)} runs failed; the same command tries them again", err=True
        )
    return failed[0] if failed else 0


def _locked(folder: Path) -> Lock:
    """Makes the folder and locks it against a second sweep."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return Lock(folder / ".sweep.lock")
    except BlockingIOError:
        raise UserError(f"{folder}: another sweep runs there; wait, or choose --output-dir") from None
    except OSError as error:
        raise UserError(f"{folder}: cannot be made or locked: {error.strerror}") from None


def _report(context: click.Context, folder: Path, runs: "Sequence[Outcome]") -> list[str]:
    """Writes the report of the runs that have metrics, by `lptune report`; returns their names."""
    group = context.find_root().command
    command = group.get_command(context, "report") if isinstance(group, click.Group) else None
    ready = [
        each
        for each in runs
        if each.exit_code is not None and each.is_own and (each.folder / "metrics.jsonl").is_file()
    ][:_REPORT_RUNS]
    if command is None or not ready:
        return []
    try:
        reference = next((each.folder for each in ready if each.row == runs[0].row), None)
        folders = tuple(each.folder for each in ready)
        context.invoke(command, runs=folders, reference=reference, output=folder / "report.html")
    except UserError as error:
        click.echo(f"note: no report: {error}", err=True)
        return []
    return [each.name for each in ready]
