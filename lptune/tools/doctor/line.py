"""One finding on a machine."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from lptune.base.errors import UserError
from lptune.base.text import printable

OK, NOTE, PROBLEM = "ok", "note", "problem"


class Line(NamedTuple):
    """One finding of a probe, which becomes a line of the report."""

    section: str
    """The heading under which it is printed."""
    name: str
    status: str
    """ok, note (a run works, but slower, or there is something to know) or problem (a run would fail)."""
    text: str
    todo: str = ""
    """What to do about it."""


Probe = Callable[[], Iterable[Line]]


def examined(section: str, probes: Iterable[Probe]) -> Iterator[Line]:
    """The findings of all probes. What a probe raises is a finding, too: a UserError is a problem, with its
    message; anything else is a note, since it is the probe that failed.
    """
    for probe in probes:
        try:
            yield from probe()
        except UserError as error:
            yield Line(section, probe.__name__, PROBLEM, str(error))
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            what = printable(f"could not be looked at: {type(error).__name__}: {first:.200}")
            yield Line(section, probe.__name__, NOTE, what)
