"""The last lines of a run: what came of it, where it is, and the next commands; and report.html.

What came of it and report.html are made by a tool (lptune/tools/report/closing.py). Without it the lines are
the files and the commands.
"""

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path

from lptune.base import progress
from lptune.base.errors import DivergedError, UserError
from lptune.base.text import printable, shell_word
from lptune.cli import tools
from lptune.config import RunConfig


@contextmanager
def around(cfg: object) -> Iterator[None]:
    """After the block, which runs a recipe that trains: prints the summary on rank 0 and writes report.html.
    A run that diverged gets the report alone, one that a signal stopped neither.
    """
    started = datetime.now(UTC)
    try:
        yield
    except DivergedError:
        _close(cfg, started, has_summary=False)
        raise
    _close(cfg, started, has_summary=True)


def _close(cfg: object, started: datetime, *, has_summary: bool) -> None:
    """Writes report.html and prints the summary, on rank 0 of a run that made a step. Never raises: the run
    is done and its model exported, so nothing that fails here may make it a failed run.
    """
    if not isinstance(cfg, RunConfig) or os.environ.get("RANK", "0") != "0":
        return
    try:
        folder = Path(cfg.output_dir).expanduser()
        if not (folder / "metrics.jsonl").is_file():
            return
        facts = dict[str, str]()
        if (report := tools.module("report.closing")) is not None:
            facts = report.close(folder, cfg.precision.kind, started)
            if not facts:  # no step was made
                return
        text = "\n".join(lines(cfg, folder, facts)) if has_summary else ""
    except Exception as error:
        name = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        progress.print_line(f"note: no report of the run: {name}{error}")
        return
    if text:
        progress.print_line(text)


def lines(cfg: RunConfig, folder: Path, facts: Mapping[str, str]) -> list[str]:
    """The summary of the run in `folder`: `facts`, where its files are, and the next commands."""
    facts = {**facts, "files": _files(folder)}
    commands = _next(cfg, folder)
    return [
        *(f"{name:<9}  {printable(fact)}" for name, fact in facts.items() if fact),
        *(["next"] if commands else []),
        *(f"  {command}" for command in commands),
    ]


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
        *([f"lptune report {path} --open"] if "report" in tools.commands() else []),
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
        shell_word(f"{key}={str(value).lower() if isinstance(value, bool) else value}")
        for key, (value, usual) in keys.items()
        if value != usual
    ]
    output = shell_word(f"output={Path(cfg.output_dir, 'evaluation.json')}")
    command = [f"lptune run evaluate --config evaluation model.path={path}", output]
    for word in words:  # a line never ends within one, where it would become a part of the word
        if command[-1] and len(f"{command[-1]} {word}") > 70:
            command.append("")
        command[-1] = f"{command[-1]} {word}".lstrip()
    return " \\\n    ".join(command).split("\n")
