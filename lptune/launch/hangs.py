"""Hangs: which rank the others wait for, when none of them goes on.

A collective returns when all of its ranks have entered it. If one never comes (its file system does not
answer, a lock is never released, its process is stopped), the others wait without a word until the timeout of
the process group, and then fail alike: nobody is named. So

- in each rank, a thread looks once a second whether the rank goes on, and touches a file if so. It goes on if
  its main thread stands at another instruction or has slept and woken since, if it has entered or left a
  collective, or if it or a process of its own computes. A recipe need not say that it is alive, and a long
  phase is no hang: one that reads data, asks a server, compiles or saves does one of these;
- what other threads do counts only while the main thread waits for a thread or a process: else a monitor
  would hide a hang;
- the launcher of machine 0 looks at these files, and hears of those of other machines (exchange.py). If no
  rank has gone on for `--hang-timeout` seconds, all ranks are asked where they stand. The ranks of a group
  enter the same collectives in the same order, so they wait for the one that has entered the fewest;
- a rank that does not answer is stopped or waits in the kernel, which /proc tells.

The launch then ends with exit code 1, which `--restarts` starts again.

torch counts collectives in its flight recorder. It gives them as JSON; the calls are not public, so without
them a rank only tells its place.
"""

import json
import os
import random
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from lptune.launch.outcome import OUTCOMES, Outcome, Rank

if TYPE_CHECKING:
    from lptune.launch.exchange import Exchange

TIMEOUT = "LPTUNE_HANG_TIMEOUT"
"""Seconds without a sign of any rank after which a launch ends, set by the launcher for its ranks. 0: it
never does."""
_ANSWER_S = 5.0  # for the ranks to answer; as much again for the answers of other machines
_LOOK_S = 1.0
_ASKED = "asked"
_MOST = 8  # ranks that a line names
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
_STATES = {
    "T": "its process is stopped (SIGSTOP, or a debugger)",
    "D": "it waits in the kernel for a disk, a network file system or a device",
    "Z": "its process has ended",
}
_WAITS = {"threading.py", "connection.py", "popen_fork.py", "subprocess.py", "selectors.py"}
"""Of the standard library: where a thread waits for another one, or for a process."""
_STUCK = "its Python does not answer: a call does not give the interpreter's lock back"


class Stand(NamedTuple):
    """Where a rank stands. A rank that did not answer has a `place` alone, found by its launcher."""

    rank: int
    host: str
    place: str
    """In words."""
    entered: dict[str, int]
    """Number of collectives of each process group. Ranks number groups as they make them, so in the same
    order, where all make the same. Empty: unknown."""
    stack: str = ""
    """Of the main thread, as in a traceback."""

    @property
    def answered(self) -> bool:
        """Whether the rank told this itself."""
        return bool(self.stack)


# ---- in a rank


def hang_timeout_s() -> float:
    """Of the launcher of this rank; 0: no launcher looks for a hang."""
    return float(os.environ.get(TIMEOUT, "0"))


def give_signs() -> None:
    """Starts the thread that tells the launcher when this rank goes on, and where it stands when asked."""
    if hang_timeout_s():
        arguments = Path(os.environ[OUTCOMES]), int(os.environ["RANK"])
        threading.Thread(target=_give_signs, args=arguments, name="lptune-signs", daemon=True).start()


def _give_signs(folder: Path, rank: int) -> None:
    own, last = random.Random(), None  # not the generator of the recipe
    computed_s = _computed_s()
    while not (folder / _ASKED).exists():
        now, now_s = _position(), _computed_s()
        if now != last or now_s - computed_s > _LOOK_S / 2:
            with suppress(OSError):  # the launcher has ended, and its folder is gone; the disk is full
                (folder / f"sign-{rank}").touch()
            computed_s = now_s
        last = now
        # Not each second: a loop whose period divides it would be seen at one place only.
        time.sleep(own.uniform(0.6, 1.4) * _LOOK_S)
    temporary = folder / f".stand-{rank}"
    with suppress(OSError):
        temporary.write_text(json.dumps(Stand(rank, socket.gethostname(), *_answer())), encoding="utf-8")
        temporary.rename(folder / f"stand-{rank}")


def _position() -> tuple[object, ...]:
    """What changes as long as this rank goes on, but for computing."""
    frames, main = sys._current_frames(), threading.main_thread()
    looked_at, woken = [main], [main.native_id or 0]
    if main.ident in frames and os.path.basename(frames[main.ident].f_code.co_filename) in _WAITS:
        # A wait with a timeout wakes the main thread, whether its helper goes on or not.
        looked_at = [each for each in threading.enumerate() if each.ident != threading.get_ident()]
        woken = [each.native_id or 0 for each in looked_at if each is not main]
        woken += _descendants(os.getpid())
    stacks = [
        [(id(each.f_code), each.f_lasti) for each, _ in traceback.walk_stack(frames[thread.ident])]
        for thread in looked_at
        if thread.ident in frames
    ]
    return stacks, [_num_wakes(task) for task in woken], _collectives()


def _num_wakes(task: int) -> str:
    """How often a thread has slept and woken. One that waits in a loop is always found at one instruction."""
    with suppress(OSError, StopIteration):
        status = Path(f"/proc/{task}/status").read_text("utf-8")
        return next(line for line in status.splitlines() if line.startswith("voluntary_ctxt_switches"))
    return ""


def _computed_s() -> float:
    """Seconds of CPU of this process and its children. Of itself only without a GPU, for which CUDA lets a
    thread spin, so that the time says nothing.
    """
    torch = sys.modules.get("torch")
    uses_gpu = torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized()
    found = 0.0 if uses_gpu else time.process_time()
    for child in _descendants(os.getpid()):
        with suppress(OSError):
            times = Path(f"/proc/{child}/stat").read_text("utf-8").rpartition(")")[2].split()[11:13]
            found += sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
    return found


def _descendants(process: int) -> list[int]:
    found = list[int]()
    with suppress(OSError):  # it has ended
        for children in Path(f"/proc/{process}/task").glob("*/children"):
            for child in map(int, children.read_text("utf-8").split()):
                found += [child, *_descendants(child)]
    return found


def _collectives() -> dict[str, tuple[int, int]]:
    """How many collectives of each process group this rank has entered and completed; empty if unknown."""
    module = sys.modules.get("torch._C._distributed_c10d")
    found: dict[str, tuple[int, int]] = {}
    for name in _DUMPS:
        with suppress(Exception):  # not public: another version may lack it, or take other arguments
            groups = json.loads(getattr(module, name)(includeCollectives=False))["pg_status"]
            for group, status in groups.items():
                numbers = (int(status[f"last_{which}_collective"]) for which in ("enqueued", "completed"))
                entered, completed = (max(0, number) for number in numbers)
                found[f"{name}/{group}"] = entered, completed
    return found


def _answer() -> tuple[str, dict[str, int], str]:
    """The fields of a `Stand` after its host."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.extract_stack(frame)
    start = next((at for at, each in enumerate(stack, 1) if each.name == "as_rank"), 0)
    entered = {group: number for group, (number, _) in _collectives().items()}
    return _place_of(frame), entered, "".join(traceback.format_list(stack[start:]))


def _place_of(frame: FrameType | None) -> str:
    """The innermost function that is neither torch's nor the standard library's, with file and line."""
    frames = [each for each, _ in traceback.walk_stack(frame)]
    if not frames:
        return "outside of Python"
    found = next((each for each in frames if _is_own(each.f_code.co_filename)), frames[0])
    return f"{found.f_code.co_qualname} ({found.f_code.co_filename}:{found.f_lineno})"


def _is_own(file: str) -> bool:
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    is_library = file.startswith(os.path.dirname(os.__file__)) and "-packages" not in file
    return not (is_library or file.startswith("<") or (torch and file.startswith(os.path.dirname(torch))))


# ---- in a launcher


class HangWatch:
    """Looks for a hang, in the launcher of a machine, by the signs of its ranks and of those elsewhere."""

    def __init__(self, folder: Path, timeout_s: float) -> None:
        """folder: of the ranks' files. timeout_s: 0: a hang is not looked for."""
        self._folder, self._timeout_s = folder, timeout_s
        self._times_ns: dict[str, int] = {}
        self._num_signs = self._num_signs_anywhere = 0
        self._quiet_s, self._looked_s = 0.0, time.monotonic()
        self._asked_s: float | None = None
        self._stands: list[Stand] = []

    def look(self, ranks: Sequence[Rank], exchange: "Exchange | None") -> Outcome | None:
        """Looks, at most once a second, whether a rank has gone on. If none has for the timeout, asks all
        where they stand. Returns the end of the run, once it is known, on the machine that decides.

        ranks: those of this machine that have started, also if they have ended. exchange: None: there is one
        machine.
        """
        now_s = time.monotonic()
        passed_s = now_s - self._looked_s
        is_alone = exchange is None and all(rank.num_local == 1 for rank in ranks)
        if not self._timeout_s or passed_s < _LOOK_S or is_alone:  # nobody waits for one that is alone
            return None
        self._looked_s = now_s
        if self._asked_s is None:
            self._count(exchange)
            # Only time in which this process ran counts: a job that its scheduler suspends does not hang.
            self._quiet_s += min(passed_s, 2 * _LOOK_S)
            if self._is_to_ask(exchange):
                (self._folder / _ASKED).touch()
                self._asked_s = now_s
            return None
        waited_s = now_s - self._asked_s
        if not self._stands and not self._read(ranks, is_late=waited_s > _ANSWER_S):
            return None
        if exchange is None:
            return self._end()
        if not exchange.is_machine_0:
            exchange.answer(self._stands)
        elif exchange.has_all_answers or waited_s > 2 * _ANSWER_S:
            self._stands += exchange.stands_elsewhere
            return self._end()
        return None

    def _count(self, exchange: "Exchange | None") -> None:
        times_ns = {file.name: file.stat().st_mtime_ns for file in self._folder.glob("sign-*")}
        self._num_signs += times_ns != self._times_ns
        self._times_ns = times_ns
        anywhere = self._num_signs
        if exchange is not None:
            exchange.num_signs = self._num_signs
            anywhere += exchange.num_signs_elsewhere
        if anywhere != self._num_signs_anywhere:
            self._num_signs_anywhere, self._quiet_s = anywhere, 0.0

    def _is_to_ask(self, exchange: "Exchange | None") -> bool:
        if exchange is not None and not exchange.is_machine_0:
            return exchange.is_asked
        is_quiet = self._num_signs_anywhere > 0 and self._quiet_s >= self._timeout_s
        if is_quiet and exchange is not None:
            exchange.ask()
        return is_quiet

    def _read(self, ranks: Sequence[Rank], *, is_late: bool) -> bool:
        """Reads the answers of the ranks here. Returns whether all are there, or those that are not are
        late.
        """
        found = [Stand(*json.loads(file.read_text("utf-8"))) for file in self._folder.glob("stand-*")]
        silent = {rank.rank: rank.pid for rank in ranks}
        for stand in found:
            silent.pop(stand.rank, None)
        if silent and not is_late:
            return False
        self._stands = found + [_stand_of_silent(rank, pid) for rank, pid in silent.items()]
        return True

    def _end(self) -> Outcome:
        line, stack = describe(self._stands, self._quiet_s)
        print(stack, end="", file=sys.stderr, flush=True)
        return Outcome(-1, 1, time.time_ns(), "", line)


def _stand_of_silent(rank: int, pid: int) -> Stand:
    """Where a rank of this machine stands that has not answered, as far as the kernel tells."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
    except OSError:
        state = "Z"
    return Stand(rank, socket.gethostname(), _STATES.get(state, _STUCK), {})


def describe(stands: Sequence[Stand], quiet_s: float) -> tuple[str, str]:
    """Which ranks the others wait for, in one line; and the stack of the first of them, empty if unknown."""
    named, where = _find(stands)
    hosts = {stand.host for stand in stands}
    ranks = [f"{stand.rank} on {stand.host}" if len(hosts) > 1 else f"{stand.rank}" for stand in named]
    if len(named) == len(stands):
        who = f"all {len(stands):,} ranks wait"
    elif len(named) == 1:
        who = f"rank {ranks[0]} keeps the others waiting"
    else:
        more = f" and {len(ranks) - _MOST:,} more" if len(ranks) > _MOST else ""
        who = f"ranks {', '.join(ranks[:_MOST])}{more} keep the others waiting"
    return f"no rank has gone on for {quiet_s:.0f} s (--hang-timeout): {who}: {where}", named[0].stack


def _find(stands: Sequence[Stand]) -> tuple[list[Stand], str]:
    """The ranks that the others wait for, and where they stand."""
    ordered = sorted(stands, key=lambda stand: stand.rank)
    if silent := [stand for stand in ordered if not stand.answered]:
        return [stand for stand in silent if stand.place == silent[0].place], silent[0].place
    if behind := _behind(ordered):
        last, lowest, highest = behind
        return last, f"{lowest:,} of {highest:,} collectives entered, now in {last[0].place}"
    places = Counter(stand.place for stand in ordered)
    rarest = min(places, key=lambda place: (places[place], place))
    return [stand for stand in ordered if stand.place == rarest], f"in {rarest}"


def _behind(stands: Sequence[Stand]) -> tuple[list[Stand], int, int] | None:
    """The ranks that are last in each group whose members differ, with the fewest and most collectives of the
    largest such group. None: none differ. Whoever waits in a small group is behind in a large one.
    """
    groups: dict[str, dict[int, int]] = {}
    for stand in stands:
        for group, number in stand.entered.items():
            groups.setdefault(group, {})[stand.rank] = number
    differing = [numbers for numbers in groups.values() if len(set(numbers.values())) > 1]
    if not differing:
        return None
    largest = max(differing, key=len)
    fewest = [min(numbers.values()) for numbers in differing]
    last = [
        {rank for rank, number in numbers.items() if number == least}
        for numbers, least in zip(differing, fewest, strict=True)
    ]
    ranks = set.intersection(*last) or last[differing.index(largest)]
    named = [stand for stand in stands if stand.rank in ranks]
    return named, min(largest.values()), max(largest.values())
