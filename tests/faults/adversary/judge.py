"""What a case is, and what is wrong with how it ended: the same questions for every case."""

import fnmatch
import hashlib
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.faults.adversary.child import Streams
from tests.faults.adversary.place import SECRET, Finished, Meanwhile, Place

DONE, REFUSED, EITHER = frozenset({0}), frozenset({2}), frozenset({0, 2})

OWN = ("work/run", "work/run/*")
"""For `may_change`: what a run that goes on in its own folder writes anew."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attack."""

    subject: str
    name: str
    prepare: Callable[[Place], list[str]]
    """Lays the attack and returns the arguments of `lptune`."""
    codes: frozenset[int] = EITHER
    writes_nothing: bool = True
    """Whether exit code 2 means that there is no new file."""
    may_change: tuple[str, ...] = ()
    """Patterns of paths below the case's folder that the command may write over."""
    may_hold: tuple[str, ...] = ()
    """Patterns of written files in which the secret may stand, since it decided a place."""
    may_tell: bool = False
    """Whether an error line may name it, for the same reason."""
    environment: Mapping[str, str] = field(default_factory=dict)
    streams: Streams | None = None
    meanwhile: Meanwhile | None = None
    is_cold: bool = False
    then: Callable[[Place, Finished], str] | None = None
    """What else must hold: a complaint, or nothing."""

    @property
    def title(self) -> str:
        """Unique."""
        return f"{self.subject}: {self.name}"


class Entry(NamedTuple):
    """A file, folder or anything else: all that must stay as it is."""

    kind: int
    identity: tuple[int, int]
    mode: int
    content: str
    """sha256 of a file, target of a link."""


def snapshot(root: Path) -> dict[str, Entry]:
    """Every path below `root`, relative; what the commands printed is no part of it."""
    found = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            if path.startswith(f"{root}/said"):
                continue
            info = os.lstat(path)
            kind = stat.S_IFMT(info.st_mode)
            content = ""
            if kind == stat.S_IFLNK:
                content = os.readlink(path)
            elif kind == stat.S_IFREG:
                with open(path, "rb") as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
            mode = stat.S_IMODE(info.st_mode)
            found[os.path.relpath(path, root)] = Entry(kind, (info.st_dev, info.st_ino), mode, content)
    return found


def run(case: Case, place: Place) -> tuple[Finished, list[str]]:
    """Attacks, and says what is wrong; nothing where the product held."""
    arguments = case.prepare(place)
    before = snapshot(place.root)
    done = place.lptune(arguments, case.environment, case.streams, case.meanwhile, is_cold=case.is_cold)
    after = snapshot(place.root)
    wrong = [*_about_its_end(case, done), *_about_its_words(case, done)]
    wrong += [f"lost or changed: {name}" for name in _lost(case, before, after)]
    new = {name for name in after if name not in before or before[name].content != after[name].content}
    if done.code == 2 and case.writes_nothing:
        made = [name for name in sorted(new - before.keys()) if not name.endswith("/.lock")]
        wrong += [f"exit code 2, and there is {', '.join(made[:5])}"] if made else []
    left = [name for name in new if name.startswith("tmp/") and name.count("/") == 1]
    wrong += [f"left in TMPDIR: {name}" for name in left if not name.startswith("tmp/torchinductor_")]
    known = set(before.values())  # what was renamed, too
    wrong += [
        f"holds the secret: {name}"
        for name in sorted(new)
        if after[name] not in known and not _matches(name, case.may_hold) and _tells(place.root / name)
    ]
    if case.then is not None and (complaint := case.then(place, done)):
        wrong.append(complaint)
    return done, wrong


def _about_its_end(case: Case, done: Finished) -> list[str]:
    if done.code is None:
        return ["did not end"]
    wrong = [] if done.code in case.codes else [f"exit code {done.code}, expected {sorted(case.codes)}"]
    return [*wrong, "left processes"] if done.num_left else wrong


def _about_its_words(case: Case, done: Finished) -> list[str]:
    wrong = []
    for name, said in (("stdout", done.stdout), ("stderr", done.stderr)):
        if said is None:
            continue
        try:
            text = said.decode()
        except UnicodeDecodeError:
            wrong.append(f"{name} is no UTF-8")
            text = said.decode(errors="replace")
        if "Traceback" in text:
            wrong.append(f"a traceback on {name}")
        if raw := sorted({hex(ord(c)) for c in text if not c.isprintable() and c not in "\n\t"}):
            wrong.append(f"raw control characters on {name}: {', '.join(raw)}")
        lines = [line for line in text.split("\n") if line.startswith("error:")]
        wanted = int(name == "stderr" and done.code in (2, 3))
        if len(lines) != wanted:
            wrong.append(f"{len(lines)} error lines on {name} with exit code {done.code}")
        if any(SECRET in line for line in lines) and not case.may_tell:
            wrong.append("the secret is in an error line")
    return wrong


def _lost(case: Case, before: dict[str, Entry], after: dict[str, Entry]) -> list[str]:
    """What is neither at its place nor anywhere else as it was."""
    anywhere = set(after.values())
    return [
        name
        for name, entry in before.items()
        if after.get(name) != entry and entry not in anywhere and not _matches(name, case.may_change)
    ]


def _tells(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and SECRET.encode() in path.read_bytes()


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
