"""The rendezvous: how the launchers of a run meet, number themselves and find that they run the same thing.

torchrun starts and watches ranks. Its own ways to meet are not used: its dynamic rendezvous unpickles, every
few seconds, what anybody may write into a store that listens on all interfaces. Here nothing is unpickled,
and the store listens on one address:

    one machine        127.0.0.1 and a free port
    several machines   the endpoint's port, on machine 0's interface of the route to the endpoint

The launcher of machine 0 hosts the store (torch's TCPStore, which also serves the ranks). Each other launcher
writes what it is about to run, and then counts twice a second, so that machine 0 tells those that are there
from those that have died: no clock is compared. Machine 0 checks that all run the same command, numbers the
machines and writes the order.

A machine's number is --node-rank, or what a scheduler says (`NUMBERS`). Without one, the machine that has the
endpoint's address is machine 0, and the others are numbered as they come.

They compare what they are about to run, since a command that differs on one machine would train a mixture
(another learning rate), hang (another number of steps) or end in a C++ abort (another kind of precision). So
every key of the config is compared, with the recipe's text and the versions. Two things are not: paths that
may be local to a machine, whose content the ranks compare (checkpoint/resume.py), and how many ranks a
machine has. A key is told by a digest of its value and by the beginning of its text.
"""

import errno
import hashlib
import ipaddress
import json
import math
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lptune import __version__
from lptune.base.errors import UnavailableError, UserError
from lptune.base.files import read_object
from lptune.base.step_folders import list_checkpoints, step_of
from lptune.base.text import printable
from lptune.config import RunConfig, key_paths, to_dict, to_yaml

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


Told = dict[str, list[str]]
"""Name -> [digest, what a message shows]."""
LOCAL = frozenset({
    "model.path", "teacher.path", "logits.folder", "data.source", "data.cache",
    "data.chat_template", "prompts.source", "prompts.chat_template", "harness.task_folder",
})  # fmt: skip
"""Keys whose values are paths that may differ."""


def tell(cfg: Any, **others: object) -> Told:
    """What this machine is about to run. cfg: a config dataclass. others: what else must be the same."""
    import torch

    version = ".".join(map(str, sys.version_info[:2]))
    values = {"lptune": __version__, "torch": torch.__version__, "Python": version, **others}
    told = {name: [_digest(value), f"{value!s:.80}"] for name, value in values.items()}
    written = to_dict(cfg)
    for key in key_paths(type(cfg)):
        if key not in LOCAL:
            told[key] = [_digest(_leaf(cfg, key)), f"{_leaf(written, key)!s:.80}"]
    return told


def difference(here: Mapping[str, list[str]], there: Mapping[str, list[str]]) -> tuple[str, str, str] | None:
    """The first name whose values differ, with what `here` and `there` have; None: all are the same."""
    for key in {**here, **there}:
        mine, other = here.get(key, ["", "nothing"]), there.get(key, ["", "nothing"])
        if mine[0] != other[0]:
            return key, mine[1], other[1] if other[1] != mine[1] else f"another {other[1]}"
    return None


def _leaf(holder: Any, key: str) -> Any:
    for name in key.split("."):
        holder = holder[name] if isinstance(holder, dict) else getattr(holder, name)
    return holder


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode(errors="surrogatepass")).hexdigest()[:16]


def digest_of(cfg: Any) -> str:
    """Of all keys of a config, for run.json: a run that is done is so with this config."""
    return _digest(to_yaml(cfg))


def done(cfg: Any) -> str:
    """A line if run.json in the config's output_dir says that nothing is left to do with this config; else
    empty. A launcher that was killed when the run had just ended would wait for machines that have left.
    """
    if not isinstance(cfg, RunConfig) or cfg.resume != "auto":
        return ""
    folder = Path(cfg.output_dir).expanduser()
    with suppress(UserError, OSError):
        said = read_object(folder / "run.json", missing={}, follow=False).get("done")
        # With a disk each, the export is whole elsewhere (checkpoint/parts.py).
        here = list_checkpoints(folder / "parts")
        if not here and ((folder / "export").is_dir() or not cfg.export.enabled):
            here = list_checkpoints(folder / "checkpoints")
        if here and said == {"step": step_of(here[0]), "config": digest_of(cfg)}:
            what = f"{folder / 'run.json'} says so, of step {step_of(here[0])} and this config"
            return f"already finished: {what};\n  for more raise num_steps or change output_dir"
    return ""


def is_address(text: str) -> bool:
    """Whether `text` is an IPv4 or IPv6 address, and no name."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether `host` is written as an address of this machine alone."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def interface_of(address: str) -> str | None:
    """The name of the network interface that has `address` (`eth0`); None if it cannot be told."""
    if ipaddress.ip_address(address).is_loopback:
        return "lo"
    if ":" in address:
        wanted = ipaddress.ip_address(address).packed.hex()
        with open("/proc/net/if_inet6", encoding="ascii") as lines:
            return next((line.split()[5] for line in lines if line.startswith(wanted)), None)
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(any_socket, 0x8915, name.encode().ljust(40, b"\0"))  # SIOCGIFADDR
            except OSError:  # it has no address of this family
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None


NUMBERS = ("PET_NODE_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX", "SKYPILOT_NODE_RANK")
"""Variables with the number of a machine, in this order, after --node-rank."""
LOOPBACK = "127.0.0.1"
BACKEND = "lptune"
"""The name under which torchrun knows this rendezvous."""
_POLL_S = 0.2
_ALIVE_S = 0.5  # time between two signs of life of a launcher that waits
_DEAD_S = 10.0  # without a sign of life
_HINT_S = 15.0
_LINGER_S = 30.0  # for other launchers to come and read a refusal, which ends with the store
_CONNECT_S = 5.0
_STORE_S = 600.0


class MeetingPoint(NamedTuple):
    """What the flags say of the rendezvous."""

    host: str
    """Of the endpoint; empty for one machine."""
    port: int
    machine: int | None
    """The number of this machine; None: as it comes."""
    num_machines: int
    local_address: str
    """The address of this machine by a flag; empty: that of the route to the endpoint."""
    run_id: str
    """The same for the launchers of one run, another for each other run."""
    join_timeout_s: float
    last_call_s: float
    """How long enough machines wait for more, after the last has come."""
    min_machines: int = 1
    """How many are enough."""
    is_supervised: bool = False
    """Whether launchers are started again after a failure, so that one may come while others still end."""

    @property
    def name(self) -> str:
        """The endpoint as the user wrote it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass
class Meeting:
    """The launchers of a run, which have met."""

    store: "Store"
    """Of all launchers and ranks. Its values are bytes that anybody who reaches the port may have written."""
    address: str
    """Where the store is, as this machine reaches it."""
    port: int
    machine: int
    hosts: list[str]
    """The names of all machines, by their number."""
    run_id: str
    local_address: str = LOOPBACK

    @property
    def num_machines(self) -> int:
        """How many launchers take part."""
        return len(self.hosts)


def meet(point: MeetingPoint, told: Told) -> Meeting:
    """Waits until the launchers of all machines have come, and have told the same as this one.

    told: what this machine runs (`tell`). Prints a line after 15 s. Raises UserError, on every machine,
    if two of them run different things, and on this one at once for what waiting cannot mend;
    UnavailableError if the others do not come within `join_timeout_s`.
    """
    if point.num_machines == 1:
        store, port = _serve(LOOPBACK, 0)
        return Meeting(store, LOOPBACK, port, 0, [socket.gethostname()], point.run_id)
    arrival = _Arrival(point, told)
    arrival.start()  # a thread: a call of the store waits for ever if a cable is pulled out
    started_s, hinted = time.monotonic(), False
    while arrival.is_alive():
        arrival.join(_POLL_S)
        waited_s = time.monotonic() - started_s
        if arrival.is_late:
            started_s = time.monotonic() - min(waited_s, _HINT_S)
        if waited_s > point.join_timeout_s and arrival.meeting is None and arrival.error is None:
            raise UnavailableError(
                f"{_at(point)}: after {point.join_timeout_s:.0f} s: {arrival.waits_for}; start the same "
                f"command on all {point.num_machines} machines, with a host that they reach and a port free "
                "there"
            )
        if waited_s > _HINT_S and not hinted:
            hinted = True
            line = f"waiting for the other machines at {point.name}: {arrival.waits_for}"
            print(printable(line), file=sys.stderr, flush=True)
    if arrival.error is not None:
        raise arrival.error
    assert arrival.meeting is not None
    return arrival.meeting


class _Arrival(threading.Thread):
    """Finds the store, or hosts it, and waits for the others. Ends with `meeting` or `error`."""

    def __init__(self, point: MeetingPoint, told: Told) -> None:
        super().__init__(name="lptune-rendezvous", daemon=True)
        self._point, self._told = point, told
        self.meeting: Meeting | None = None
        self.error: BaseException | None = None
        self.waits_for = "no machine has come"
        self.is_late = False
        """Whether the others are at work there. This one waits for their next meeting."""

    def run(self) -> None:
        try:
            while self.meeting is None:
                try:
                    self.meeting = self._try()
                except _NotYetError as error:
                    self.waits_for = str(error)
                except (OSError, RuntimeError) as error:  # RuntimeError: all errors of torch's store
                    self.waits_for = f"machine 0 does not answer there ({_first_line(error)})"
                time.sleep(_ALIVE_S if self.is_late else _POLL_S)
        except BaseException as error:
            self.error = error

    def _try(self) -> Meeting:
        """One attempt. Others may succeed after it fails, since machines start apart."""
        point = self._point
        self.is_late = False
        here, there = _route(point)
        is_host = point.machine == 0 or (point.machine is None and here == there)
        if is_host:
            try:
                store, port = _serve(here, point.port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE or point.machine == 0:
                    todo = "above 1023" if error.errno == errno.EACCES else "that is free there"
                    raise _refused(point, f"{_first_line(error)}; choose a port {todo}") from None
            else:
                odd = f"; {point.host} is {there}, and this is {here}, machine 0" if here != there else ""
                return self._host(store, Meeting(store, here, port, 0, [], point.run_id, here), odd)
        return self._join(Meeting(_client(there, point.port), there, point.port, -1, [], point.run_id, here))

    # ---- machine 0

    def _host(self, root: "Store", meeting: Meeting, odd: str) -> Meeting:
        store = _of_run(root, meeting.run_id)
        root.set("lptune/run", meeting.run_id)
        num_others = self._point.num_machines - 1
        waiting: dict[int, _Waiting] = {}
        all_here_s, last_came_s = math.inf, time.monotonic()
        while True:
            for number in range(1, store.add("came", 0) + 1):
                if number not in waiting and store.check([f"came/{number}"]):
                    waiting[number] = _Waiting(*json.loads(store.get(f"came/{number}")))
                    last_came_s = time.monotonic()
            now_s = time.monotonic()
            for number, each in waiting.items():
                each.see(store.add(f"alive/{number}", 0), now_s)
            there = {number: each for number, each in waiting.items() if now_s - each.seen_s < _DEAD_S}
            names = ", ".join([socket.gethostname(), *(each.host for each in there.values())])
            order = _in_order(there)[:num_others]
            missing = num_others - len(order)
            is_last_call = now_s - last_came_s > self._point.last_call_s
            is_enough = not missing or (is_last_call and len(order) + 1 >= self._point.min_machines)
            self.waits_for = f"{missing} of {self._point.num_machines} have not come (here: {names}){odd}"
            if why := self._why_not(there):
                store.set("refused", why)
                self.error = UserError(why)
                self._linger(store, num_others)
                raise self.error
            all_here_s = min(all_here_s, now_s) if is_enough else math.inf
            # One more sign of each: a launcher that has died was here, too.
            if is_enough and all(there[number].seen_s > all_here_s for number in order):
                meeting.hosts = [socket.gethostname(), *(there[number].host for number in order)]
                store.set("start", json.dumps([order, meeting.hosts]))
                return meeting
            time.sleep(_POLL_S)

    def _linger(self, store: "Store", num_others: int) -> None:
        """Waits until the other launchers, of which some are still to come, have read the refusal."""
        deadline_s = time.monotonic() + _LINGER_S
        while store.add("told", 0) < num_others and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)

    def _why_not(self, there: Mapping[int, "_Waiting"]) -> str:
        """Why the launchers that are there cannot run together; empty if they can."""
        mine = socket.gethostname()
        for each in there.values():
            if found := difference(self._told, each.told):
                key, here, elsewhere = found
                return (
                    f"run: {key}: {here} on {mine}, {elsewhere} on {each.host}; give all machines the same "
                    "command, config and recipe"
                )
        by_number: dict[int, _Waiting] = {}
        for each in there.values():
            if each.machine is None:
                continue
            other = by_number.setdefault(each.machine, each)
            # A launcher that was started again: the first one is still taken for alive.
            if other is not each and min(other.num_signs, each.num_signs) > _DEAD_S / _ALIVE_S:
                return (
                    f"run: {other.host} and {each.host} are both machine {each.machine}; number them 0, 1, …"
                )
        return ""

    # ---- the others

    def _join(self, meeting: Meeting) -> Meeting:
        root, point = meeting.store, self._point
        if (run_id := self._run_id(root)) != point.run_id:
            raise _NotYetError(
                f"another run, {run_id!r:.80}, meets there, and this one is {point.run_id!r:.80}"
            )
        store = _of_run(root, point.run_id)
        if store.check(["start"]):
            raise self._left_out()
        number = store.add("came", 1)
        store.set(f"came/{number}", json.dumps([point.machine, socket.gethostname(), self._told]))
        self.waits_for = "machine 0 waits for others"
        signed_s = 0.0
        while True:
            now_s = time.monotonic()
            if now_s - signed_s > _ALIVE_S:
                signed_s = now_s
                store.add(f"alive/{number}", 1)
            if store.check(["refused"]):
                why = printable(store.get("refused").decode())
                store.add("told", 1)
                raise UserError(why)
            if store.check(["start"]):
                order, meeting.hosts = json.loads(store.get("start"))
                if number not in order:
                    raise self._left_out()
                meeting.machine = order.index(number) + 1
                return meeting
            time.sleep(_POLL_S)

    def _left_out(self) -> Exception:
        """The error of a machine without which the others have met."""
        why = "its machines have met without this one"
        if not self._point.is_supervised:
            return UnavailableError(f"{_at(self._point)}: {why}")
        self.is_late = True  # that launch is about to end, or it goes on until its next failure
        return _NotYetError(f"{why}, which waits for their next meeting")

    def _run_id(self, root: "Store") -> str:
        deadline_s = time.monotonic() + _CONNECT_S
        while not root.check(["lptune/run"]):
            if time.monotonic() > deadline_s:
                raise _NotYetError("another program answers there")
            time.sleep(_POLL_S)
        return root.get("lptune/run").decode()


class _NotYetError(Exception):
    """What may be mended while a launcher waits."""


@dataclass
class _Waiting:
    """A launcher that has come to machine 0."""

    machine: int | None
    host: str
    told: Told
    num_signs: int = -1
    seen_s: float = field(default_factory=time.monotonic)

    def see(self, num_signs: int, now_s: float) -> None:
        """Notes a sign of life."""
        if num_signs != self.num_signs:
            self.num_signs, self.seen_s = num_signs, now_s


def _in_order(there: Mapping[int, _Waiting]) -> list[int]:
    """The launchers in the order of their machines: those with a number at its place, the others between."""
    numbered = {each.machine: number for number, each in there.items() if each.machine is not None}
    others = iter(number for number, each in there.items() if each.machine is None)
    last = max([*numbered, len(there)])
    places = [numbered.get(machine) or next(others, None) for machine in range(1, last + 1)]
    return [number for number in places if number is not None]


class Handler:
    """What torchrun asks a rendezvous for (torch.distributed.elastic.rendezvous.RendezvousHandler)."""

    use_agent_store = True
    """The ranks meet in the launchers' store."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting

    def get_backend(self) -> str:
        """The name that torchrun was given."""
        return BACKEND

    def next_rendezvous(self) -> Any:
        """Where the ranks meet: once, since ranks are not restarted."""
        from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

        met = self._meeting
        store = _of_run(met.store, f"{met.run_id}/torchrun")
        where = RendezvousStoreInfo(met.address, met.port)
        return RendezvousInfo(store, met.machine, met.num_machines, where)

    def is_closed(self) -> bool:
        """Whether the run is over, for all."""
        return False

    def set_closed(self) -> None:
        """Nothing: no launcher joins later."""

    def num_nodes_waiting(self) -> int:
        """How many machines want to join a run that goes on: none can."""
        return 0

    def get_run_id(self) -> str:
        """The same on all machines."""
        return self._meeting.run_id

    def shutdown(self) -> bool:
        """Whether nothing is left to end."""
        return True


def _route(point: MeetingPoint) -> tuple[str, str]:
    """This machine's address on the route to the endpoint, and the endpoint's address."""
    try:
        found = socket.getaddrinfo(point.host, point.port, type=socket.SOCK_DGRAM)
    except (socket.gaierror, UnicodeError) as error:
        raise _NotYetError(f"{point.host} does not resolve here ({_first_line(error)})") from None
    refusal: OSError | None = None
    for family, kind, _, _, address in found:
        there = str(address[0])
        if ipaddress.ip_address(there.partition("%")[0]).is_loopback and not is_loopback(point.host):
            raise _refused(
                point, f"{point.host} is {there} on this machine, an address that no other machine reaches "
                "(see /etc/hosts); give the address of its network interface as the endpoint, on all machines"
            )  # fmt: skip
        with socket.socket(family, kind) as probe:  # connecting it sends nothing
            try:
                probe.connect(address)
            except OSError as error:
                refusal = error
                continue
            return point.local_address or str(probe.getsockname()[0]), there
    assert refusal is not None
    if refusal.errno == errno.ENETUNREACH:
        raise _refused(point, "this machine has no route to it")
    raise refusal


def _serve(address: str, port: int) -> tuple["Store", int]:
    """A store that listens on `address` alone, and its port (a free one for 0). Raises OSError."""
    import torch.distributed as dist

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # of a run that has just ended
        listening.bind((address, port))
        listening.listen(4096)
        port = listening.getsockname()[1]
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_STORE_S),
            master_listen_fd=listening.detach(),
        )  # fmt: skip
    return store, port


def _client(address: str, port: int) -> "Store":
    import torch.distributed as dist

    # Before torch tries, which prints a C++ stack for each failure.
    socket.create_connection((address, port), timeout=_CONNECT_S).close()
    timeout = timedelta(seconds=_STORE_S)
    return dist.TCPStore(address, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]


def connect(meeting: Meeting) -> "Store":
    """A second connection to the store, for messages while torchrun waits on the first."""
    return _of_run(_client(meeting.address, meeting.port), f"{meeting.run_id}/exchange")


def _of_run(store: "Store", name: str) -> "Store":
    import torch.distributed as dist

    return dist.PrefixStore(f"lptune/{name}", store)  # type: ignore[attr-defined]


def _first_line(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error)
    return (text.splitlines() or [type(error).__name__])[0]


def _refused(point: MeetingPoint, why: str) -> UserError:
    return UserError(f"{_at(point)}: {why}")


def _at(point: MeetingPoint) -> str:
    return f"run: rendezvous at {point.name}"
