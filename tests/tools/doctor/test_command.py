"""`lptune doctor`: what it finds on machines with and without GPUs, and that nothing makes it fail.

The machines with GPUs are fakes: torch.cuda answers as the device would.
"""

# ruff: noqa: E501  (messages are compared whole)

import json
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lptune.base import cores
from lptune.base.errors import UserError
from lptune.config import PRECISION_KINDS
from lptune.hardware import host_memory
from lptune.kernels import choose_backend
from lptune.tools.doctor import child, host, with_torch
from lptune.tools.doctor.line import NOTE, OK, PROBLEM, Line, examined
from tests.cli.conftest import Command
from tests.helpers import cold

FakeGpus = Callable[..., None]
H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeGpus]:
    """`gpus("NVIDIA L4", (8, 9), count=2)` makes this a machine with these GPUs, as far as torch tells."""

    def fake(
        name: str,
        capability: tuple[int, int],
        *,
        count: int = 1,
        gb: float = 85.0,
        free: float = 0.99,
        peers: bool = True,
    ) -> None:
        about = SimpleNamespace(
            name=name, major=capability[0], minor=capability[1], total_memory=int(gb * 1e9)
        )
        driver = tmp_path / "version"
        driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Tue Jan\n")
        monkeypatch.setattr(with_torch, "_DRIVER", driver)
        monkeypatch.setattr(with_torch, "_bf16_flops", lambda: 300e12)
        monkeypatch.setattr(torch.version, "cuda", "12.9")
        for attribute, value in {
            "is_available": lambda: True,
            "device_count": lambda: count,
            "get_device_name": lambda *_: name,
            "get_device_properties": lambda *_: about,
            "get_device_capability": lambda *_: capability,
            "mem_get_info": lambda *_: (int(free * gb * 1e9), int(gb * 1e9)),
            "can_device_access_peer": lambda *_: peers,
            "nccl": SimpleNamespace(version=lambda: (2, 27, 5)),
        }.items():
            monkeypatch.setattr(torch.cuda, attribute, value)
        choose_backend.cache_clear()

    choose_backend.cache_clear()
    yield fake
    monkeypatch.undo()
    choose_backend.cache_clear()


def lines(*, without: tuple[str, ...] = ("gloo", "compilation")) -> dict[str, Line]:
    """Name -> finding of the probes with torch, in this process."""
    probes = [(s, probe) for s, probe in with_torch.probes() if probe.__name__ not in without]
    return {line.name: line for section, probe in probes for line in examined(section, [probe])}


def test_a_machine_with_two_h100_runs_all_kinds_and_its_speed_is_compared(gpus: FakeGpus) -> None:
    gpus(H100, (9, 0), count=2)
    found = lines()
    assert found["torch"].text.endswith("CUDA 12.9, driver 570.86.15")
    for index in range(2):
        gpu = found[f"gpu {index}"]
        assert gpu.status == OK
        assert gpu.text == f"{H100}, 85.0 GB (84.2 GB free), compute capability 9.0, float8 GEMMs"
    assert found["topology"].text.startswith("2 of 2 pairs reach each other's memory")
    assert found["NCCL"].text == "2.27.5"
    assert found["none"].text == "bf16 everywhere"
    assert found["nvfp4"].text.startswith("emulated")  # Hopper has no 4-bit GEMM
    for kind in set(PRECISION_KINDS) - {"none", "int8_weight_only", "int4_weight", "nvfp4"}:
        assert re.fullmatch("native, by (lptune's Triton kernels|torch)", found[kind].text), kind
    assert "others" not in found
    slow = found["bf16 GEMM"]
    assert (slow.status, slow.text) == (NOTE, "300 TFLOP/s, 30% of the published peak")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the lines of a machine without a GPU")
def test_a_machine_without_a_gpu_has_int8_and_gloo_works() -> None:
    choose_backend.cache_clear()
    found = lines(without=("compilation",))
    assert found["gloo"].status == OK
    assert found["gpu"].text.startswith("none")
    assert found["none"].text.startswith("bf16 everywhere")
    assert found["int8_tensorwise"].text.startswith("native, by ")
    assert found["mxfp8"].text.startswith("emulated")
    assert not torch.distributed.is_initialized()


def test_a_failing_probe_is_a_finding_and_the_others_run() -> None:
    def broken() -> Iterator[Line]:
        yield Line("s", "first", OK, "x")
        raise RuntimeError("CUDA error: unknown\nsecond line \x1b[31m")

    def refused() -> Iterator[Line]:
        raise UserError("LPTUNE_KERNELS='x': must be one of y")

    found = list(examined("s", [broken, refused, lambda: [Line("s", "last", OK, "x")]]))
    assert [(line.name, line.status) for line in found] == [
        ("first", OK),
        ("broken", NOTE),
        ("refused", PROBLEM),
        ("last", OK),
    ]
    assert found[1].text == "could not be looked at: RuntimeError: CUDA error: unknown"


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("import os, signal; print('{\"begin\": \"gpus\"}', flush=True); os.kill(os.getpid(), signal.SIGSEGV)", "the process ended with signal 11 in the probe: gpus"),
        ("import sys; print('{\"begin\": \"importing torch\"}'); sys.exit('ImportError: libcudart.so.12')", "the process ended with exit code 1 in the probe: importing torch"),
        ("print('{\"begin\": \"gloo\"}', flush=True); import time; time.sleep(60)", "nothing came back for 2 s in the probe: gloo"),
        ("print('{\"line\": [\"s\", \"n\", \"ok\", \"t\", \"\"]}'); print('garbage {'); print('{\"beg', end='')", "the process ended with exit code 0 in the probe: starting Python"),
    ],
)  # fmt: skip
def test_a_child_that_dies_hangs_or_babbles_is_one_problem(program: str, text: str) -> None:
    timeout_s = 2 if "sleep" in program else 60
    found = list(child.lines(timeout_s=timeout_s, command=cold.command("-c", program)))
    assert found[-1][2:4] == (PROBLEM, text)
    assert found[-1].todo == ("ImportError: libcudart.so.12" if "libcudart" in program else "")
    assert [line.name for line in found[:-1]] == (["n"] if "garbage" in program else [])


OF_CHILD = (
    Line("GPUs", "gpu", OK, "none"),
    Line("kinds", "a kind with a name of its own", NOTE, "w" * 200, "do " * 60),
)


def test_the_report_fits_80_columns_and_ends_with_counts(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "lines", lambda: OF_CHILD)
    monkeypatch.setenv("COLUMNS", "80")
    code, stdout, stderr = command("doctor")
    assert (code, stderr) == (0, "")
    assert max(map(len, stdout.splitlines())) <= 80
    bad = Line("GPUs", "gpu", PROBLEM, "bad", "do")
    monkeypatch.setattr(child, "lines", lambda: (*OF_CHILD, bad))
    document = json.loads(command("doctor", "--json")[1])
    assert bad._asdict() in document["lines"]
    assert document["num_problems"] == sum(line["status"] == PROBLEM for line in document["lines"])
    assert command("doctor", "--strict")[0] == 2
    sections = re.findall(r"^([a-zA-Z][a-zA-Z ]+)$", stdout, re.MULTILINE)
    assert sections[:6] == ["processor", "memory and disk", "software", "environment", "GPUs", "kinds"]
    assert re.search(r"^\d+ problems? and \d+ notes? in \d+ s$", stdout, re.MULTILINE)


def test_secrets_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "HF_TOKEN": "hf_abc",
        "HF_ENDPOINT": "https://user:pw@host",
        "NCCL_DEBUG": "INFO",
        "LPTUNE_KERNELS": "reference",
        "OMP_NUM_THREADS": "3",
        "UNRELATED": "quiet",
    }.items():
        monkeypatch.setenv(name, value)
    found = list(host.environment())
    text = "\n".join(line.text for line in found)
    assert not re.search("hf_abc|pw@|quiet", text)
    assert "HF_TOKEN=(set, not shown)" in text
    assert "OMP_NUM_THREADS=3" in text
    (kernels,) = [line for line in found if "LPTUNE_KERNELS" in line.text]
    assert kernels.status == NOTE


def test_full_disks_small_shared_memory_and_quotas_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usage: Any = SimpleNamespace(free=64 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    found = {line.name: line for line in host.disks()}
    assert found["current folder"].status == PROBLEM
    assert "--shm-size" in found["/dev/shm"].todo
    usage.free = 5 * 10**9
    assert {line.name: line.status for line in host.disks()}["current folder"] == NOTE
    monkeypatch.setattr(cores, "CGROUP", tmp_path)
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text("1000000000\n")
    assert (cores.cpu_quota(), host_memory.cgroup_limit()) == (0.5, 10**9)
    assert host_memory.available_bytes() == 10**9
    assert "the cgroup allows 1.0 GB" in next(iter(host.memory())).text
    (quota,) = [line for line in host.cpu() if line.name == "cpu quota"]
    assert quota.todo == "set OMP_NUM_THREADS=1"
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert (cores.cpu_quota(), host_memory.cgroup_limit()) == (None, None)


def test_a_missing_compiler_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    (found,) = [line for line in host.compiler() if line.name == "C++ compiler"]
    assert (found.status, "compile=none" in found.todo) == (PROBLEM, True)


def test_limits_and_a_closed_tmpdir_say_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    infinite = resource.RLIM_INFINITY
    for (soft, hard), todo in {
        (1024, infinite): "ulimit -n 65536",
        (1024, 8192): "ulimit -n 8192",
        (64, 64): "administrator",
        (65536, 65536): "",
    }.items():
        monkeypatch.setattr(resource, "getrlimit", lambda _, found=(soft, hard): found)
        first = next(iter(host.limits()))
        assert (first.status == OK, todo in first.todo) == (not todo, True)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    found = {line.name: line for line in host.disks()}
    assert (found["TMPDIR"].status, "cannot be written" in found["TMPDIR"].text) == (PROBLEM, True)


@pytest.mark.slow
def test_the_whole_report_on_this_machine(tmp_path: Path) -> None:
    done = cold.run("-m", "lptune", "doctor", "--json", folder=tmp_path)
    document = json.loads(done.stdout)
    found = {line["name"]: line for line in document["lines"]}
    assert document["num_problems"] == 0, [line for line in document["lines"] if line["status"] == PROBLEM]
    assert found["torch.compile"]["status"] == OK


def test_a_driver_without_a_gpu_for_torch_is_a_problem_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "version").write_text("NVRM version: 570.86.15\n")
    monkeypatch.setattr(with_torch, "_DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (found,) = with_torch.gpus()
    assert (found.status, "a build for CPUs" in found.text) == (PROBLEM, True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (found,) = with_torch.gpus()
    assert found.todo == "unset CUDA_VISIBLE_DEVICES"


def test_file_systems_have_the_class_of_their_mount(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mounts = (
        "20 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        f"21 20 0:40 / {tmp_path}/share\\040d rw - nfs4 host:/x rw\n"
        f"22 20 0:41 / {tmp_path}/ram rw - tmpfs tmpfs rw\n"
    )
    before = Path.read_text

    def fake(self: Path, *args: Any, **options: Any) -> str:
        return mounts if str(self) == "/proc/self/mountinfo" else before(self, *args, **options)

    monkeypatch.setattr(Path, "read_text", fake)
    for name in ("share d", "ram", "rammer"):
        (tmp_path / name).mkdir()
    assert host.file_system(tmp_path / "share d") == "nfs4 (network)"
    assert host.file_system(tmp_path / "ram") == "tmpfs (memory)"
    assert host.file_system(tmp_path / "rammer").startswith("ext4")


def test_a_compiler_that_fails_or_computes_wrong_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"):
        monkeypatch.setenv(name, "as before")  # the probe sets them, for its own process

    def fails(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CppCompileError: C++ compile error\nand much more")

    for function, text in (
        (fails, "does not work by .*: RuntimeError: CppCompileError: C.. compile error"),
        (lambda x: x.sum(), "a compiled sum is 2016.0, and must be 4096"),
        (lambda x: (2 * x + 1).sum(), "works by .* s for a small function, imports included"),
    ):
        monkeypatch.setattr(torch, "compile", lambda _, found=function: found)
        (line,) = with_torch.compilation()
        assert re.fullmatch(text, line.text)
        assert line.status == (OK if "works by" in text and "not" not in text else PROBLEM)


A100 = ("NVIDIA A100-SXM4-80GB", (8, 0))


@pytest.mark.parametrize(
    ("gpu", "options", "name", "status", "said"),
    [
        (A100, {}, "gpu 0", OK, "no float8 GEMMs (Ada and newer have them)"),
        (A100, {}, "int8_tensorwise", OK, "native, by lptune's Triton kernels"),
        (A100, {}, "bf16 GEMM", OK, "300 TFLOP/s, 96% of the published peak"),
        (A100, {}, "others", NOTE, "precision.emulate=true"),
        (("Tesla T4", (7, 5)), {"gb": 15}, "gpu 0", PROBLEM, "Ampere"),
        ((H100, (9, 0)), {"free": 0.3}, "gpu 0", NOTE, "nvidia-smi"),
        ((f"{H100} MIG 1g.10gb", (9, 0)), {"gb": 10}, "gpu 0", NOTE, "peaks are not known"),
        (("NVIDIA GeForce RTX 4090", (8, 9)), {"count": 2, "peers": False}, "topology", NOTE, "0 of 2 pairs"),
    ],
)
def test_what_a_gpu_cannot_do_is_said_with_what_to_do(
    gpus: FakeGpus, gpu: tuple[str, tuple[int, int]], options: Any, name: str, status: str, said: str
) -> None:
    gpus(*gpu, **options)
    found = lines()
    assert (found[name].status, said in f"{found[name].text} {found[name].todo}") == (status, True)
    if name == "others":
        assert all(k in found[name].text for k, keys in PRECISION_KINDS.items() if keys.needs_float8)
