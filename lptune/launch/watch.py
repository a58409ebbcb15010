"""The watch: a thread of the launcher that ends a run within seconds of its first failure, on every machine.

torchrun ends the ranks of a machine after a process has ended, not when it fails. It sends SIGTERM first and
SIGKILL after 30 seconds; a rank that waits in a collective, or that saves on SIGTERM, does not react to the
first. torchrun does not tell other machines: their ranks hang until the timeout of the collective (10 minutes
for NCCL, 30 for gloo). So the watch

- reads the outcomes of its ranks (outcome.py), and sees a rank that vanished without one through its pidfd;
- publishes their failures to the launchers of other machines, and reads failures there (exchange.py);
- waits a short time for a better explanation, then kills its ranks (safe at any moment, since checkpoints are
  published by a rename), and ends the launcher itself where torchrun hangs: in its exit barrier, or while it
  asks a store whose host is gone;
- ends this machine when machine 0 has been silent for 45 s, as machine 0 does for each other machine;
- ends a run in which no rank has gone on for `hang_timeout_s`, and names those that the others wait for
  (hangs.py).

Code 143 is not a failure: a rank that exits with it has saved, and the other ranks get time to save. If there
was nothing to save, they are ended, too. The watch passes signals of the launcher on to the ranks
(`pass_on`).
"""

import contextlib
import os
import re
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from lptune.base.text import printable
from lptune.launch.exchange import SILENCE_S, Exchange
from lptune.launch.hangs import HangWatch
from lptune.launch.log import LOGS
from lptune.launch.outcome import LEAVING, Outcome, Rank, leave_line, read_outcomes, read_ranks
from lptune.launch.rendezvous import Meeting

_NUMBERED = re.compile(r"rank \d+: ")


def describe_silent(rank: int, exit_code: int) -> tuple[int, str]:
    """Exit code and words for a rank that could not write an outcome."""
    if exit_code < 0:
        return 128 - exit_code, f"rank {rank} was killed by {signal.Signals(-exit_code).name}"
    return exit_code or 1, f"rank {rank} ended with exit code {exit_code} and reported no error"


def print_own(cause: Outcome) -> None:
    """Prints an outcome of this machine: the traceback, or the line of the error."""
    if (lost := how_lost(cause)) and LOGS in os.environ:
        if cause.rank == 0:  # the others have written it to theirs
            with contextlib.suppress(OSError), Path(os.environ[LOGS], "rank-0.log").open("a") as log:
                log.write(
                    f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} rank 0 on {cause.host}\n{cause.traceback}"
                )
        print(printable(f"error: rank {cause.rank} {lost}; rank-{cause.rank}.log says more"), file=sys.stderr)
    elif cause.traceback:
        print(f"rank {cause.rank}:\n{cause.traceback}", end="", file=sys.stderr)
    elif cause.code not in LEAVING:
        # What fails on one rank may be raised on all of them, with the number of that rank.
        who = f"rank {cause.rank}: " if cause.rank > 0 and not _NUMBERED.match(cause.line) else ""
        line = cause.line or f"ended with exit code {cause.code}"
        leave_line(printable(f"{who}{line}"))
        print(printable(f"error: {who}{line}"), file=sys.stderr)


def how_lost(cause: Outcome) -> str:
    """In words: in which collective and at which place a rank lost another one. Empty: in none."""
    frames = re.findall(r'File "(.+)", line (\d+), in (\S+)', cause.traceback) if cause.lost_peer else []
    calls = [name for file, _, name in frames if "/torch/distributed/" in file and name != "wrapper"]
    places = [f"{os.path.basename(file)}:{line}" for file, line, _ in frames if "/torch/" not in file]
    if not calls:
        return ""
    said = re.sub(r"\[/\S+/", "[", cause.traceback.strip().splitlines()[-1].partition(". ")[0])
    return (
        f"lost another rank in {calls[-1]} ({', '.join(places[-1:])}), and none said why: was a machine or a "
        f"launcher killed? {said:.200}"
    )


def print_other(cause: Outcome) -> None:
    """Prints an outcome of another machine in one line, with the name of that machine."""
    where = f"on {cause.host}: " if cause.host else ""
    who = f"rank {cause.rank} " if cause.rank >= 0 and not _NUMBERED.match(cause.line) else ""
    what = cause.line
    if cause.traceback:
        last = cause.traceback.strip().splitlines()[-1]
        what = how_lost(cause) or f"{last} (the traceback stands in the output there)"
    print(printable(f"error: {who}{where}{what or f'exit code {cause.code}'}"), file=sys.stderr)


_POLL_S = 0.1
_SETTLE_S = 2.0  # for the other ranks of this machine to report the same error, so that rank 0 can be quoted
_VANISHED_S = 0.2  # a rank was killed: no explanation will come
_LOST_PEER_S = 4.0  # for the machine of the lost peer to report the reason
_SAVE_S = 30.0  # a peer exits after a save, which ends with a barrier; torchrun waits no longer than this
_STUCK_S = 6.0  # for torchrun to notice that its ranks are gone


class Watch(threading.Thread):
    """Watches the ranks of this machine, which write their outcomes into `folder`.

    leave: called with the exit code where the launcher would hang instead of ending. hang_timeout_s: 0: a
    hang is not looked for.
    """

    def __init__(self, folder: Path, leave: Callable[[int], None], hang_timeout_s: float) -> None:
        super().__init__(name="lptune-watch", daemon=True)
        self._hangs = HangWatch(folder, hang_timeout_s)
        self._folder, self._leave = folder, leave
        self._ranks: dict[int, Rank] = {}
        self._pidfds: dict[int, int] = {}
        self._killed: set[int] = set()
        self._published = {-1}  # a launcher's own words are published at the end
        self._elsewhere: list[Outcome] = []
        self._exchange: Exchange | None = None
        self._is_alone = False
        self._over = threading.Event()
        self._signal: signal.Signals | None = None
        self._signalled: set[int] = set()

    @property
    def has_ranks(self) -> bool:
        """Whether any rank of this machine has started."""
        return bool(self._ranks) or any(self._folder.glob("rank-*.json"))

    def pass_on(self, number: signal.Signals) -> bool:
        """Has the thread send `number` once to each rank of this machine; False if no rank has started.

        The ranks get as long as they need to save. A scheduler can still kill, a user can signal again.
        """
        self._signal = number
        return self.has_ranks

    def begin(self, meeting: Meeting) -> None:
        """Starts the watch over the ranks that are about to start."""
        if meeting.num_machines > 1:
            self._exchange = Exchange(meeting)
            self._exchange.start()
        self.start()

    def finish(self) -> int:
        """Ends the watch after a launch without a failure; returns the exit code 0."""
        self.stop()
        if self._exchange is not None:
            self._exchange.leave(failed=False)
        return 0

    def stop(self) -> None:
        """Stops the thread of the watch."""
        self._over.set()
        if self.is_alive() and threading.current_thread() is not self:
            self.join(timeout=_STUCK_S)

    # ---- the thread

    def run(self) -> None:
        """The thread: polls until `stop`, or until the ranks here must be killed."""
        try:
            self._wait_for_an_end()
            self._kill_ranks()
            if not self._over.wait(_STUCK_S):
                self._leave(self.conclude({}))
        except Exception:
            print(f"lptune's watch over the ranks failed:\n{traceback.format_exc()}", file=sys.stderr)

    def _wait_for_an_end(self) -> None:
        """Waits; returns when the ranks of this machine must be killed."""
        first_sign_s: float | None = None
        while not self._over.wait(_POLL_S):
            self._meet_ranks()
            self._send_signal()
            now_s = time.monotonic()
            outcomes = read_outcomes(self._folder)
            self._talk(outcomes)
            self._look_for_hang()
            patience_s = self._patience_s(outcomes)
            if patience_s is None:
                continue
            first_sign_s = first_sign_s or now_s
            if now_s - first_sign_s >= patience_s:
                return

    def _patience_s(self, outcomes: list[Outcome]) -> float | None:
        """Seconds that the ranks here may go on after the first sign of an end; None without such a sign."""
        vanished = self._vanished()
        ends = [outcome for outcome in [*outcomes, *self._elsewhere] if outcome.code != 0]
        cause = min(ends, key=lambda outcome: outcome.precedence, default=None)
        if vanished and (cause is None or cause.lost_peer):
            return _VANISHED_S
        if cause is None:
            return None
        if cause.nothing_to_save:
            return _SETTLE_S
        if cause.code in LEAVING:
            return _SAVE_S if cause.code == 143 else _SETTLE_S
        if cause.lost_peer and self._exchange is not None:
            return _LOST_PEER_S
        if cause in self._elsewhere:
            return _VANISHED_S
        num_ranks = max(rank.num_local for rank in self._ranks.values())
        return 0.0 if len({outcome.rank for outcome in outcomes} | vanished) == num_ranks else _SETTLE_S

    def _meet_ranks(self) -> None:
        for rank in read_ranks(self._folder, set(self._ranks)):
            self._ranks[rank.rank] = rank
            # A pidfd stays with this process, even if another process gets its number.
            try:
                self._pidfds[rank.rank] = os.pidfd_open(rank.pid)
            except ProcessLookupError:
                self._pidfds[rank.rank] = -1

    def _has_ended(self, rank: int) -> bool:
        return self._pidfds[rank] < 0 or bool(select.select([self._pidfds[rank]], [], [], 0)[0])

    def _send_signal(self) -> None:
        if self._signal is None:
            return
        for rank in set(self._ranks) - self._signalled:
            self._signalled.add(rank)
            if self._pidfds[rank] < 0:
                continue
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                signal.pidfd_send_signal(self._pidfds[rank], self._signal)

    def _vanished(self) -> set[int]:
        """The ranks that ended without writing an outcome."""
        ended = {rank for rank in self._ranks if rank not in self._killed and self._has_ended(rank)}
        # Read now: a rank writes its outcome before it ends.
        return ended and ended - {outcome.rank for outcome in read_outcomes(self._folder)}

    def _kill_ranks(self) -> None:
        for rank, pidfd in self._pidfds.items():
            if not self._has_ended(rank):
                self._killed.add(rank)
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    # ---- other machines

    def _talk(self, outcomes: list[Outcome]) -> None:
        """Publishes new outcomes of this machine and reads those of other machines."""
        if self._exchange is None:
            return
        for outcome in outcomes:
            is_news = outcome.code not in LEAVING or outcome.nothing_to_save
            if is_news and outcome.rank not in self._published:
                self._published.add(outcome.rank)
                self._exchange.publish(outcome)
        self._elsewhere += self._exchange.news()
        if self._is_alone or not (self._exchange.is_lost or self._exchange.silence_s > SILENCE_S):
            return
        self._is_alone = True
        left = {outcome.rank for outcome in outcomes if outcome.code in LEAVING}
        if not (self._ranks and left >= set(self._ranks)) and not self._elsewhere:
            how = "has ended" if self._exchange.is_lost else f"has not answered for {SILENCE_S:.0f} s"
            line = f"the launcher of {self._exchange.machine_0} {how}"
            self._elsewhere.append(Outcome(-1, 1, time.time_ns(), "", line))

    def _look_for_hang(self) -> None:
        if (hang := self._hangs.look(list(self._ranks.values()), self._exchange)) is not None:
            leave_line(hang.line)
            self._elsewhere.append(hang)
            if self._exchange is not None:
                self._exchange.publish(hang)

    # ---- the end of the launcher

    def conclude(self, exit_codes: Mapping[int, int]) -> int:
        """Prints the cause once, tells the other machines, and returns the exit code of the launcher.

        exit_codes: of ranks that torchrun found ended, negative where a signal killed them.
        """
        self.stop()
        self._meet_ranks()
        outcomes = [outcome for outcome in read_outcomes(self._folder) if outcome.code != 0]
        known = {outcome.rank for outcome in outcomes} | self._killed
        silent = dict.fromkeys(self._vanished(), 1) | dict(exit_codes)
        words = [describe_silent(rank, code) for rank, code in sorted(silent.items()) if rank not in known]
        # Time 0: a rank that ended without an outcome ended before torchrun stopped the others, which wrote
        # one.
        here = outcomes + [Outcome(-1, code, 0, socket.gethostname(), line) for code, line in words]
        self._tell(here)
        cause = min([*here, *self._elsewhere], key=lambda outcome: outcome.precedence, default=None)
        if cause is None:
            cause = Outcome(-1, 1, 0, "", "a launcher lost the others before a rank said why; run again")
            here.append(cause)
        same = [outcome for outcome in outcomes if outcome.line and outcome.code == cause.code]
        if cause.nothing_to_save:
            print(printable(cause.line), file=sys.stderr)
        elif cause.code in LEAVING and any(outcome.code == cause.code for outcome in outcomes):
            pass  # the ranks here have exited by themselves
        elif same:  # most errors occur on every rank: quote the first
            print_own(min(same, key=lambda outcome: outcome.rank))
        elif cause in here:
            print_own(cause)
        else:
            print_other(cause)
        sys.stderr.flush()
        if self._exchange is not None:
            self._exchange.leave(failed=True)
        return cause.code

    def _tell(self, here: list[Outcome]) -> None:
        """Also publishes the outcome of this launcher, and reads those of other launchers a last time."""
        if self._exchange is None:
            return
        for outcome in here:
            if outcome.rank == -1:
                self._exchange.publish(outcome)
        self._talk(here)
        self._exchange.settle()
        self._talk(here)
