"""Probes that need no torch: processor, memory, limits, disks; versions, compilers, caches, environment
variables.
"""

import getpass
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lptune.base import cores
from lptune.base.text import printable, size_text
from lptune.hardware.cpu import cpu_flags, cpuinfo
from lptune.hardware.host_memory import cgroup_limit
from lptune.tools.doctor.line import NOTE, OK, PROBLEM, Line

_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "9p", "glusterfs", "afs")
_FEATURES = {
    "amx_int8": "AMX INT8",
    "amx_bf16": "AMX bf16",
    "avx512_vnni": "AVX-512 VNNI",
    "avx_vnni": "AVX VNNI",
    "avx512_bf16": "AVX-512 bf16",
    "avx2": "AVX2",
}
_DISK = "memory and disk"


def cpu() -> Iterator[Line]:
    """The processor and what speeds up 8-bit and bfloat16 GEMMs on it."""
    found = [name for flag, name in _FEATURES.items() if flag in cpu_flags()]
    name = cpuinfo().get("model name", "unknown model")
    yield Line("processor", "cpu", OK, f"{name}, {cores.num_cores()} cores; {', '.join(found) or 'no AVX2'}")
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > cores.num_cores():
        text = f"OMP_NUM_THREADS={threads}, and this process may use {cores.num_cores()} cores"
        yield Line(
            "processor", "threads", NOTE, text, "unset OMP_NUM_THREADS, or set it to the cores of a rank"
        )
    if (quota := cores.cpu_quota()) is not None and quota < cores.num_cores():
        text = f"the cgroup allows the time of {quota:g} cores; torch starts {cores.num_cores()} threads"
        yield Line("processor", "cpu quota", NOTE, text, f"set OMP_NUM_THREADS={max(1, int(quota))}")


def memory() -> Iterator[Line]:
    """Host memory, and the limit of the cgroup if that is lower."""
    words = {line.split(":")[0]: line.split()[1] for line in Path("/proc/meminfo").read_text().splitlines()}
    total, free = int(words["MemTotal"]) * 1024, int(words["MemAvailable"]) * 1024
    text = f"{size_text(total)}, {size_text(free)} available"
    limit = cgroup_limit()
    if limit is not None and limit < total:
        text += f"; the cgroup allows {size_text(limit)}"
    status, todo = (NOTE, "close other programs") if free < 2e9 else (OK, "")
    yield Line(_DISK, "host memory", status, text, todo)


def limits() -> Iterator[Line]:
    """Open files and locked memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text, todo = f"ulimit -n: {_limit_text(soft)}", ""
    if soft != resource.RLIM_INFINITY and soft < 4096:
        most = 65536 if hard == resource.RLIM_INFINITY else min(65536, hard)
        todo = f"ulimit -n {most} before a run with many files or ranks"
        if most < 4096:
            todo = "let the administrator raise the limit: a run with many files or ranks needs more"
    yield Line(_DISK, "open files", NOTE if todo else OK, text, todo)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_low = locked != resource.RLIM_INFINITY and locked < 64 * 2**20
    matters = is_low and Path("/sys/class/infiniband").is_dir()  # what it is for: memory that the card reads
    todo = "ulimit -l unlimited: InfiniBand needs locked memory" if matters else ""
    text = f"ulimit -l: {_limit_text(locked, 1024)}{'' if locked == resource.RLIM_INFINITY else ' kB'}"
    yield Line(_DISK, "locked memory", NOTE if todo else OK, text, todo)


def _limit_text(value: int, unit: int = 1) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value // unit)


def disks() -> Iterator[Line]:
    """Free space and kind of the disks that a run writes to."""
    places = {"current folder": Path.cwd(), "temporary files": Path(tempfile.gettempdir())}
    wanted = os.environ.get("TMPDIR")
    if wanted and not os.access(wanted, os.W_OK):  # Python takes another folder then, and compilers fail
        yield Line(_DISK, "TMPDIR", PROBLEM, f"{wanted} cannot be written", "set TMPDIR to a local folder")
    for name, folder in places.items():
        yield _disk(name, folder)
    shm = Path("/dev/shm")
    if shm.is_dir():
        free = shutil.disk_usage(shm).free
        small = free < 1e9
        todo = "start the container with --shm-size=8g (NCCL's ranks talk through it)" if small else ""
        yield Line(_DISK, "/dev/shm", NOTE if small else OK, f"{size_text(free)} free", todo)


def _disk(name: str, folder: Path) -> Line:
    free, kind = shutil.disk_usage(folder).free, file_system(folder)
    text = f"{folder}: {size_text(free)} free, {kind}"
    if not os.access(folder, os.W_OK):
        return Line(_DISK, name, PROBLEM, f"{text}; it cannot be written", "choose another folder")
    if free < 1e9:
        return Line(_DISK, name, PROBLEM, text, "make room: a checkpoint has 12 bytes for each weight")
    if free < 20e9:
        return Line(_DISK, name, NOTE, text, "`lptune plan` tells how much a run writes")
    if kind.endswith("(network)"):
        return Line(
            _DISK, name, NOTE, text, "saves take longer; temporary files and caches belong on a local disk"
        )
    return Line(_DISK, name, OK, text)


def file_system(folder: Path) -> str:
    """Its kind: `ext4`, `nfs4 (network)`, `tmpfs (memory)`."""
    real = os.path.realpath(folder)
    kind, best = "unknown file system", -1
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            point = before.split()[4].encode().decode("unicode_escape")
            if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) > best:
                kind, best = after.split()[0], len(point)
    if kind in _NETWORK or kind.startswith("fuse"):
        return f"{kind} (network)"
    if kind in ("tmpfs", "ramfs"):
        return f"{kind} (memory)"
    return kind


_PACKAGES = (
    "torch", "triton", "numpy", "safetensors", "transformers", "tokenizers", "huggingface_hub", "omegaconf",
)  # fmt: skip
_EXTRAS = ("pyarrow", "datasets", "lm_eval", "torchao", "tensorboard", "wandb", "trackio")
_MATTERS = re.compile(
    r"(CUDA_|OMP_|MKL_|NCCL_|GLOO_|TORCH|PYTORCH_|TRITON_|HF_|LPTUNE_|CXX$|MALLOC_|GLIBC_TUNABLES|LD_PRELOAD"
    r"|XDG_CACHE_HOME|TMPDIR|RANK$|WORLD_SIZE|MASTER_|PET_|SLURM_JOB|NVIDIA_TF32_OVERRIDE)"
)
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_EFFECTS = {
    "LPTUNE_KERNELS": "one backend for all kernels: for debugging",
    "LPTUNE_AUTOTUNE": "0 takes untuned kernels",
    "CUDA_LAUNCH_BLOCKING": "1 makes every step slower",
    "NCCL_DEBUG": "prints much",
    "TORCH_COMPILE_DISABLE": "1 switches compilation off",
    "TORCHDYNAMO_DISABLE": "1 switches compilation off",
    "RANK": "this shell looks like a rank: lptune run would wait for others",
}
_SLOWS = ("LPTUNE_KERNELS", "CUDA_LAUNCH_BLOCKING", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE", "RANK")


def versions() -> Iterator[Line]:
    """Python, the system and the packages that a run uses."""
    yield Line("software", "system", OK, f"Python {platform.python_version()}, {platform.platform()}")
    found = {name: _version(name) for name in (*_PACKAGES, *_EXTRAS)}
    there = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    yield Line("software", "packages", OK, there)
    missing = [name for name in _PACKAGES if not found[name] and name != "triton"]
    if missing:
        todo = "install lptune again: `pip install .` in its source folder"
        yield Line("software", "missing", PROBLEM, ", ".join(missing), todo)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def compiler() -> Iterator[Line]:
    """The C++ compiler of torch.compile and of lptune's CPU kernels; ptxas of Triton."""
    command = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    path = shutil.which(command[0])
    if path is None:
        todo = (
            "install it (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++), or set CXX, or set "
            "compile=none: INT8 on a CPU is then several times slower"
        )
        yield Line("software", "C++ compiler", PROBLEM, f"{command[0]} is not on the PATH", todo)
    else:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=10)
        first = (done.stdout.splitlines() or [""])[0]
        yield Line("software", "C++ compiler", OK, printable(f"{path}: {first:.100}"))
    spec = importlib.util.find_spec("triton")
    if spec is not None and spec.origin:
        own = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"
        found = os.environ.get("TRITON_PTXAS_PATH") or (str(own) if own.exists() else shutil.which("ptxas"))
        text = found or "not found"
        todo = "" if found else "install Triton again: it brings ptxas"
        yield Line("software", "ptxas", OK if found else NOTE, text, todo)


def caches() -> Iterator[Line]:
    """Where compiled code, models and tokenized rows are kept, as the program that fills a cache chooses."""
    variables, home = os.environ, Path.home()
    absolute = os.path.isabs(variables.get("XDG_CACHE_HOME", ""))
    base = Path(variables["XDG_CACHE_HOME"]) if absolute else home / ".cache"
    user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    inductor = variables.get("TORCHINDUCTOR_CACHE_DIR") or Path(
        tempfile.gettempdir(), f"torchinductor_{user}"
    )
    hub = variables.get("HF_HUB_CACHE") or Path(variables.get("HF_HOME") or base / "huggingface", "hub")
    folders = {
        "compiled code": Path(inductor),
        "Triton's cache": Path(variables.get("TRITON_CACHE_DIR") or home / ".triton" / "cache"),
        "hub's cache": Path(hub).expanduser(),
        "tokenized rows": base / "lptune" / "data",
    }
    for name, folder in folders.items():
        yield Line("software", name, OK, f"{folder}{'' if folder.is_dir() else ': not there yet'}")


def environment() -> Iterator[Line]:
    """Variables that change what a run does, without secret values."""
    found = {name: value for name, value in sorted(os.environ.items()) if _MATTERS.match(name)}
    for name, value in found.items():
        is_secret = bool(_SECRET.search(name)) or "@" in value
        text = f"{name}={'(set, not shown)' if is_secret else printable(value)[:120]}"
        effect = _EFFECTS.get(name, "")
        slows = (
            name in _SLOWS and value not in ("", "0") and not (name == "RANK" and "WORLD_SIZE" not in found)
        )
        yield Line("environment", "variable", NOTE if slows else OK, text + (f": {effect}" if effect else ""))
    if not found:
        yield Line("environment", "variable", OK, "none that changes a run")
