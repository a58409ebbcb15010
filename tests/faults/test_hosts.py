"""Several hosts, as network namespaces (hosts.py), and an attacker who reaches every port of a run.

`make faults` tries all faults between hosts (host_faults.py). Here stand those that cost most: a command that
differs, and code that somebody else brings.
"""

import time
from pathlib import Path

import pytest

from tests.faults.host_faults import Bench, finish, wait_for
from tests.faults.hosts import Network, address, missing
from tests.helpers import cold
from tests.helpers.cold import ROOT

# In every Python process of a run, before any other code: notes classes that unpickling looks up.
AUDIT = """
import os, sys
def hook(event, args):
    if event == "pickle.find_class":
        with open(os.environ["NOTED"], "a") as file:
            file.write(f"{args[0]}.{args[1]}\\n")
sys.addaudithook(hook)
"""

# Writes a pickle that makes a file into every key of every store, and to every port, and rubbish after it.
ATTACK = """
import base64, os, pickle, socket, sys, threading
from datetime import timedelta

os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
import torch.distributed as dist

class Evil:
    def __reduce__(self):
        return (open, (sys.argv[1], "w"))

payload = pickle.dumps(Evil())

def poison(host, port):
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=5))
    listed = store.list_keys() if hasattr(store, "list_keys") else []
    # torchrun's own rendezvous takes a pickle in base64, under a key of its id.
    for key in {"torch.rendezvous.known", *listed, *KEYS}:
        store.set(key, base64.b64encode(payload) if "torch.rendezvous" in key else payload)
    print("poisoned", host, port, flush=True)

KEYS = [f"lptune/{name}" for name in sys.argv[2].split(",")]
for where in sys.argv[3:]:
    host, _, port = where.rpartition(":")
    thread = threading.Thread(target=poison, args=(host, int(port)), daemon=True)
    thread.start()
    thread.join(3)
    try:
        with socket.create_connection((host, int(port)), timeout=1) as connection:
            connection.sendall(payload + bytes(range(256)) * 64)
    except OSError:
        pass
os._exit(0)
"""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    if why := missing():
        pytest.skip(why)
    return Bench(tmp_path_factory.mktemp("hosts"))


@pytest.mark.slow  # two launchers of one host: cli/test_multi_node.py
def test_a_command_that_differs_on_one_host_is_one_line_on_both(bench: Bench) -> None:
    out = bench.fresh()
    commands = [bench.command(2), bench.command(2, "optimizer.lr=2e-3")]
    with Network(2) as network:
        row = finish(
            network,
            "lr",
            "2 2",
            *(network.start(n, each, folder=bench.folder) for n, each in enumerate(commands)),
        )
    assert [end.code for end in row.ends] == [2, 2]
    line = "run: optimizer.lr: 0.003 on host-0, 0.002 on host-1; give all machines the same command"
    assert all(line in end.output for end in row.ends)
    assert not out.exists()


@pytest.mark.slow  # 30 s; `make faults` runs it, too
@pytest.mark.parametrize("num_hosts", [1, 2])
def test_who_reaches_every_port_of_a_run_executes_nothing(
    bench: Bench, tmp_path: Path, num_hosts: int
) -> None:
    (tmp_path / "sitecustomize.py").write_text(AUDIT)
    (tmp_path / "attack.py").write_text(ATTACK)
    noted, made = tmp_path / "noted", tmp_path / "made"
    bench.fresh()
    flags = ["--nproc-per-node=2"] if num_hosts == 1 else []
    keys = ("num_steps=4000", "checkpoint.every_steps=4000", "compile=none")
    command = bench.command(num_hosts, *keys, flags=[*flags, "--rdzv-id=known"])
    with Network(2) as network:
        launchers = [
            network.start(n, command, folder=bench.folder, PYTHONPATH=f"{tmp_path}:{ROOT}", NOTED=str(noted))
            for n in range(num_hosts)
        ]
        wait_for(network, launchers[0], "step 3/")
        attackers = []
        for host in range(num_hosts):
            ports = network.listening(host)
            assert ports, "a run of several ranks listens"
            open_to = {where for where, _ in ports}
            guessed = ",".join(
                f"known/{key}"
                for key in ("came/1", "start", "exchange/outcomes", "exchange/outcome/1", "exchange/beat/1",
                            "torchrun/torchelastic/role_info/0", "torchrun/torchelastic/assigned_ranks/0")
            )  # fmt: skip
            here = address(host) if num_hosts > 1 else "127.0.0.1"  # on one machine, by another user of it
            targets = [f"{here if 'any' in where else where}:{port}" for where, port in ports]
            attack = cold.command(str(tmp_path / "attack.py"), str(made), guessed, *targets)
            from_host = host if num_hosts == 1 else 1 - host
            attackers.append(network.start(from_host, attack, folder=tmp_path))
        network.wait(*attackers, timeout_s=60)
        assert any("poisoned" in network.output(attacker) for attacker in attackers)
        time.sleep(6)  # torchrun's own rendezvous would unpickle every 5 s
        for launcher in launchers:
            launcher.terminate()
        network.wait(*launchers, timeout_s=100)
    assert not made.exists(), "code of the attacker was executed"
    assert open_to == {address(1) if num_hosts > 1 else "127.0.0.1"}
    assert not noted.exists(), noted.read_text()
