"""A run's folder that somebody else prepared: each of its parts x what stands there, and x what is in it."""

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from lptune.config import RUN_FILES, RUN_FOLDERS
from tests.faults.adversary.judge import EITHER, OWN, REFUSED, Case
from tests.faults.adversary.place import Place
from tests.faults.adversary.things import THINGS, put

STEP = "checkpoints/step-00000002"
_SCRATCH = tuple(f".tmp-{name}" for name in RUN_FILES[1:])
_PARTS = (*RUN_FILES, *RUN_FOLDERS, *_SCRATCH, STEP, "checkpoints/.tmp-step-00000002", "old-config.yaml-1")
_STORED = (
    "checkpoints",
    "export",
    STEP,
    *(f"{STEP}/{name}" for name in ("manifest.json", "state.json", "model-00000.safetensors", "more")),
    *(f"export/{name}" for name in ("config.json", "model.safetensors", "SHA256SUMS", "README.md", "more")),
)
_COMMANDS: dict[str, Callable[[Place], list[str]]] = {
    "again": lambda place: place.job(),
    "go on": lambda place: place.job("num_steps=3"),
    "verify": lambda place: ["verify", "run"],
    "export": lambda place: ["export", "run", "exported"],
    "verify the checkpoint": lambda place: ["verify", f"run/{STEP}"],
    "export the checkpoint": lambda place: ["export", f"run/{STEP}", "exported"],
    "resume elsewhere": lambda place: place.job(f"resume=run/{STEP}", "output_dir=other", "num_steps=3"),
    "train its export": lambda place: place.job("model.path=run/export", "output_dir=other"),
}


def cases(rng: random.Random) -> Iterator[Case]:
    yield from _new_folders()
    yield from _finished_runs()
    yield from _contents()


def _new_folders() -> Iterator[Case]:
    for part, thing in itertools.product(_PARTS, THINGS):
        wanted = "file" if part in RUN_FILES else "folder" if part in RUN_FOLDERS else ""
        is_other = bool(wanted) and not thing.endswith(wanted) and thing not in _FILES.get(wanted, ())

        def prepare(place: Place, part: str = part, thing: str = thing) -> list[str]:
            put(thing, place.run / part, place)
            return place.job()

        yield Case(
            subject="new run folder",
            name=f"{part} is {thing}",
            prepare=prepare,
            codes=REFUSED if is_other else EITHER,
            # A run's own names for what it is writing.
            may_change=(
                "work/run/.tmp-*",
                "work/run/checkpoints/.tmp-*",
                *(["work/run/*"] * (thing == "empty file")),
            ),
        )


_TELLING = (
    "link to a file",
    "link to a folder",
    "link to nowhere",
    "hard link",
    "pipe",
    "device",
    "file",
    "folder",
)
"""Of THINGS."""
_FILES = {
    "file": ("file that nobody may read", "file that all may write", "file of another user", "hard link")
}


def _finished_runs() -> Iterator[Case]:
    pairs = [
        *itertools.product(dict.fromkeys((*_PARTS, *_STORED)), ("go on",)),
        *itertools.product(_STORED[:7], ("verify", "export", "verify the checkpoint", "resume elsewhere")),
        *itertools.product(_STORED[7:], ("verify", "train its export")),
    ]
    for (part, command), thing in itertools.product(pairs, _TELLING):

        def prepare(place: Place, part: str = part, command: str = command, thing: str = thing) -> list[str]:
            put(thing, place.a_finished_run() / part, place)
            return _COMMANDS[command](place)

        yield Case(
            subject="finished run",
            name=f"{command} where {part} is {thing}",
            prepare=prepare,
            may_change=OWN if command == "go on" else (),
        )


def _replaced(text: str | bytes) -> Callable[[bytes], bytes]:
    return lambda _: text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text


_CONTENTS: dict[str, Callable[[bytes], bytes]] = {
    "empty": _replaced(""),
    "half of it": lambda content: content[: len(content) // 2],
    "all but its last byte": lambda content: content[:-1],
    "no UTF-8": _replaced(b"\xff\xfe{}"),
    "UTF-16": lambda content: content.decode().encode("utf-16"),
    "carriage returns": lambda content: content.replace(b"\n", b"\r\n"),
    "a list": _replaced("[]\n"),
    "null": _replaced("null\n"),
    "an empty object": _replaced("{}\n"),
    "NaN": _replaced('{"step": NaN, "loss": NaN}\n'),
    "a step of text": _replaced('{"step": "2", "eval_loss": 1}\n'),
    "a step beyond int64": _replaced('{"step": 99999999999999999999999}\n'),
    "5000 digits": _replaced('{"step": ' + "9" * 5000 + "}\n"),
    "deep": _replaced("[" * 100_000),
    "a surrogate": _replaced('{"step": 2, "a": "\\ud800"}\n'),
    "escapes": _replaced('{"step": "\\u001b[2J", "dtype": "\\u001b]0;x\\u0007", "format": "\\u009b2J"}\n'),
    "raw escapes": _replaced("\x1b[2J\x9b2J\x07\n"),
    "128 MiB": _replaced(b"\0" * (1 << 27)),
}


def _contents() -> Iterator[Case]:
    runs_own = ("metrics.jsonl", "export.json", "config.yaml", "precision_plan.json")
    of_checkpoint = tuple(f"{STEP}/{name}" for name in ("state.json", "manifest.json"))
    of_export = tuple(f"export/{name}" for name in ("config.json", "tokenizer.json", "SHA256SUMS"))
    pairs = [
        *itertools.product(runs_own, ("again", "go on")),
        *itertools.product(of_checkpoint, ("go on", "verify", "export the checkpoint", "resume elsewhere")),
        *itertools.product(of_export, ("verify", "train its export", "go on")),
    ]
    for (name, command), content in itertools.product(pairs, _CONTENTS):

        def prepare(
            place: Place, name: str = name, command: str = command, content: str = content
        ) -> list[str]:
            _edit(place.a_finished_run() / name, _CONTENTS[content])
            return _COMMANDS[command](place)

        yield Case(
            subject="contents",
            name=f"{command} where {name} is {content}",
            prepare=prepare,
            may_change=OWN if command in ("again", "go on") else (),
        )


def _edit(path: Path, edit: Callable[[bytes], bytes]) -> None:
    path.write_bytes(edit(path.read_bytes()))
