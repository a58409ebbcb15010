"""A disk that fails: the order of writes, flushes and renames, and an error in each of them in turn.

    python -m tests.faults.io_errors --ranks 1 2

A kill leaves what the page cache holds, so it cannot show a missing flush; a loss of power would. Here a
library that is preloaded (shim.c) writes down every call that changes the checkpoints' folder, and the order
is asserted: whatever a crash of the machine cuts off, what is named step-N is on the disk. Then each of these
calls fails in turn, with ENOSPC and with EIO, and each write is cut short. Every failure must surface as one
line on all ranks, leave all that is published intact, and not hinder the next save.
"""

import argparse
import ctypes
import errno
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch

from lptune import checkpoint, distributed
from lptune.base.errors import UserError
from lptune.base.step_folders import list_checkpoints, step_folder_name, step_of
from tests.faults.state import State, many_parts, table
from tests.helpers import cold
from tests.helpers.launch import free_port, rank_environment

SHORT_WRITE = -1
_ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "short write": SHORT_WRITE}


class Call(NamedTuple):
    """A line of the shim's log."""

    name: str
    inode: int
    path: str
    to: str


def compile_shim(folder: Path) -> Path | None:
    """shim.c as a library in `folder`; None without a C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        return None
    library = folder / f"shim{sysconfig.get_config_var('SHLIB_SUFFIX')}"
    source = Path(__file__).with_name("shim.c")
    subprocess.run(
        [compiler, "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True
    )
    return library


class Shim:
    """The preloaded library, from inside a process that has it."""

    def __init__(self, log: Path) -> None:
        self._library = ctypes.CDLL(None)
        self._log = log

    def start(self, below: Path, fail_at: int = 0, error: int = 0) -> None:
        """Logs calls below a folder; the `fail_at`-th, counted from 1, fails."""
        self._library.faults_start(os.fsencode(self._log), os.fsencode(below), fail_at, error)

    def stop(self) -> list[Call]:
        """The calls since `start`."""
        self._library.faults_stop()
        calls = []
        for line in self._log.read_text(encoding="utf-8").splitlines():
            name, inode, *paths = line.removeprefix("FAILED ").split("\t")
            calls.append(Call(name, int(inode), paths[0], paths[1] if len(paths) > 1 else ""))
        return calls


# ---- order


def wrong_order(calls: list[Call], folder: Path, step: int, *, writes_manifest: bool) -> list[str]:
    """What a loss of power could turn into a damaged or a lost checkpoint, from the log of one save.

    writes_manifest: on the main rank; the others' log ends with their own files.
    """
    partial, final = folder / f".tmp-{step_folder_name(step)}", folder / step_folder_name(step)
    wrong = []

    def first(name: str, path: Path, to: Path | None = None) -> int:
        """Where that call is; the log's length if it is not."""
        found = (i for i, call in enumerate(calls) if call[0] == name and call.path == str(path))
        return next((i for i in found if to is None or calls[i].to == str(to)), len(calls))

    written = {call.inode: i for i, call in enumerate(calls) if call.name == "write"}
    manifest = first("open", partial / ".tmp-manifest.json")
    for inode, last in written.items():
        flushed = next((i for i in range(last, len(calls)) if calls[i][:2] == ("fsync", inode)), len(calls))
        limit = manifest if last < manifest else first("rename", partial / ".tmp-manifest.json")
        if flushed >= limit:
            wrong.append(f"{calls[last].path} is not flushed before the manifest is written or gets its name")
    if not written:
        wrong.append("nothing was written")
    if not writes_manifest:
        return wrong
    named = first("rename", partial / ".tmp-manifest.json", partial / "manifest.json")
    published = first("rename", partial, final)
    flushes = [i for i, call in enumerate(calls) if call.name == "fsync" and call.path == str(partial)]
    parent = [i for i, call in enumerate(calls) if call.name == "fsync" and call.path == str(folder)]
    if not any(named < i < published for i in flushes):
        wrong.append("the folder is not flushed between the manifest and the rename")
    if published == len(calls):
        wrong.append("it is not published by a rename")
    after = [i for i in parent if i > published]
    if not after:
        wrong.append("the parent folder is not flushed after the rename")
    wrong += [
        f"{call.name} {call.path} {call.to} after the rename"
        for call in calls[published + 1 :]
        if call.name != "fsync" and final.name in {*Path(call.path).parts, *Path(call.to).parts}
    ]
    for i, call in enumerate(calls):
        removes = call.name in ("unlink", "rmdir", "rename") and ".tmp-removed" in f"{call.path} {call.to}"
        if removes and (not after or i < after[0]):
            wrong.append(f"{call.name} {call.path}: a checkpoint goes before the new one is safe")
    return wrong


# ---- errors


class Trials:
    """Saves with a fault in each, in one folder. Runs on every rank, under the shim."""

    def __init__(self, within: Path, world: distributed.World) -> None:
        self.folder, self._world = within / "checkpoints", world
        self.shim = Shim(within / f"calls-{world.rank}.log")
        self.state = State(world)
        # One stays: each save publishes, and removes what came before.
        self.writer = self.state.writer(self.folder, world, keep_last=1)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.save(wait=True)

    def save(self, *, wait: bool) -> None:
        """The next step, until it is published or has failed."""
        self.state.advance()
        self.state.save(self.writer, wait=wait)
        deadline = time.monotonic() + 30
        while not wait and self.writer._thread is not None and time.monotonic() < deadline:
            self.writer.check()
            time.sleep(0.0005)

    def order(self, *, wait: bool) -> int:
        """A save without a fault; how many calls it makes on this rank."""
        self.shim.start(self.folder)
        self.save(wait=wait)
        calls = self.shim.stop()
        self._say(wrong_order(calls, self.folder, self.state.step, writes_manifest=self._world.is_main))
        self.counts["saves whose order was checked"] += 1
        return len(calls)

    def fault(self, victim: int, number: int, error: int, *, wait: bool) -> None:
        """A save during which that call fails on the rank `victim`, and one without a fault."""
        before = self._newest()
        self.shim.start(self.folder, number if victim == self._world.rank else 0, error)
        line = None
        try:
            self.save(wait=wait)
        except UserError as raised:
            line = str(raised)
        calls = self.shim.stop()
        where = f"call {number} on rank {victim}, {'at once' if wait else 'in the background'}"
        hit = ""
        if victim == self._world.rank and number <= len(calls):
            hit = calls[number - 1].name
            where += f", {' '.join(map(str, calls[number - 1]))}"
        name = next(key for key, value in _ERRORS.items() if value == error)
        where += f", {name}"
        if hit and (error != SHORT_WRITE or hit == "write"):
            self.counts[f"{hit}: {name}"] += 1
        if error == SHORT_WRITE:
            if line is not None:
                self._say([f"{where}: {line}"])
        else:
            self._check_line(line, where, error)
        self._world.barrier()
        newest = self._check_published(where)
        if newest < before:
            self._say([f"{where}: checkpoint {before} is gone"])
        self._world.barrier()
        self.save(wait=wait)
        self._world.barrier()
        if self._check_published(f"after {where}") != self.state.step:
            self._say([f"{where}: the next save was not published"])
        self._world.barrier()

    def _check_line(self, line: str | None, where: str, error: int) -> None:
        if line is None:
            self._say([f"{where}: the save says nothing of it"])
        elif "\n" in line or os.strerror(error) not in line or "is intact" not in line:
            self._say([f"{where}: {line!r}"])

    def _newest(self) -> int:
        return step_of(list_checkpoints(self.folder)[0])

    def _check_published(self, where: str) -> int:
        """All of step-* verifies, and nothing but that and what a removal has left is there."""
        newest = self._newest()
        if self._world.is_main:
            for path in list_checkpoints(self.folder):
                try:
                    checkpoint.verify(path)
                except UserError as error:
                    self._say([f"{where}: {error}"])
            left = [path.name for path in self.folder.iterdir() if not path.name.startswith("step-")]
            if any(not name.startswith(".tmp-removed-") for name in left):
                self._say([f"{where}: {left} left behind"])
        return newest

    def _say(self, lines: list[str]) -> None:
        self.wrong += [f"rank {self._world.rank}: {line}" for line in lines]


def _worker(within: Path, every: int, errors: list[str]) -> None:
    """What runs under the shim; writes its result beside the folder."""
    torch.set_num_threads(1)
    with distributed.session("cpu") as world, many_parts():
        trials = Trials(within, world)
        faults = [(wait, _ERRORS[error]) for wait in (True, False) for error in errors]
        num_calls = {wait: trials.order(wait=wait) for wait in (True, False)}
        for victim in range(world.size):
            for turn, (wait, error) in enumerate(faults):
                count = int(world.sum(num_calls[wait] if world.rank == victim else 0))
                # Each kind of fault begins with another call, so that a few of each meet all calls.
                for number in range(1 + turn % every, count + 1, every):
                    trials.fault(victim, number, error, wait=wait)
    text = json.dumps({"counts": trials.counts, "wrong": trials.wrong})
    (within / f"result-{world.rank}.json").write_text(text, encoding="utf-8")


def io_errors(ranks: int, every: int, errors: list[str], within: Path) -> tuple[Counter[str], list[str]]:
    """Counts of what was tried and what went wrong; every: of the calls only each so-manieth fails."""
    library = compile_shim(within)
    assert library is not None
    port = free_port()
    worker = ("-m", "tests.faults.io_errors", "--worker", str(within), "--every", str(every), "--errors")
    processes = []
    for rank in range(ranks):
        extra = rank_environment(rank, ranks, port) if ranks > 1 else {}
        extra |= {"LD_PRELOAD": str(library)}
        processes.append(cold.start(*worker, *errors, variables=extra, stdout=None))
    counts, wrong = Counter[str](), []
    for rank, process in enumerate(processes):
        _, said = process.communicate(timeout=1800)
        result = within / f"result-{rank}.json"
        if process.returncode or not result.exists():
            wrong.append(f"rank {rank} ended with {process.returncode}: {said[-2000:]}")
            continue
        found = json.loads(result.read_text(encoding="utf-8"))
        counts += Counter(found["counts"])
        wrong += found["wrong"]
    return counts, wrong


def main() -> None:
    """Runs the long form."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--every", type=int, default=1, help="let each so-manieth call fail")
    parser.add_argument("--errors", nargs="+", choices=_ERRORS, default=list(_ERRORS))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        _worker(Path(args.worker), args.every, args.errors)
        return
    failed = False
    for ranks in args.ranks:
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="lptune-io-") as within:
            if compile_shim(Path(within)) is None:
                raise SystemExit("needs Linux and a C compiler (gcc or cc)")
            counts, wrong = io_errors(ranks, args.every, args.errors, Path(within))
        failed |= bool(wrong)
        print(table(("fault", "saves"), sorted(counts.items())))
        print(f"{ranks} ranks, {time.monotonic() - started:.0f} s: {len(wrong)} went wrong")
        print("\n".join(wrong))
    sys.exit(failed)


if __name__ == "__main__":
    main()
