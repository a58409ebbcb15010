"""The report of a run: one HTML file with its curves, samples, precision and config.

    write(folder)        writes OUTPUT_DIR/report.html, as a run does at its end

It reads the files of the run's folder and nothing else, imports no torch, and takes no part in training: a
report can be made of a run that goes on, that was killed, or that was made by an older version.

    rows.py, run.py                                   reading; what cannot be read becomes a note
    seeds.py                                          runs that differ in their seed alone, as one row
    charts.py, svg.py                                 what a chart shows, and its drawing
    markup.py, summary.py, page.py, page.css, page.js     the page
    closing.py                                        the end of a run: its report and its summary
"""

from pathlib import Path


def write(folder: Path) -> Path:
    """Writes `report.html` into the folder of a run that has ended, and returns its path. No other file
    changes. Raises UserError if the folder is not a run's or the file cannot be written.
    """
    from lptune.tools.report.page import write_page  # imports NumPy
    from lptune.tools.report.run import read_run

    path = folder / "report.html"
    write_page(path, [read_run(folder, is_over=True)])
    return path
