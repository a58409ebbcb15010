"""Paths: what a run reads x where in its own folder that lies x how it is spelt; destinations; names."""

import itertools
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.faults.adversary.judge import DONE, EITHER, OWN, REFUSED, Case
from tests.faults.adversary.place import Place
from tests.faults.adversary.things import THINGS, put


def cases(rng: random.Random) -> Iterator[Case]:
    yield from _inputs()
    yield from _resumed()
    yield from _destinations()
    yield from _names()


# ---- what a run reads lies where it writes

_INPUTS = (
    ("model.path", "run/export"),
    ("model.path", "run/export/part"),
    ("model.path", "run/checkpoints"),
    ("model.path", "run/logs/model"),
    ("model.path", "run/.tmp-export-0123456789ab"),
    ("data.source", "run/metrics.jsonl"),
    ("data.source", "run/export/rows.jsonl"),
    ("data.source", "run/checkpoints/rows.jsonl"),
    ("data.source", "run/logs"),
    ("data.source", "run"),
    ("data.source", "run/.tmp-metrics.jsonl"),
    ("data.eval_source", "run/metrics.jsonl"),
    ("data.eval_source", "run/export/rows.jsonl"),
    ("data.eval_source", "run/.tmp-export.json"),
    ("data.cache", "run"),
    ("data.cache", "run/checkpoints"),
    ("data.cache", "run/export/cache"),
    ("data.chat_template", "run/export/mine.jinja"),
)


def _linked(place: Place, name: str) -> str:
    (place.folder / "alias").symlink_to(place.folder / name)
    return "alias"


def _linked_above(place: Place, name: str) -> str:
    (place.folder / "above").symlink_to((place.folder / name).parent)
    return f"above/{Path(name).name}"


def _linked_run(place: Place, name: str) -> str:
    place.run.rename(place.folder / "real")
    place.run.symlink_to("real")
    return name.replace("run", "real", 1)


def _linked_twice(place: Place, name: str) -> str:
    (place.folder / "first").symlink_to(place.folder)
    (place.folder / "second").symlink_to("first/first")
    return f"second/{name}"


def _at_home(place: Place, name: str) -> str:
    (place.root / "home" / "here").symlink_to(place.folder)
    return f"~/here/{name}"


_SPELLINGS: dict[str, Callable[[Place, str], str]] = {
    "as it is": lambda place, name: name,
    "absolute": lambda place, name: str(place.folder / name),
    "with dots": lambda place, name: f"./victim/../run/../{name}",
    "with double slashes": lambda place, name: f".//{name.replace('/', '//')}",
    "through /proc": lambda place, name: f"/proc/self/cwd/{name}",
    "from the root": lambda place, name: f"/../../{place.folder}/{name}",
    "through a link": _linked,
    "through a link to its folder": _linked_above,
    "through a chain of links": _linked_twice,
    "where the run's folder is a link": _linked_run,
    "from the home folder": _at_home,
}


def _lay(place: Place, key: str, name: str) -> None:
    """Moves the input there."""
    path = place.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if key == "model.path":
        place.model.rename(path)
    elif key == "data.cache":
        path.mkdir()
    elif key == "data.chat_template":
        path.write_text("{{ messages }}")
    else:
        if not path.suffix:
            path.mkdir(exist_ok=True)
            path /= "metrics.jsonl"
        shutil.copyfile(place.rows, path)


def _inputs() -> Iterator[Case]:
    for (key, name), spelling in itertools.product(_INPUTS, _SPELLINGS):

        def prepare(place: Place, key: str = key, name: str = name, spelling: str = spelling) -> list[str]:
            _lay(place, key, name)
            return place.job(f"{key}={_SPELLINGS[spelling](place, name)}")

        yield Case(
            subject="inputs in the output",
            name=f"{key} is {name}, {spelling}",
            prepare=prepare,
            codes=REFUSED,
        )
    for pattern in (
        "run/*",
        "run/*.jsonl",
        "r?n/metrics.jsonl",
        "**/metrics.jsonl",
        "[r]un/[m]*",
        "*/*.jsonl",
    ):
        for key in ("data.source", "data.eval_source"):

            def prepare(place: Place, key: str = key, pattern: str = pattern) -> list[str]:
                _lay(place, key, "run/metrics.jsonl")
                (place.victim / "file.jsonl").unlink()
                return place.job(f"{key}={pattern}")

            yield Case(
                subject="inputs in the output",
                name=f"{key} matches {pattern}",
                prepare=prepare,
                codes=REFUSED,
            )


def _resumed() -> Iterator[Case]:
    step = "run/checkpoints/step-00000002"
    for spelling, to in itertools.product(_SPELLINGS, ("its own", "another")):

        def prepare(place: Place, spelling: str = spelling, to: str = to) -> list[str]:
            place.a_finished_run()
            path = _SPELLINGS[spelling](place, step)
            return place.job(
                f"resume={path}", "num_steps=3", *(["output_dir=other"] if to == "another" else [])
            )

        yield Case(
            subject="resume",
            name=f"into {to} folder from {step}, {spelling}",
            prepare=prepare,
            # A checkpoint is known by its name, step-NNNNNNNN, of which a link has another.
            codes=DONE,
            may_change=(*OWN, "work/real/*") if to == "its own" else (),
        )


# ---- destinations

_COMMANDS: dict[str, Callable[[Place], list[str]]] = {
    "new-checkpoint": lambda place: ["new-checkpoint", "llama3_2/tiny"],
    "export": lambda place: ["export", "run"],
    "cp": lambda place: ["cp", "quickstart"],
    "run": lambda place: [],
}
_DESTINATIONS = (
    "model", "run", "run/export", "run/checkpoints", "run/checkpoints/step-00000002", "run/new", "rows.jsonl",
    "rows.jsonl/below", "job.yaml", "victim", "victim/folder", "victim/../model", "victim/file", ".",
    "..", "/", "",
    "new/", "new/.", "new/../new2", "a/b/c/new", "./new", "~/new", "new\nerror: forged", "new\x1b[2J",
    "new\udcff",
    "new\u202e", " ", "-", "new new", ".tmp-new", "new*", "/dev/null", "/dev/full", "/dev/null/new",
    "/proc/self/new",
    "x" * 255, "x" * 256, "ä" * 127, "ä" * 128, "x/" * 2500,
)  # fmt: skip


def _destinations() -> Iterator[Case]:
    for command, dest in itertools.product(_COMMANDS, _DESTINATIONS):
        if dest == "/" and command in ("run", "cp"):
            continue  # they may write there

        def prepare(place: Place, command: str = command, dest: str = dest) -> list[str]:
            place.a_finished_run()
            if command == "run":
                return place.job(f"output_dir={dest}", "num_steps=3")
            return [*_COMMANDS[command](place), "--", dest]

        yield Case(
            subject="destinations",
            name=f"{command} to {dest[:40]!r} of {len(dest)}",
            prepare=prepare,
            codes=EITHER,
            writes_nothing=not dest.startswith("a/b") and len(dest) < 5000,
            may_change=OWN if command == "run" else (),
        )
    for command, thing in itertools.product(("new-checkpoint", "export", "cp", "run"), THINGS):

        def prepare(place: Place, command: str = command, thing: str = thing) -> list[str]:
            place.a_finished_run()
            put(thing, place.folder / "dest", place)
            return place.job("output_dir=dest") if command == "run" else [*_COMMANDS[command](place), "dest"]

        yield Case(subject="destinations", name=f"{command} to {thing}", prepare=prepare)


# ---- names that are none

_NAMED: dict[str, Callable[[str], list[str]]] = {
    "recipe": lambda name: ["run", name, "--config", "job.yaml"],
    "config": lambda name: ["run", "full_finetune", f"--config={name}"],
    "validate": lambda name: ["validate", "--", name],
    "cat": lambda name: ["cat", "--", name],
    "cp": lambda name: ["cp", "--", name, "copy"],
    "verify": lambda name: ["verify", "--", name],
    "export": lambda name: ["export", "--", name, "exported"],
    "export --base": lambda name: ["export", "run", "exported", f"--base={name}"],
    "new-checkpoint": lambda name: ["new-checkpoint", "--", name, "new"],
    "plan": lambda name: ["plan", "full_finetune", "--config", "job.yaml", f"--preset={name}"],
    "plan --device": lambda name: ["plan", "full_finetune", "--config", "job.yaml", f"--device={name}"],
    "a command": lambda name: ["--", name],
    **{
        key: lambda name, key=key: ["run", "full_finetune", "--config", "job.yaml", f"{key}={name}"]
        for key in (
            "model.path",
            "data.source",
            "data.eval_source",
            "data.cache",
            "data.chat_template",
            "resume",
        )
    },
}
_NAMES = (
    "", ".", "..", "/", "-", "--", "~", "~nobody-of-this-name/x", "x" * 256, "x" * 300, "x/" * 2500,
    "ä" * 200, "a\nb",
    "a\x1b]0;x\x07b", "a\udcffb", "a\u202eb", "victim", "victim/file", "pipe", "itself", "/dev/null",
    "/dev/full",
    "/proc/self/mem", "/proc/self/fd/0", "/usr/../etc/passwd", "${oc.env:TOP_SECRET}", "*", "[",
    "a{b}c", "%s%n",
)  # fmt: skip


def _names() -> Iterator[Case]:
    for what, name in itertools.product(_NAMED, _NAMES):
        if what == "data.cache" and name == "/":
            continue  # it may be written to

        def prepare(place: Place, what: str = what, name: str = name) -> list[str]:
            os.mkfifo(place.folder / "pipe")
            (place.folder / "itself").symlink_to("itself")
            place.a_finished_run()
            return _NAMED[what](name)

        yield Case(
            subject="names",
            name=f"{what} {name[:40]!r} of {len(name)}",
            prepare=prepare,
            codes=EITHER,
            may_change=OWN,
            # Files that the command itself names are read, and what is said of a place names it.
            may_hold=("work/copy",),
            may_tell="victim" in name or "TOP_SECRET" in name,
        )
