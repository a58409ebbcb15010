"""Look at this machine: what runs on it, and what is wrong.

Its answer is text, so it exits with 0 whatever it finds; `--strict` makes it 2 if there is a problem, for
scripts. (1 always means a bug of lptune.)
"""

import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

import click

from lptune import __version__
from lptune.base.text import columns, text_width, wrapped


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for a bug report.")
@click.option("--strict", is_flag=True, help="Exit with 2 if there is a problem.")
@click.pass_context
def doctor(context: click.Context, as_json: bool, strict: bool) -> None:
    """Look at this machine: GPUs, kinds of precision, compiler, memory, disks, versions.

    Each line is ok, a note (it works, but there is something to know) or a problem, with what to do. Changes
    nothing but a cache of compiled code; prints no secrets.
    """
    from lptune.tools.doctor import child
    from lptune.tools.doctor.line import PROBLEM, Line

    found: list[Line] = []
    begin, section = time.monotonic(), ""
    if not as_json:
        click.echo(f"lptune {__version__} doctor; the lines of torch's probes come together, in some 15 s")
    for line in _lines(child.lines()):
        found.append(line)
        if as_json:
            continue
        if line.section != section:
            section = line.section
            click.echo(f"\n{section}")
        for text in line_text(line, text_width()):
            click.echo(text)
    num_problems = sum(line.status == PROBLEM for line in found)
    if as_json:
        click.echo(json.dumps(_document(found, time.monotonic() - begin), indent=1))
    else:
        click.echo("\n".join(_end(found, time.monotonic() - begin, text_width())))
    if strict and num_problems:
        context.exit(2)


def _lines(of_child: Iterable[Any]) -> Iterator[Any]:
    """The findings of this process, then those of the child."""
    from lptune.tools.doctor import host
    from lptune.tools.doctor.line import examined

    yield from examined("processor", [host.cpu])
    yield from examined("memory and disk", [host.memory, host.limits, host.disks])
    yield from examined("software", [host.versions, host.compiler, host.caches])
    yield from examined("environment", [host.environment])
    yield from of_child


def line_text(line: Any, width: int) -> Iterator[str]:
    """A finding in lines of at most `width` columns."""
    status = line.status if line.status != "problem" else "PROBLEM"
    start = 29
    yield from columns(f"  {status:<9}{line.name}", line.text, start, width, break_words=True)
    if line.todo:
        yield from wrapped(f"-> {line.todo}", width, start, break_words=True)


def _end(found: list[Any], duration_s: float, width: int) -> Iterator[str]:
    """Counts, and the command that tells which kind pays."""
    counts = {status: sum(line.status == status for line in found) for status in ("problem", "note")}
    texts = [f"{number} {status}{'s' * (number != 1)}" for status, number in counts.items()]
    yield f"\n{' and '.join(texts)} in {duration_s:.0f} s"
    yield from wrapped("`lptune advise --config CONFIG` tells which kind pays for a model.", width)


def _document(found: list[Any], duration_s: float) -> dict[str, Any]:
    return {
        "lptune": __version__,
        "duration_s": round(duration_s, 1),
        "num_problems": sum(line.status == "problem" for line in found),
        "lines": [line._asdict() for line in found],
    }
