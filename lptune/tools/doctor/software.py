"""Probes that need no torch: versions, compilers, caches, environment variables."""

import getpass
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lptune.base.text import printable, size_text
from lptune.tools.doctor.host import size_of
from lptune.tools.doctor.line import NOTE, OK, PROBLEM, Line

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
    "LPTUNE_TRY": "alternatives that wait for a measurement",
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
        todo = "install lptune again: pip install lptune"
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
    """Where compiled code, models and tokenized rows are kept, and their sizes."""
    for name, folder in cache_folders().items():
        if not folder.is_dir():
            yield Line("software", name, OK, f"{folder}: not there yet")
            continue
        size, is_all = size_of(folder)
        yield Line("software", name, OK, f"{folder}: {'' if is_all else 'more than '}{size_text(size)}")


def cache_folders() -> dict[str, Path]:
    """Name -> folder of each cache, as the program that fills it chooses it."""
    variables, home = os.environ, Path.home()
    absolute = os.path.isabs(variables.get("XDG_CACHE_HOME", ""))
    base = Path(variables["XDG_CACHE_HOME"]) if absolute else home / ".cache"
    user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    inductor = variables.get("TORCHINDUCTOR_CACHE_DIR") or Path(
        tempfile.gettempdir(), f"torchinductor_{user}"
    )
    hub = variables.get("HF_HUB_CACHE") or Path(variables.get("HF_HOME") or base / "huggingface", "hub")
    return {
        "compiled code": Path(inductor),
        "Triton's cache": Path(variables.get("TRITON_CACHE_DIR") or home / ".triton" / "cache"),
        "hub's cache": Path(hub).expanduser(),
        "tokenized rows": base / "lptune" / "data",
        "all of lptune's": base / "lptune",
    }


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
