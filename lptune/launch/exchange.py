"""The exchange: messages between the launchers of several machines, in the store of the rendezvous.

A thread talks to the store, and notes when it answered last: a call waits for a quarter of an hour when a
machine loses its power or its cable, so whoever must not wait looks at that time (`silence_s`). A heartbeat
tells that a machine is alive, and how often its ranks have gone on. Machine 0, which hosts the store, reads
the heartbeats and reports a machine without one; the other machines see its silence themselves. Where no rank
of any machine goes on, machine 0 asks where they stand, and reads the answers (hangs.py).
"""

import json
import math
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from lptune.launch.hangs import Stand
from lptune.launch.outcome import Outcome
from lptune.launch.rendezvous import Meeting, connect

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

SILENCE_S = 45.0
"""A machine that is silent for longer is taken for dead."""
_ASK_S = 0.5  # time between two reads of the store
_BEAT_S = 5.0
_FAREWELL_S = 4.0  # for other machines to read the reason: the store ends with machine 0's launcher
_LEFT = "left"  # in place of a heartbeat


class Exchange(threading.Thread):
    """The connection of one launcher to the others. No method waits for the store for more than seconds, but
    `leave` on machine 0, for those that are still at work."""

    def __init__(self, meeting: Meeting) -> None:
        super().__init__(name="lptune-exchange", daemon=True)
        self._meeting = meeting
        self._to_send: queue.SimpleQueue[Outcome | None] = queue.SimpleQueue()
        self._received: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._num_read = 0
        self._num_beats, self._next_beat_s = 0, 0.0
        self._beats = dict.fromkeys(range(1, meeting.num_machines), ("", time.monotonic()))
        self._answered_s = time.monotonic()
        self._asked, self._leaving = threading.Event(), threading.Event()
        self._num_rounds = 0
        self._reported: set[int] = set()
        self._signs = dict.fromkeys(range(1, meeting.num_machines), 0)
        self._answer: Sequence[Stand] = ()
        self._answers: dict[int, list[Stand]] = {}
        self.num_signs = 0
        """Number of signs of the ranks of this machine (hangs.py), which its heartbeats carry."""
        self.is_asked = False
        """Whether machine 0 has asked where all ranks stand."""
        self._patience_s = math.inf
        self.is_lost = False
        """Whether no message passes any more: the store is gone, with machine 0's launcher, or unreadable."""

    @property
    def silence_s(self) -> float:
        """Seconds since the store has answered, also if it is gone."""
        return time.monotonic() - self._answered_s

    @property
    def machine_0(self) -> str:
        """The machine that hosts the store, for messages."""
        return f"machine 0 of {self._meeting.num_machines}, {self._meeting.hosts[0]},"

    def publish(self, outcome: Outcome) -> None:
        """Sends `outcome` to the other launchers."""
        self._to_send.put(outcome)

    @property
    def num_signs_elsewhere(self) -> int:
        """On machine 0: `num_signs` of the other machines, added up."""
        return sum(self._signs.values())

    @property
    def stands_elsewhere(self) -> list[Stand]:
        """On machine 0: the answers of the other machines until now."""
        return [stand for stands in list(self._answers.values()) for stand in stands]

    @property
    def has_all_answers(self) -> bool:
        """On machine 0: whether each other machine has answered."""
        return len(self._answers) == self._meeting.num_machines - 1

    @property
    def is_machine_0(self) -> bool:
        """Whether this machine hosts the store, and decides for all."""
        return self._meeting.machine == 0

    def ask(self) -> None:
        """Asks all launchers where their ranks stand."""
        self.is_asked = True
        self._to_send.put(None)

    def answer(self, stands: Sequence[Stand]) -> None:
        """Answers machine 0 with where the ranks of this machine stand."""
        self._answer = stands

    def news(self) -> list[Outcome]:
        """Outcomes of other launchers since the last call."""
        found = []
        with suppress(queue.Empty):
            while True:
                found.append(self._received.get_nowait())
        return found

    def settle(self) -> None:
        """Waits until everything is sent, and everything that was there is received."""
        wanted = self._num_rounds + 2  # the round that goes on may have sent already
        deadline_s = time.monotonic() + _FAREWELL_S
        while self.is_alive() and self._num_rounds < wanted and time.monotonic() < deadline_s:
            self._asked.set()
            time.sleep(_ASK_S / 10)

    def leave(self, *, failed: bool) -> None:
        """Ends the exchange. The store ends with the launcher of machine 0, which therefore waits: in a run
        that has failed for seconds, so that the others can read why; else for all that are still at work.
        """
        self._patience_s = _FAREWELL_S if failed else math.inf
        self._leaving.set()
        self._asked.set()
        self.join(_FAREWELL_S if failed or not self.is_machine_0 else None)

    # ---- the thread

    def run(self) -> None:
        try:
            store = connect(self._meeting)
            while not self._leaving.is_set():
                self._ask(store)
            self._send(store)
            self._say_farewell(store)
        except Exception:  # torch's store is gone, or somebody writes nonsense into it
            self.is_lost = True

    def _ask(self, store: "Store") -> None:
        self._asked.clear()
        self._send(store)
        self._beat(store)
        for number in range(self._num_read + 1, store.add("outcomes", 0) + 1):
            if not store.check([f"outcome/{number}"]):
                break  # its number is taken, and it is being written
            machine, values = json.loads(store.get(f"outcome/{number}"))
            if values is None:
                self.is_asked = True
            elif machine != self._meeting.machine:
                self._received.put(Outcome(**values))
            self._num_read = number
        if self.is_asked and self.is_machine_0:
            self._read_answers(store)
        self._answered_s = time.monotonic()
        self._num_rounds += 1
        self._asked.wait(_ASK_S)

    def _send(self, store: "Store") -> None:
        with suppress(queue.Empty):
            while True:
                outcome = self._to_send.get_nowait()
                message = [self._meeting.machine, outcome and outcome._asdict()]
                store.set(f"outcome/{store.add('outcomes', 1)}", json.dumps(message))
        if self._answer:
            store.set(f"stands/{self._meeting.machine}", json.dumps(self._answer))
            self._answer = ()

    def _read_answers(self, store: "Store") -> None:
        for machine in self._signs.keys() - self._answers.keys():
            if store.check([f"stands/{machine}"]):
                stands = json.loads(store.get(f"stands/{machine}"))
                self._answers[machine] = [Stand(*stand) for stand in stands]

    def _beat(self, store: "Store") -> None:
        """Writes a heartbeat; machine 0 reads those of the others."""
        now_s = time.monotonic()
        if now_s < self._next_beat_s:
            return
        self._next_beat_s = now_s + _BEAT_S
        self._num_beats += 1
        if not self.is_machine_0:
            store.set(f"beat/{self._meeting.machine}", f"{self._num_beats} {self.num_signs}")
            return
        for machine in self._at_work(store):
            if now_s - self._beats[machine][1] > SILENCE_S and machine not in self._reported:
                name = f"machine {machine} of {self._meeting.num_machines}, {self._meeting.hosts[machine]},"
                line = f"{name} sent no heartbeat for {SILENCE_S:.0f} s"
                report = Outcome(-1, 1, time.time_ns(), "", line)
                self._received.put(report)
                self.publish(report)
                self._reported.add(machine)

    def _at_work(self, store: "Store") -> list[int]:
        """The machines that have not left, after a look at their heartbeats."""
        for machine, (last, _) in list(self._beats.items()):
            key = f"beat/{machine}"
            beat = store.get(key).decode() if store.check([key]) else ""
            if beat != last:
                self._beats[machine] = (beat, time.monotonic())
                self._signs[machine] = int(beat.partition(" ")[2] or self._signs[machine])
        return [machine for machine, (beat, _) in self._beats.items() if beat != _LEFT]

    def _say_farewell(self, store: "Store") -> None:
        if not self.is_machine_0:
            store.set(f"beat/{self._meeting.machine}", _LEFT)
            return
        started_s = time.monotonic()
        while remaining := self._at_work(store):
            now_s = time.monotonic()
            if now_s - started_s > self._patience_s or all(
                now_s - self._beats[machine][1] > SILENCE_S for machine in remaining
            ):
                return
            time.sleep(_ASK_S / 5)
