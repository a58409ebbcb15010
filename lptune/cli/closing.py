"""The last lines of a run: what came of it, where it is, and the next commands; and report.html.

They are made from the files of the run alone, so a run that was continued is summed up as a whole, and a
copied recipe has them, too.
"""

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from lptune.base import progress
from lptune.base.errors import DivergedError, UserError
from lptune.base.text import duration_text, printable, wrapped
from lptune.config import RunConfig

if TYPE_CHECKING:
    from lptune.report import Run, Summary


@contextmanager
def around(cfg: object) -> Iterator[None]:
    """After the block, which runs a recipe that trains: prints the summary on rank 0 and writes report.html.
    A run that diverged gets the report alone, one that a signal stopped neither.
    """
    try:
        yield
    except DivergedError:
        _close(cfg, has_summary=False)
        raise
    _close(cfg, has_summary=True)


def _close(cfg: object, *, has_summary: bool) -> None:
    """Writes report.html and prints the summary, on rank 0 of a run that made a step. Never raises: the run
    is done and its model exported, so nothing that fails here may make it a failed run.
    """
    if not isinstance(cfg, RunConfig) or os.environ.get("RANK", "0") != "0":
        return
    try:
        folder = Path(cfg.output_dir).expanduser()
        if not (folder / "metrics.jsonl").is_file():
            return
        from lptune import report  # not above: it imports NumPy

        run = report.read_run(folder, is_over=True)
        if not len(run.rows["loss"].steps_N):
            return
        report.write_page(folder / "report.html", [run])
        text = "\n".join(lines(cfg, run, report.summary(run))) if has_summary else ""
    except Exception as error:
        name = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        progress.print_line(f"note: no report of the run: {name}{error}")
        return
    if text:
        progress.print_line(text)


def lines(cfg: RunConfig, run: "Run", found: "Summary") -> list[str]:
    """The summary of `run`, and the next commands."""
    facts = {
        "done": _done(found),
        "held-out": _held_out(run, found),
        "precision": _share(cfg, found),
        "shadow": _shadow(run),
        "memory": f"{found.peak_memory_gib:.2f} GiB at most on rank 0" if found.peak_memory_gib else "",
        "files": _files(run.folder),
    }
    commands = _next(cfg, run.folder)
    return [
        *(f"{name:<9}  {printable(fact)}" for name, fact in facts.items() if fact),
        *(["next"] if commands else []),
        *(f"  {command}" for command in commands),
    ]


def _done(found: "Summary") -> str:
    compile_s = found.compile_time_s or 0.0
    text = f"{found.last_step:,} step{'s' * (found.last_step > 1)}"
    if found.train_time_s is not None:
        text += f" in {duration_text(found.train_time_s + compile_s)}"
    if compile_s >= progress.WORTH_A_LINE_S:
        text += f" ({duration_text(compile_s)} of it compiling)"
    return text + (f", {found.tokens_per_s:,.0f} tokens/s" if found.tokens_per_s else "")


def _held_out(run: "Run", found: "Summary") -> str:
    """The held-out loss before and after, and the lowest where it was once lower."""
    steps_N, losses_N = run.rows["eval_loss"].finite
    if found.eval_loss is None:
        return ""
    before = f"loss {losses_N[0]:.4f} before training, " if steps_N[0] == 0 and len(steps_N) > 1 else "loss "
    text = f"{before}{found.eval_loss:.4f} after step {steps_N[-1]}"
    best = int(losses_N.argmin())
    if losses_N[best] < found.eval_loss:
        text += f"; {losses_N[best]:.4f} at step {steps_N[best]}"
    return text


def _share(cfg: RunConfig, found: "Summary") -> str:
    if cfg.precision.is_none or found.low_fraction is None:
        return ""
    return f"{cfg.precision.kind} ran {found.low_fraction:.0%} of the FLOPs of the linear layers in 8 bits"


def _shadow(run: "Run") -> str:
    """What the shadow checks found."""
    checks = run.shadow.checks
    if not checks:
        return ""
    text = f"{len(checks)} check{'s' * (len(checks) > 1)}"
    _, found = run.rows["shadow_worst_sqnr_db"].finite
    if len(found):
        text += f", lowest SQNR {found.min():.1f} dB"
    if switched := [name for _, name in run.shadow.switched]:
        text += f"; fell back to high precision: {', '.join(switched)}"
    return text


def _files(folder: Path) -> str:
    names = ("export", "report.html", "metrics.jsonl")
    here = [name + "/" * (folder / name).is_dir() for name in names if (folder / name).exists()]
    return f"{folder}: {', '.join(here)}"


def _next(cfg: RunConfig, folder: Path) -> list[str]:
    """Commands for the model that came out."""
    if not (folder / "export").is_dir():
        return []
    path = shlex.quote(str(folder))
    return [
        f"lptune run generate --config generation model.path={path}",
        *_evaluate(cfg, path),
        f"lptune report {path} --open",
    ]


def _evaluate(cfg: RunConfig, path: str) -> list[str]:
    """The command that evaluates the model on the held-out rows of the run, in two lines or more; empty if no
    rows of one source were held out.
    """
    data = cfg.data
    if not isinstance(data.source, str) or not data.eval_fraction:
        return []
    keys = {f"data.{each.name}": (getattr(data, each.name), each.default) for each in fields(data)}
    keys["seed"] = cfg.seed, type(cfg).seed
    words = [
        shlex.quote(f"{key}={str(value).lower() if isinstance(value, bool) else value}")
        for key, (value, usual) in keys.items()
        if value != usual
    ]
    rest = wrapped(" ".join(words), 70)
    first = f"lptune run evaluate --config evaluation model.path={path}"
    return " \\\n    ".join([first, *rest]).split("\n")
