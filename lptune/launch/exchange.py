"""The exchange: messages between the launchers of several machines, in the store that torchrun made for them.

One of the launchers hosts the store. A heartbeat tells that a machine is alive; the launcher of the first
machine reads the heartbeats and reports a machine without one.
"""

import contextlib
import json
import math
import time
from datetime import timedelta

from lptune.launch.outcome import Outcome, Rank

_POLL_S = 0.1
_ASK_S = 0.5  # time between two reads of the store
_LINGER_S = 4.0  # for other machines to read the reason: the store may end with this process
_BEAT_S = 5.0
_SILENCE_S = 45.0
_STORE_TIMEOUT_S = 10.0


class Exchange:
    """The connection of one launcher to the store. Every method may raise RuntimeError: the store is lost.

    rank: any rank of this machine, which knows the address.
    """

    def __init__(self, rank: Rank) -> None:
        import torch.distributed as dist

        host, _, port = rank.store.rpartition(":")
        self.address = rank.store
        self._node, self._num_nodes = rank.node, rank.num_nodes
        timeout = timedelta(seconds=_STORE_TIMEOUT_S)
        store = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)  # type: ignore[attr-defined]
        self._store = dist.PrefixStore(f"lptune/{rank.run_id}", store)  # type: ignore[attr-defined]
        self._num_read = 0
        self._ask_every_s = _ASK_S
        self._next_ask_s = self._next_beat_s = 0.0
        self._beats = dict.fromkeys(range(rank.num_nodes), ("", time.monotonic()))

    def publish(self, outcome: Outcome) -> None:
        """Writes `outcome` for the other launchers to read."""
        number = self._store.add("outcomes", 1)
        self._store.set(f"outcome/{number}", json.dumps([self._node, outcome._asdict()]))

    def news(self) -> list[Outcome]:
        """Outcomes of other launchers since the last call; reads the store at most twice a second."""
        now_s = time.monotonic()
        if now_s < self._next_ask_s:
            return []
        self._next_ask_s = now_s + self._ask_every_s
        self._beat(now_s)
        new = []
        for number in range(self._num_read + 1, self._store.add("outcomes", 0) + 1):
            node, values = json.loads(self._store.get(f"outcome/{number}"))
            if node != self._node:
                new.append(Outcome(**values))
            self._num_read = number
        return new

    def ask_now(self) -> None:
        """Makes the next call of `news` read the store at once."""
        self._next_ask_s = 0.0

    def ask_rarely(self) -> None:
        """Makes `news` read the store only as often as heartbeats are written."""
        if self._ask_every_s != _BEAT_S:
            self._ask_every_s = _BEAT_S
            self._next_ask_s = time.monotonic() + _BEAT_S

    def linger(self) -> None:
        """Waits a short time until every launcher is at this point; the host also waits until they have left.

        If the store ended earlier, torch would print errors on all other machines.
        """
        deadline_s = time.monotonic() + _LINGER_S
        with contextlib.suppress(RuntimeError):
            self._store.add("here", 1)
            self._wait_for("here", self._num_nodes, deadline_s)
            self._store.add("left", 1)
            if self._node == 0:
                self._wait_for("left", self._num_nodes, deadline_s)

    def _wait_for(self, key: str, count: int, deadline_s: float) -> None:
        while self._store.add(key, 0) < count and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)

    def _beat(self, now_s: float) -> None:
        """Writes a heartbeat; the launcher of the first machine reads those of the others."""
        if now_s < self._next_beat_s:
            return
        self._next_beat_s = now_s + _BEAT_S
        self._store.set(f"beat/{self._node}", str(now_s))
        if self._node != 0:
            return
        for node, (last, since_s) in list(self._beats.items()):
            key = f"beat/{node}"
            beat = self._store.get(key).decode() if self._store.check([key]) else ""
            if beat != last:
                self._beats[node] = (beat, now_s)
            elif now_s - since_s > _SILENCE_S:
                line = f"machine {node} of {self._num_nodes} sent no heartbeat for {_SILENCE_S:.0f} s"
                self._beats[node] = ("", math.inf)  # once
                self._node = -1  # so that this launcher reads its own report, too
                self.publish(Outcome(-1, 1, time.time_ns(), "", line))
                self._node = 0
