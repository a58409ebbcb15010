"""The launchers of many machines, without ranks: how they meet, and how fast all learn of a failure.

    python benchmarks/launchers.py [--machines 8 64 512]

Each machine is a thread that runs the launcher's rendezvous and exchange over the loopback device, machine 0
in a process of its own. So machines cost what they cost in a run, but all share the cores of this one:
seconds are an upper bound, and how they grow is what to look at. One row for each number of machines:

- meet: from the last machine's start until the last one has met the others;
- CPU: seconds of CPU of machine 0, which hosts the store, for each second in which nothing happens;
- failure: from the outcome that the last machine publishes until the last other one has read it;
- hang: from machine 0's question where the ranks stand until it has all answers (8 ranks a machine).
"""

import argparse
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.synchronize import Barrier as BarrierType

from lptune.config import DataConfig, FinetuneConfig, ModelConfig
from lptune.launch.exchange import Exchange
from lptune.launch.hangs import Stand
from lptune.launch.outcome import Outcome
from lptune.launch.rendezvous import LOOPBACK, MeetingPoint, meet, tell

_PER_PROCESS = 64
_QUIET_S = 5.0
_PATIENCE_S = 300.0
_STACK = "x" * 2000  # of a rank's Python frames


def main() -> None:
    """Prints one row for each number of machines."""
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as a launcher does (flags.quieten)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--machines", type=int, nargs="+", default=[8, 64, 512])
    print("machines   meet s   CPU   failure s   hang s", flush=True)
    for num_machines in parser.parse_args().machines:
        found = _measured(num_machines)
        print(
            f"{num_machines:8}  {found['meet']:7.2f}  {found['cpu']:4.2f}  {found['failure']:10.2f}"
            f"  {found['hang']:7.2f}",
            flush=True,
        )


def _measured(num_machines: int) -> dict[str, float]:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port = probe.getsockname()[1]
    starts = range(1, num_machines, _PER_PROCESS)
    parts = [range(1), *(range(start, min(start + _PER_PROCESS, num_machines)) for start in starts)]
    context = multiprocessing.get_context("spawn")
    found: dict[str, float] = {}
    with ProcessPoolExecutor(len(parts), context, _share, [context.Barrier(len(parts))]) as pool:
        for part in pool.map(_machines, parts, [num_machines] * len(parts), [port] * len(parts)):
            found |= {name: max(value, found.get(name, 0.0)) for name, value in part.items()}
    return found


def _share(barrier: BarrierType) -> None:
    global _barrier
    _barrier = barrier


def _step() -> float:
    """Waits for the other processes; returns the time."""
    _barrier.wait(_PATIENCE_S)
    return time.monotonic()


def _machines(part: Sequence[int], num_machines: int, port: int) -> dict[str, float]:
    """Plays the launchers of `part` of all machines, in threads; returns what this process has measured."""
    told = tell(FinetuneConfig(model=ModelConfig(path="a"), data=DataConfig(source="builtin")))
    exchanges: dict[int, Exchange] = {}

    def arrive(machine: int) -> None:
        point = MeetingPoint(LOOPBACK, port, machine, num_machines, "", "benchmark", 600.0, 30.0)
        exchanges[machine] = Exchange(meet(point, told))
        exchanges[machine].start()

    found, began_s = dict[str, float](), _step()
    threads = [threading.Thread(target=arrive, args=[machine]) for machine in part]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found["meet"] = time.monotonic() - began_s
    _step()
    computed_s = time.process_time()
    time.sleep(_QUIET_S)
    if 0 in part:
        found["cpu"] = (time.process_time() - computed_s) / _QUIET_S
    began_s = _step()
    last = num_machines - 1
    if last in part:
        exchanges[last].publish(Outcome(last, 1, time.time_ns(), "host", "a line", _STACK))
    waiting = set(part) - {last}
    while waiting:
        waiting -= {machine for machine in waiting if exchanges[machine].news()}
        time.sleep(0.02)
    found["failure"] = time.monotonic() - began_s
    began_s = _step()
    if 0 in part:
        exchanges[0].ask()
        while not exchanges[0].has_all_answers:
            time.sleep(0.02)
        found["hang"] = time.monotonic() - began_s
    waiting = set(part) - {0}
    while waiting:
        for machine in [machine for machine in waiting if exchanges[machine].is_asked]:
            ranks = range(8 * machine, 8 * machine + 8)
            exchanges[machine].answer([Stand(rank, "host", "somewhere", {"0": 1}, _STACK) for rank in ranks])
            waiting.remove(machine)
        time.sleep(0.02)
    _step()
    for machine, exchange in exchanges.items():
        if machine != 0:
            exchange.leave(failed=False)
    _step()
    if 0 in part:
        exchanges[0].leave(failed=False)
    return found


if __name__ == "__main__":
    main()
