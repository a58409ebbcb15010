"""The report of a run: one HTML file with its curves, samples, precision and config; and `diff` of two runs.

    write(folder)        writes OUTPUT_DIR/report.html, as a run does at its end

It reads the files of the run's folder and nothing else, imports no torch, and takes no part in training: a
report can be made of a run that goes on, that was killed, or that was made by an older version.

    files.py, rows.py, run.py, plan.py, shadow.py     reading; what cannot be read becomes a note
    thin.py, axes.py, charts.py                       what a chart shows
    svg.py, png.py                                    drawing
    markup.py, summary.py, head.py, sections.py, page.py, page.css, page.js     the page
    diff.py                                           what differs between two runs
"""

from collections.abc import Sequence
from pathlib import Path

from lptune.base.files import write_errors, write_text
from lptune.report.page import page
from lptune.report.run import Run, is_running, read_run
from lptune.report.summary import Summary, summary

__all__ = ["Run", "Summary", "is_running", "page", "read_run", "summary", "write", "write_page"]


def write(folder: Path) -> Path:
    """Writes `report.html` into the folder of a run that has ended, and returns its path. No other file
    changes. Raises UserError if the folder is not a run's or the file cannot be written.
    """
    return write_page(folder / "report.html", [read_run(folder, is_over=True)])


def write_page(path: Path, runs: Sequence[Run], reference: int | None = None, refresh_s: int = 0) -> Path:
    """Writes the report of `runs` to `path` in one piece, by `page`. Raises UserError if it cannot be
    written.
    """
    with write_errors(f"{path}:", "choose another with --output"):
        write_text(path, page(runs, reference, refresh_s), shared=True)
    return path
