"""sweep.json in the folder of a sweep: its recipe, and which runs have ended, so that they are not started
again. And two tables: of its runs, the lowest final held-out loss first, and of its rows, in which runs that
differ in their seed alone are one (lptune/tools/report/seeds.py).

A run does not know its recipe, so one of another recipe with the same config would seem to be finished. So a
folder holds the sweeps of one recipe, by the name of its file.

A run counts as ended only as long as its config is the same: the record has a digest of it. Whether a run
that was interrupted can go on is decided by `lptune run`, as for any run.

Several sweeps of one recipe may share a folder, and with it runs. The table is that of the last sweep that
had one or had results: what an earlier sweep left is replaced or removed, but stays until then.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lptune.base import text
from lptune.base.errors import UserError
from lptune.base.files import MAX_BYTES, kind_of, read_bytes, read_object, write_errors, write_text
from lptune.launch.preemption import STOPPED

if TYPE_CHECKING:
    from lptune.tools.report.run import Run
    from lptune.tools.report.seeds import Row

FILE = "sweep.json"
RESULTS = (0, 3)
"""Exit codes of a run that is a result: done, and diverged. Any other is started again."""


@dataclass(frozen=True)
class Ended:
    """How a run of the sweep ended."""

    config_digest: str
    exit_code: int
    time_s: float
    line: str = ""
    """Of the error that ended it."""


class Outcome(NamedTuple):
    """What became of a run of the sweep."""

    name: str
    folder: Path
    exit_code: int | None
    """None: it did not run."""
    row: str = ""
    """As in Point."""
    line: str = ""
    """Of the error that ended it, or why it cannot start."""
    is_own: bool = True
    """False: what is in its folder is a run of another config."""

    @property
    def word(self) -> str:
        """What became of it, in a word."""
        words = {0: "done", 3: "diverged", STOPPED: "stopped", None: "not run"}
        return words.get(self.exit_code) or f"failed ({self.exit_code})"

    def read(self) -> "Run | None":
        """The run in its folder; None if it cannot be read, and so has no numbers."""
        from lptune.tools.report.run import read_run

        with suppress(UserError):
            return read_run(self.folder)
        return None


class Record:
    """The record of the sweep in `folder`, of `recipe`. Raises UserError for a sweep.json that is not one, or
    is of another recipe.
    """

    def __init__(self, folder: Path, recipe: str) -> None:
        self.path, self._recipe = folder / FILE, recipe
        self.ended: dict[str, Ended] = {}
        self._rows: list[object] = []
        self.drawn = set[str]()
        """The names of the runs in report.html, and in the table that is there."""
        if not kind_of(self.path):
            return
        content = read_object(self.path, todo="move it away")
        try:
            self.ended = {name: Ended(**each) for name, each in content["runs"].items()}
            self._rows = [*content.get("rows", ())]
            self.drawn = {*map(str, content.get("drawn", ()))}
        except (TypeError, KeyError, AttributeError) as error:
            raise UserError(f"{self.path}: is not the record of a sweep ({error}); move it away") from None
        if (held := content.get("recipe", recipe)) != recipe:
            raise UserError(
                f"{folder}: holds a sweep of {held!r:.60}, not of {recipe!r:.60}; choose another --output-dir"
            )

    def has(self, name: str, config_digest: str) -> bool:
        """Whether this run has ended with a result, with this config, and its folder is still there."""
        ended = self.ended.get(name)
        return (
            ended is not None
            and ended.exit_code in RESULTS
            and ended.config_digest == config_digest
            and (self.path.parent / name / "metrics.jsonl").is_file()
        )

    def add(self, name: str, ended: Ended) -> None:
        """Adds an end and writes the file."""
        self.ended[name] = ended
        self._write()

    def drew(self, names: Sequence[str]) -> None:
        """Notes the runs in the report.html that was written."""
        self.drawn = {*names}
        self._write()

    def _write(self) -> None:
        runs = {each: asdict(how) for each, how in self.ended.items()}
        content = {"recipe": self._recipe, "runs": runs, "rows": self._rows, "drawn": sorted(self.drawn)}
        with write_errors(f"{self.path}:", "the same command goes on with the sweep"):
            write_text(self.path, json.dumps(content, indent=1) + "\n")

    def compare(self, runs: Sequence[Outcome]) -> list[str]:
        """The table of rows, in Markdown, which goes to table.md, too, its numbers to sweep.json, and the
        picture of its differences to differences.svg, if there are any. Empty if each row is one run; the
        table of an earlier sweep is then removed, unless this one was stopped or has no result.

        runs: the first one's row is the baseline.
        """
        from lptune.tools.report import seeds, svg

        ended = [(run.row, read) for run in runs if run.exit_code == 0 and (read := run.read())]
        base = next((read for row, read in ended if row == runs[0].row), None)
        rows = seeds.compared([read for _, read in ended], base)
        lines = list[str]()
        if any(row.n > 1 for row in rows) or any(run.exit_code is None and run.line for run in runs):
            rows = _with_notes(rows, runs)
            heads, *cells = ([each.replace("|", "/") for each in line] for line in seeds.cells(rows))
            lines = text.table(
                [[*(f"| {cell}" for cell in line), "|"] for line in (heads, ["---"] * len(heads), *cells)]
            )
        elif not rows or any(run.exit_code in (None, STOPPED) for run in runs):
            return []
        numbers = [{name: each._asdict() for name, each in row.measured.items()} for row in rows]
        with_numbers = zip(rows, numbers, strict=True)
        self._rows = [row._asdict() | {"measured": of} for row, of in with_numbers] if lines else []
        self._write()
        has_differences = lines and any("difference" in row.measured for row in rows)
        content = {
            "table.md": "".join(f"{line}\n" for line in lines),
            "differences.svg": svg.differences(rows) + "\n" if has_differences else "",
        }
        with write_errors(f"{self.path.parent}:", "the same command goes on with the sweep"):
            for name, each in content.items():
                if each:
                    write_text(self.path.with_name(name), each, shared=True)
                else:
                    self.path.with_name(name).unlink(missing_ok=True)
        return lines


def _with_notes(rows: Sequence["Row"], runs: Sequence[Outcome]) -> list["Row"]:
    """The rows with notes on their runs that did not end well, and a row for those of which none did."""
    from lptune.tools.report import seeds

    found = list(rows)
    for row in dict.fromkeys(run.row for run in runs):
        mates = tuple(run.name for run in runs if run.row == row)
        notes = dict[str, list[str]]()
        for run in runs:
            if run.row == row and run.exit_code != 0:
                notes.setdefault(f"{run.word}{f': {run.line}' if run.line else ''}", []).append(run.name)
        if not notes:
            continue
        note = "; ".join(f"{', '.join(names)}: {why}" for why, names in notes.items())
        for place, each in enumerate(found):
            if set(mates) & set(each.runs):
                found[place] = each._replace(note=note, runs=mates)
                break
        else:
            note = note if len(notes) > 1 else next(iter(notes))
            found.append(seeds.Row(row or "all", 0, {}, note=note, runs=mates))
    return found


def digest(config: str) -> str:
    """A digest of a config's YAML, but for output_dir."""
    lines = (line for line in config.splitlines() if not line.startswith("output_dir:"))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def is_of(folder: Path, config_digest: str) -> bool:
    """Whether the run in `folder` has this config, by its config.yaml. Also true without such a file."""
    path = folder / "config.yaml"
    with suppress(UserError, UnicodeDecodeError):
        return (
            not kind_of(path) or digest(read_bytes(path, MAX_BYTES, follow=False).decode()) == config_digest
        )
    return False


def table(runs: Sequence[Outcome]) -> str:
    """One line for each run, sorted: by held-out loss, or by loss if no run was evaluated. Runs that did not
    end well come last. Each number is the last in metrics.jsonl, of the speeds the median; of a run of
    another config there is none.
    """
    from lptune.tools.report.summary import summary

    found = []
    for run in runs:
        read = run.read() if run.is_own else None
        held_out, loss = (read.final(key) if read else None for key in ("eval_loss", "loss"))
        speed = summary(read).tokens_per_s if read else None
        cells = (
            "-" if held_out is None else f"{held_out:.4f}",
            "-" if loss is None else f"{loss:.4f}",
            f"{read.rows.last_step}" if read and read.rows.num_rows else "-",
            "-" if speed is None else f"{speed:,.0f}",
            run.word,
            run.name,
        )
        found.append((run.exit_code != 0, held_out, loss, cells))
    key = 1 if any(held_out is not None for _, held_out, _, _ in found) else 2
    found.sort(key=lambda each: (each[0], each[key] is None, each[key] or 0.0))
    head = ("held-out loss", "loss", "step", "tokens/s", "result", "run")
    return "\n".join(text.table([head, *(cells for *_, cells in found)], ">>>><"))
