"""What can go wrong with a run on several hosts, each tried on network namespaces (hosts.py).

    python -m tests.faults.host_faults [--only TEXT]

prints for each fault the exit codes, the seconds until the last process had ended, and what each host reads.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.faults.hosts import PORT, End, Network, address, missing
from tests.helpers import cold


class Row(NamedTuple):
    """One fault and how it ended."""

    fault: str
    num_hosts: int
    wanted: str
    """The exit codes that are right, by host."""
    ends: list[End]
    seconds: float
    """From the fault (or the start, where that is the fault) until no process was left."""
    left_over: int
    wrong: str = ""

    @property
    def is_right(self) -> bool:
        """Whether every host ended as it should, and in time."""
        codes = " ".join(str(end.code) for end in self.ends)
        return codes == self.wanted and not self.left_over and not self.wrong and self.seconds < 90

    def __str__(self) -> str:
        codes = " ".join(str(end.code) for end in self.ends)
        head = f"{'ok ' if self.is_right else 'BAD'} {self.fault:44} {self.num_hosts} hosts  exit {codes:9} "
        said = [f"      host-{n}: {line}" for n, end in enumerate(self.ends) for line in said_of(end)]
        return "\n".join([f"{head} {self.seconds:5.1f} s {self.wrong}", *said])


_USUAL = (
    *("recipe ", "model ", "data ", "precision", "output ", "loading ", "reading ", "training: ", "  "),
    *("steps ", "step ", "saved ", "saving ", "attention ", "memory", "note: ", "collectives", "/"),
    *(
        "export",
        "done ",
        "files ",
        "next",
        "continuing",
        "first",
        "held-out",
        "looking ",
        "copying ",
        "fetching ",
    ),
)


def said_of(end: End) -> list[str]:
    """What a user reads of a failure: everything but the lines of a run that goes on."""
    return [line for line in end.output.splitlines() if line.strip() and not line.startswith(_USUAL)]


class Bench:
    """Inputs of tiny runs, and the faults that are tried on them."""

    def __init__(self, folder: Path) -> None:
        from tests.helpers import tiny_recipe

        self.folder = folder
        self.checkpoint = folder / "tiny"
        cold.run(
            *cold.LPTUNE, "new-checkpoint", "llama3_2/tiny", str(self.checkpoint), folder=folder
        ).check_returncode()
        self.rows = tiny_recipe.write_rows(folder / "rows.jsonl", 32)
        self.config = tiny_recipe.write_config(
            folder / "tiny.yaml",
            self.checkpoint,
            folder / "out",
            data={"source": str(self.rows), "seq_len": 128, "packing": False},
            micro_batch_size=1,
            global_batch_size=12,  # for one rank, two and three
            num_steps=6,
            checkpoint={"every_steps": 2, "keep_last": 9},
        )
        self.num = 0

    def command(self, num_hosts: int, *overrides: str, flags: Sequence[str] = ()) -> list[str]:
        """`lptune run` on so many hosts, with an output_dir that no other run has."""
        own = [each for each in overrides if each.startswith("output_dir=")]
        out = own or [f"output_dir={self.folder / f'out-{self.num}'}"]
        given = [] if any(flag.startswith("--nnodes") for flag in flags) else [f"--nnodes={num_hosts}"]
        given += flags
        if not any(flag.startswith("--rdzv-endpoint") for flag in flags):
            given.append(f"--rdzv-endpoint=host-0:{PORT}")
        rest = [each for each in overrides if each not in own]
        run = ["run", *given, "full_finetune", "--config", str(self.config), *out, *rest]
        return cold.command(*cold.LPTUNE, *run)

    def fresh(self) -> Path:
        """A new output_dir for the commands to come."""
        self.num += 1
        return self.folder / f"out-{self.num}"

    def losses(self, output_dir: Path) -> list[float]:
        """By step."""
        import json

        lines = (output_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


def wait_for(network: Network, process: "subprocess.Popen[bytes]", text: str, timeout_s: float = 90) -> None:
    """Until `process` has printed `text`."""
    deadline_s = time.monotonic() + timeout_s
    while text not in network.output(process):
        if time.monotonic() > deadline_s or process.poll() is not None:
            raise TimeoutError(f"no {text!r} in {network.output(process)}")
        time.sleep(0.05)


def finish(
    network: Network, fault: str, wanted: str, *processes: "subprocess.Popen[bytes]", but: int = 0
) -> Row:
    """Waits for all ends, and counts the seconds from now."""
    started_s = time.monotonic()
    ends = network.wait(*processes)
    while (left := network.left_over(but=but)) and time.monotonic() - started_s < 90:
        time.sleep(0.1)
    return Row(fault, len(processes), wanted, ends, time.monotonic() - started_s, len(left))


def children_of(pid: int) -> list[int]:
    """Process ids of the children of a process: of a launcher, its ranks."""
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()]


LONG = ("num_steps=4000", "checkpoint.every_steps=4000", "export.enabled=false")


@contextmanager
def training(bench: Bench, network: Network, num_hosts: int) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """A long run on so many hosts, which trains."""
    bench.fresh()
    command = bench.command(num_hosts, *LONG)
    launchers = [network.start(host, command, folder=bench.folder) for host in range(num_hosts)]
    wait_for(network, launchers[0], "step 3/")
    yield launchers


def by_the_book(bench: Bench, network: Network, num_hosts: int) -> Iterator[Row]:
    """Without a fault: the losses of one host."""
    alone = bench.fresh()
    one = network.start(0, bench.command(1, flags=["--nproc-per-node", str(num_hosts)]), folder=bench.folder)
    network.wait(one)
    out = bench.fresh()
    launchers = [network.start(n, bench.command(num_hosts), folder=bench.folder) for n in range(num_hosts)]
    row = finish(network, "none, beside one host with as many ranks", " ".join("0" * num_hosts), *launchers)
    same = bench.losses(out) == bench.losses(alone)
    yield row._replace(wrong="" if same else "other losses than one host")


def killed(bench: Bench, network: Network, num_hosts: int) -> Iterator[Row]:
    """A rank, a launcher, on each host."""
    for host in {0, num_hosts - 1}:
        with training(bench, network, num_hosts) as launchers:
            os.kill(children_of(launchers[host].pid)[0], signal.SIGKILL)
            wanted = " ".join(["137"] * num_hosts)
            yield finish(network, f"a rank of host-{host} is killed", wanted, *launchers)
        with training(bench, network, num_hosts) as launchers:
            os.kill(launchers[host].pid, signal.SIGKILL)
            wanted = " ".join("-9" if n == host else "1" for n in range(num_hosts))
            yield finish(network, f"the launcher of host-{host} is killed", wanted, *launchers)


def cut_off(bench: Bench, network: Network, num_hosts: int) -> Iterator[Row]:
    """A cable is pulled out."""
    for host in {0, num_hosts - 1}:
        with training(bench, network, num_hosts) as launchers:
            network.cut(host)
            yield finish(network, f"the link of host-{host} goes down", " ".join("1" * num_hosts), *launchers)
        network.cut(host, again=True)


def late(bench: Bench, network: Network, num_hosts: int) -> Iterator[Row]:
    """Launchers that start apart, never, or twice."""
    fine = " ".join("0" * num_hosts)
    for first, second in ((0, num_hosts - 1), (num_hosts - 1, 0)):
        bench.fresh()
        command = bench.command(num_hosts)
        early = {n: network.start(n, command, folder=bench.folder) for n in range(num_hosts) if n != second}
        time.sleep(18)
        last = network.start(second, command, folder=bench.folder)
        processes = [early.get(n, last) for n in range(num_hosts)]
        row = finish(network, f"host-{second} starts 18 s late", fine, *processes)
        hint = "waiting for the other machines" in row.ends[first].output
        yield row._replace(wrong="" if hint else "no line while it waited")
    for absent in (0, num_hosts - 1):
        bench.fresh()
        command = bench.command(num_hosts, flags=["--rdzv-conf", "join_timeout=20"])
        there = [network.start(n, command, folder=bench.folder) for n in range(num_hosts) if n != absent]
        fault = f"host-{absent} never comes (join_timeout=20)"
        yield finish(network, fault, " ".join("1" for _ in there), *there)
    bench.fresh()
    command = bench.command(num_hosts)
    gone = network.start(1, command, folder=bench.folder)
    host = network.start(0, command, folder=bench.folder)
    time.sleep(6)
    if num_hosts > 2:
        os.kill(gone.pid, signal.SIGKILL)
        rest = [network.start(n, command, folder=bench.folder) for n in range(1, num_hosts)]
        yield finish(network, "host-1's launcher dies while it waits, another comes", fine, host, *rest)
    else:
        network.wait(gone, host)


def names(bench: Bench, network: Network, num_hosts: int) -> Iterator[Row]:
    """Endpoints that are wrong on one host or on all."""

    def tried(
        fault: str, endpoint: str, wanted: str, *, hosts: str | None = None, other: str = "", but: int = 0
    ) -> Row:
        bench.fresh()
        flags = ["--rdzv-conf", "join_timeout=20"]
        here = bench.command(num_hosts, flags=[*flags, f"--rdzv-endpoint={endpoint}"])
        there = bench.command(num_hosts, flags=[*flags, f"--rdzv-endpoint={other or endpoint}"])
        processes = [network.start(0, here, folder=bench.folder, hosts=hosts)]
        processes += [network.start(n, there, folder=bench.folder) for n in range(1, num_hosts)]
        return finish(network, fault, wanted, *processes, but=but)

    ones, twos = " ".join("1" * num_hosts), " ".join("2" * num_hosts)
    yield tried("the endpoint's name does not resolve", f"host-9:{PORT}", ones)
    yield tried("the endpoint is no host's", f"10.77.0.99:{PORT}", ones)
    yield tried("no route to the endpoint", f"192.0.2.1:{PORT}", twos)
    yield tried("host-1 has another endpoint", f"host-0:{PORT}", ones, other=f"host-0:{PORT + 1}")
    own = network.hosts_file.replace(f"{address(0)} host-0", "127.0.1.1 host-0")
    refused = " ".join("2" + "1" * (num_hosts - 1))  # the others wait for it
    yield tried("host-0 calls itself 127.0.1.1", f"host-0:{PORT}", refused, hosts=own)
    yield tried("an address as the endpoint", f"{address(0)}:{PORT}", " ".join("0" * num_hosts), hosts=own)
    program = network.start(0, cold.command("-c", _SILENT), folder=bench.folder)
    while not network.listening(0):
        time.sleep(0.1)
    yield tried("another program has the port, and is silent", f"host-0:{PORT}", ones, but=program.pid)
    program.kill()
    for number, flags in (
        ("both are machine 0", ["--node-rank=0"]),
        ("both are machine 1", ["--node-rank=1"]),
    ):
        bench.fresh()
        command = bench.command(num_hosts, flags=[*flags, "--rdzv-conf", "join_timeout=20"])
        processes = [network.start(n, command, folder=bench.folder) for n in range(num_hosts)]
        yield finish(network, number, ones, *processes)


_SILENT = "import socket, time; s = socket.socket(); s.setsockopt(1, 2, 1); s.bind(('', 29500)); s.listen()"
_SILENT += "; time.sleep(100)"


def two_jobs(bench: Bench, network: Network, num_hosts: int) -> Iterator[Row]:
    """Two jobs on one endpoint: the second is told so, the first is not disturbed."""
    with training(bench, network, num_hosts) as launchers:
        bench.fresh()
        command = bench.command(num_hosts, flags=["--rdzv-conf", "join_timeout=20"])
        others = [network.start(n, command, folder=bench.folder) for n in range(num_hosts)]
        ends = network.wait(*others)
        is_undisturbed = all(launcher.poll() is None for launcher in launchers)
        launchers[0].send_signal(signal.SIGTERM)
        row = finish(network, "a second job on the endpoint", " ".join(["1"] * num_hosts), *launchers)
        stopped = all(end.code == 143 for end in row.ends)
        wrong = "" if is_undisturbed and stopped else f"the first job: {[end.code for end in row.ends]}"
        yield row._replace(ends=ends, wrong=wrong)


CHANGES = ("optimizer.lr=2e-3", "precision.kind=int8_rowcol", "num_steps=4", "parallel.tensor=2")


def changes(bench: Bench, network: Network, num_hosts: int) -> Iterator[Row]:
    """Another value of a key on the last host."""
    for change in CHANGES:
        bench.fresh()
        flags = ["--rdzv-conf", "join_timeout=40"]
        commands = [bench.command(num_hosts, flags=flags)] * (num_hosts - 1)
        commands.append(bench.command(num_hosts, change, flags=flags))
        processes = [network.start(n, each, folder=bench.folder) for n, each in enumerate(commands)]
        row = finish(network, f"{change} on host-{num_hosts - 1}", " ".join("2" * num_hosts), *processes)
        key = change.partition("=")[0]
        named = all(key in line for end in row.ends for line in end.errors)
        yield row._replace(wrong="" if named else "the key is not named")


def files(bench: Bench, network: Network, num_hosts: int) -> Iterator[Row]:
    """Other rows, another model, a local folder, a full disk."""
    rows = bench.folder / "other.jsonl"
    rows.write_text(bench.rows.read_text(encoding="utf-8").replace("a", "e"), encoding="utf-8")
    other = bench.folder / "other"
    if not other.exists():
        shutil.copytree(bench.checkpoint, other)
        weights = other / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-2] ^= 1
        weights.write_bytes(content)
    twos = " ".join("2" * num_hosts)
    for what, change in (("other rows", f"data.source={rows}"), ("another model", f"model.path={other}")):
        bench.fresh()
        commands = [bench.command(num_hosts)] * (num_hosts - 1) + [bench.command(num_hosts, change)]
        processes = [network.start(n, each, folder=bench.folder) for n, each in enumerate(commands)]
        yield finish(network, f"{what} on host-{num_hosts - 1}", twos, *processes)
    for host in (0, num_hosts - 1):
        out = bench.fresh()
        out.parent.mkdir(exist_ok=True)
        place = bench.folder / f"disk-{out.name}"
        place.mkdir()
        command = bench.command(num_hosts, f"output_dir={place}/run")
        processes = [
            network.start(n, command, folder=bench.folder, own=place if n == host else None)
            for n in range(num_hosts)
        ]
        yield finish(network, f"output_dir is local to host-{host}", twos, *processes)
    place = bench.folder / "small"
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)], check=True)
    try:
        command = bench.command(num_hosts, f"output_dir={place}/run")
        processes = [network.start(n, command, folder=bench.folder) for n in range(num_hosts)]
        yield finish(network, "the disk is full", twos, *processes)
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fewer(bench: Bench, network: Network, num_hosts: int) -> Iterator[Row]:
    """Killed, and resumed on one host."""
    # Another number of ranks adds in another order. At the config's rate of 3e-3 that grows 10-fold a step
    # for some steps, to 7e-4 of the loss; at 1e-4 it stays at 2e-7.
    keys = ("num_steps=60", "checkpoint.every_steps=20", "optimizer.lr=1e-4")
    undisturbed = bench.fresh()
    network.wait(network.start(0, bench.command(1, *keys), folder=bench.folder))
    out = bench.fresh()
    command = bench.command(num_hosts, *keys)
    launchers = [network.start(n, command, folder=bench.folder) for n in range(num_hosts)]
    wait_for(network, launchers[0], "step 40/")
    os.kill(launchers[-1].pid, signal.SIGKILL)
    network.wait(*launchers)
    again = network.start(0, bench.command(1, *keys), folder=bench.folder)
    row = finish(network, f"of {num_hosts} hosts one dies, one goes on alone", "0", again)
    pairs = zip(bench.losses(out), bench.losses(undisturbed), strict=True)
    apart = max(abs(a - b) / b for a, b in pairs)
    yield row._replace(num_hosts=num_hosts, wrong="" if apart < 1e-6 else f"losses {apart:.1e} apart")


def restarted(bench: Bench, network: Network, num_hosts: int) -> Iterator[Row]:
    """Launches that --restarts starts again: the losses are those of a run that nothing disturbed."""
    keys = ("num_steps=60", "checkpoint.every_steps=10", "optimizer.lr=1e-4")

    def started(*flags: str) -> list["subprocess.Popen[bytes]"]:
        command = bench.command(num_hosts, *keys, flags=flags)
        return [network.start(n, command, folder=bench.folder) for n in range(num_hosts)]

    undisturbed = bench.fresh()
    network.wait(*started())
    fine, last = " ".join("0" * num_hosts), num_hosts - 1

    def row_of(
        fault: str, out: Path, supervisors: list["subprocess.Popen[bytes]"], wanted: str = fine
    ) -> Row:
        row = finish(network, fault, wanted, *supervisors)
        pairs = zip(bench.losses(out), bench.losses(undisturbed), strict=True)
        apart = max(abs(a - b) / b for a, b in pairs)
        # Another number of ranks adds in another order (`fewer`).
        return row._replace(
            wrong="" if apart <= (0 if wanted == fine else 1e-6) else f"losses {apart:.1e} apart"
        )

    for what, host in (("a rank", last), ("the launcher", 0)):
        out, supervisors = bench.fresh(), started("--restarts=2")
        wait_for(network, supervisors[0], "step 30/")
        (launcher,) = children_of(supervisors[host].pid)
        os.kill(launcher if host == 0 else children_of(launcher)[0], signal.SIGKILL)
        yield row_of(f"{what} of host-{host} is killed, --restarts", out, supervisors)
    out, supervisors = bench.fresh(), started("--restarts=2")
    wait_for(network, supervisors[0], "step 30/")
    network.cut(last)
    wait_for(network, supervisors[0], "restarts: ")
    network.cut(last, again=True)
    yield row_of("the link of the last host is down for a minute, --restarts", out, supervisors)
    out, supervisors = bench.fresh(), started("--restarts=2", "--hang-timeout=5")
    wait_for(network, supervisors[0], "step 30/")
    os.kill(children_of(*children_of(supervisors[last].pid))[0], signal.SIGSTOP)
    yield row_of(f"a rank of host-{last} hangs, --restarts", out, supervisors)
    flags = (f"--nnodes=1:{num_hosts}", "--restarts=2", "--rdzv-conf=last_call_timeout=5")
    out, supervisors = bench.fresh(), started(*flags)
    wait_for(network, supervisors[0], "step 30/")
    network.lose(last)
    yield row_of("the last host is lost, --restarts and --nnodes 1:N", out, supervisors, f"{fine[:-1]}-9")


def disks(bench: Bench, network: Network, num_hosts: int) -> Iterator[Row]:
    """Hosts with a disk each and an address that all reach: losses and export of a run on a shared disk."""
    keys = ("num_steps=40", "optimizer.lr=1e-4", "export.max_shard_gib=0.0002")
    place, last, hosts = bench.folder / "disk", num_hosts - 1, range(num_hosts)
    place.mkdir(exist_ok=True)
    undisturbed = bench.fresh()
    command = bench.command(num_hosts, *keys)
    network.wait(*(network.start(host, command, folder=bench.folder) for host in hosts))

    def disk(host: int) -> Path:
        return bench.folder / f"disk-{bench.num}-{host}"

    def copy() -> Path:
        return bench.folder / f"copy-{bench.num}"

    def start(host: int, every: int, size: int = num_hosts) -> "subprocess.Popen[bytes]":
        disk(host).mkdir(exist_ok=True)
        where = (f"output_dir={place}/run", f"checkpoint.copy_to=file://{copy()}")
        flags = ("--restarts=2",) if size == num_hosts else ()
        command = bench.command(size, *keys, *where, f"checkpoint.every_steps={every}", flags=flags)
        return network.start(host, command, folder=bench.folder, own=place, disk=disk(host))

    def lose(*lost: int) -> None:
        for host in lost:
            network.lose(host)
            network.cut(host, again=True)

    def row(fault: str, processes: list["subprocess.Popen[bytes]"], near: float = 0) -> Row:
        row = finish(network, fault, " ".join("0" * num_hosts), *processes)
        pairs = zip(bench.losses(disk(0) / "run"), bench.losses(undisturbed), strict=True)
        apart = max(abs(a - b) / b for a, b in pairs)
        wrong = "" if apart <= near else f"losses {apart:.1e} apart"
        sums = [(folder / "export/SHA256SUMS").read_text() for folder in (copy(), undisturbed)]
        return row._replace(wrong=wrong if near or sums[0] == sums[1] else f"{wrong} another export")

    bench.fresh()
    yield row("none, a disk each", [start(host, 10) for host in hosts])
    bench.fresh()
    for size, reached in ((num_hosts, 10), (1, 20)):
        launchers = [start(host, 5, size) for host in range(size)]
        wait_for(network, launchers[0], f"step {reached}/")
        lose(*range(size))
        network.wait(*launchers)
    again = [start(host, 5) for host in hosts]
    # Another number of ranks adds in another order (`fewer`).
    yield row(f"{num_hosts} hosts, then one, then {num_hosts}", again, near=1e-6)
    bench.fresh()
    supervisors = [start(host, 10) for host in hosts]
    wait_for(network, supervisors[0], "step 20/")
    lose(last)
    shutil.rmtree(disk(last))
    supervisors[last] = start(last, 10)
    yield row(f"host-{last} is lost with its disk, --restarts", supervisors)
    bench.fresh()
    launchers = [start(host, 10) for host in hosts]
    wait_for(network, launchers[0], "step 20/")
    lose(*hosts)
    network.wait(*launchers)
    shutil.rmtree(disk(0))
    yield row("all hosts are lost, and the disk of host-0", [start(host, 10) for host in hosts])
    for step in (8, 16, 24):
        bench.fresh()
        launchers = [start(host, 2) for host in hosts]
        there = copy() / f"checkpoints/step-{step:08d}"
        while not there.exists():
            time.sleep(0.001)
        lose(*hosts)
        network.wait(*launchers)
        sealed = ", just sealed" * (there / "manifest.json").exists()
        yield row(f"killed while step {step} is copied{sealed}", [start(host, 2) for host in hosts])


GROUPS: dict[str, Callable[[Bench, Network, int], Iterator[Row]]] = {
    group.__name__: group
    for group in (
        by_the_book,
        killed,
        cut_off,
        late,
        names,
        two_jobs,
        changes,
        files,
        fewer,
        restarted,
        disks,
    )
}


def main() -> int:
    """Tries all faults; the exit code is 1 if one ends in another way than it should."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--hosts", type=int, nargs="*", default=[2, 3])
    args = parser.parse_args()
    if why := missing():
        print(f"skipped: {why}")
        return 0
    num_wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        for num_hosts in args.hosts:
            for name in args.only:
                if name in ("changes",) and num_hosts != args.hosts[0]:
                    continue  # what two hosts compare, three do
                with Network(num_hosts) as network:
                    for row in GROUPS[name](bench, network, num_hosts):
                        print(row, flush=True)
                        num_wrong += not row.is_right
    print(f"{num_wrong} faults that end in another way than they should")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
