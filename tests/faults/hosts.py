"""Hosts: network namespaces of this machine, each with an address, a name and its own /etc/hosts.

    with Network(2) as network:
        network.start(0, ["run", "--nnodes=2", …], folder=…)

Needs root and `ip`; `missing()` says what is not there. Nothing of the machine's own network is touched: the
hosts hang on a bridge in a namespace of its own, and all end with the block.
host_faults.py has what is tried.
"""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.helpers import cold

PORT = 29500


def missing() -> str:
    """What this machine lacks for hosts; empty if nothing."""
    if not all(map(shutil.which, ("ip", "unshare", "nsenter"))):
        return "needs ip (iproute2), unshare and nsenter"
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    name = f"lpt{os.getpid()}t"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return f"cannot make a network namespace: {done.stderr.strip()}" if done.returncode else ""


class End(NamedTuple):
    """How a command on a host ended."""

    code: int | None
    """None: it was still running when the time was up, and was killed."""
    output: str
    after_s: float
    """Since `Network.wait` was called."""

    @property
    def errors(self) -> list[str]:
        """The lines that say what is wrong."""
        return [line for line in self.output.splitlines() if line.startswith("error: ")]


class Network:
    """So many hosts, `host-0` (10.77.0.1) to `host-N`, which reach each other by name."""

    def __init__(self, num_hosts: int) -> None:
        self._names = [f"lpt{os.getpid()}h{number}" for number in range(num_hosts)]
        self._switch = f"lpt{os.getpid()}sw"
        self._folder = Path(tempfile.mkdtemp(prefix="hosts-"))
        self._started: list[tuple[subprocess.Popen[bytes], Path]] = []

    def __enter__(self) -> "Network":
        _ip("netns", "add", self._switch)
        self._in(self._switch, "link", "add", "bridge", "type", "bridge")
        self._in(self._switch, "link", "set", "bridge", "up")
        for number, name in enumerate(self._names):
            _ip("netns", "add", name)
            pair = f"to{number} type veth peer name eth0 netns {name}"
            self._in(self._switch, "link", "add", *pair.split())
            self._in(self._switch, "link", "set", f"to{number}", "master", "bridge")
            self._in(self._switch, "link", "set", f"to{number}", "up")
            self._in(name, "link", "set", "lo", "up")
            self._in(name, "addr", "add", f"{address(number)}/24", "dev", "eth0")
            self._in(name, "link", "set", "eth0", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for process, _ in self._started:
            if process.poll() is None:
                _kill(process)
        for name in (*self._names, self._switch):
            _kill_all(name)
            _ip("netns", "del", name)
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def hosts_file(self) -> str:
        """/etc/hosts of every host, but for its own first line."""
        lines = [f"{address(number)} host-{number}" for number in range(len(self._names))]
        return "\n".join(["127.0.0.1 localhost", *lines, ""])

    def start(
        self,
        host: int,
        command: Sequence[str],
        *,
        folder: Path,
        hosts: str | None = None,
        own: Path | None = None,
        disk: Path | None = None,
        **variables: str,
    ) -> "subprocess.Popen[bytes]":
        """Starts `command` on `host` in `folder`. hosts: its /etc/hosts. own: a folder in place of which
        this host sees another: `disk`, or an empty one.
        """
        output = self._folder / f"output-{len(self._started)}"
        hosts_file = self._folder / f"hosts-{len(self._started)}"
        hosts_file.write_text(self.hosts_file if hosts is None else hosts)
        # A cut-off name service answers at once that it has no name.
        script = (
            'hostname "$1"; mount --bind "$2" /etc/hosts; mount --bind /dev/null /etc/resolv.conf; '
            'if test -n "$4"; then mount --bind "$4" "$3"; '
            'elif test -n "$3"; then mount -t tmpfs none "$3"; fi; shift 4; exec "$@"'
        )
        inside = ["nsenter", f"--net=/run/netns/{self._names[host]}", "unshare", "--uts", "--mount"]
        with output.open("wb") as file:
            names = f"host-{host}", str(hosts_file), str(own or ""), str(disk or "")
            process = subprocess.Popen(
                [*inside, "sh", "-c", script, "sh", *names, *command],
                cwd=folder,
                env=cold.environment() | variables,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self._started.append((process, output))
        return process

    def output(self, process: "subprocess.Popen[bytes]") -> str:
        """What it has printed so far."""
        return next(file for started, file in self._started if started is process).read_text(errors="replace")

    def wait(self, *processes: "subprocess.Popen[bytes]", timeout_s: float = 180) -> list[End]:
        """Waits for the ends of `processes`, and of all processes that they started."""
        started_s = time.monotonic()
        ends: dict[int, End] = {}
        while len(ends) < len(processes):
            for number, process in enumerate(processes):
                late = time.monotonic() - started_s > timeout_s
                if number in ends or (process.poll() is None and not late):
                    continue
                code = process.poll()
                if code is None:
                    _kill(process)
                ends[number] = End(code, self.output(process), time.monotonic() - started_s)
            time.sleep(0.05)
        return [ends[number] for number in range(len(processes))]

    def left_over(self, *, but: int = 0) -> list[int]:
        """Processes that still run on any host, without the process `but`."""
        found = (
            subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True).stdout
            for name in self._names
        )
        return [int(pid) for text in found for pid in text.split() if int(pid) != but]

    def cut(self, host: int, *, again: bool = False) -> None:
        """Pulls out the cable of `host`, or puts it in again."""
        self._in(self._switch, "link", "set", f"to{host}", "up" if again else "down")

    def lose(self, host: int) -> None:
        """Kills all that runs on `host`, and pulls out its cable, as a power cut does."""
        self.cut(host)
        _kill_all(self._names[host])

    def listening(self, host: int) -> list[tuple[str, int]]:
        """(address, port) of everything that listens on `host`."""
        found = []
        for family in ("tcp", "tcp6"):
            table = subprocess.run(
                ["nsenter", f"--net=/run/netns/{self._names[host]}", "cat", f"/proc/net/{family}"],
                capture_output=True, text=True, check=True,
            ).stdout  # fmt: skip
            for line in table.splitlines()[1:]:
                local, state = line.split()[1], line.split()[3]
                if state == "0A":
                    where, port = local.split(":")
                    found.append((_readable(where), int(port, 16)))
        return sorted(found)

    def _in(self, name: str, *arguments: str) -> None:
        _ip("-n", name, *arguments)


def _kill_all(name: str) -> None:
    """Kills the processes of a namespace."""
    pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    for pid in pids.stdout.split():
        subprocess.run(["kill", "-KILL", pid], check=False)


def address(host: int) -> str:
    """Of the interface of `host`."""
    return f"10.77.0.{host + 1}"


def _readable(where: str) -> str:
    if len(where) == 8:
        return ".".join(str(byte) for byte in bytes.fromhex(where)[::-1])
    return "any (IPv6)" if not int(where, 16) else where


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    subprocess.run(["kill", "-KILL", "--", f"-{process.pid}"], check=False)
    process.wait()
