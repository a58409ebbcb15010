"""Which INT8 GEMM a CPU runs, and what is said of bfloat16: by instruction sets, and by a timing."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lptune.kernels import choose_backend, cpu_gemms, emulated_bfloat16, native
from tests.helpers import cold

CPU = torch.device("cpu")
Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    """Stands for a processor: its flags, its own GEMM's instruction set, and how long GEMMs take."""
    functions = (cpu_gemms.fastest_int8_gemm, cpu_gemms.bfloat16_slowdown, cpu_gemms.gemm_seconds)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("LPTUNE_KERNELS", raising=False)
    for limit in cpu_gemms.LIMITS:
        monkeypatch.delenv(limit, raising=False)

    def make(flags: str, instruction_set: str, **seconds: float) -> None:
        for cached in (*functions, choose_backend):
            cached.cache_clear()
        monkeypatch.setattr(cpu_gemms, "cpu_flags", lambda: frozenset(flags.split()))
        monkeypatch.setattr(native, "instruction_set", lambda: instruction_set)
        matmuls = {"float32 matmul": 1.0, "bfloat16 matmul": seconds.pop("bfloat16", 1.0)}
        monkeypatch.setattr(cpu_gemms, "time_gemms", lambda num_threads: seconds | matmuls)

    yield make
    for cached in (*functions, choose_backend):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("flags", "instruction_set", "seconds", "chosen"),
    [
        ("avx2 avx512_vnni amx_int8", "amx", {"native": 9.0, "float32": 1.0}, "native"),  # not timed
        ("avx2 avx512_vnni", "avx512_vnni", {"native": 1.0, "torch": 1.1, "float32": 9.0}, "native"),
        ("avx2 avx512_vnni", "avx512_vnni", {"native": 1.1, "torch": 1.0, "float32": 9.0}, "torch"),
        ("avx2", "avx2", {"native": 1.0, "float32": 2.0}, "native"),
        ("avx2", "avx2", {"native": 1.0, "float32": 0.8}, "float32"),  # one port multiplies integers
        ("avx2", "", {"float32": 1.0}, "float32"),  # no compiler
        ("asimddp i8mm", "", {"torch": 1.0, "float32": 2.0}, "torch"),
    ],
)
def test_the_fastest_int8_gemm_is_chosen(
    flags: str, instruction_set: str, seconds: dict[str, float], chosen: str, machine: Machine
) -> None:
    machine(flags, instruction_set, **seconds)
    assert choose_backend("int8_gemm", "cpu") == chosen


def test_a_timing_is_kept_and_one_that_is_damaged_is_taken_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine("avx2", "avx2", native=1.0, float32=2.0)
    assert choose_backend("int8_gemm", "cpu") == "native"
    (kept,) = (tmp_path / "lptune").iterdir()
    assert json.loads(kept.read_text())["seconds"]["float32"] == 2.0
    machine("avx2", "avx2", native=2.0, float32=1.0)  # as another day of the same machine would be timed
    assert choose_backend("int8_gemm", "cpu") == "native"
    for damage in (
        "",
        "{",
        "[1]",
        "[" * 100_000,
    ):
        machine("avx2", "avx2", native=2.0, float32=1.0)
        kept.write_text(damage)
        assert choose_backend("int8_gemm", "cpu") == "float32"


def test_emulated_bfloat16_is_noted_where_float32_is_clearly_faster(machine: Machine) -> None:
    machine("avx2", "avx2", native=1.0, float32=1.0, bfloat16=8.0)
    (note,) = emulated_bfloat16("bfloat16", CPU)
    assert "8.0x" in note
    assert "compute_dtype=float32" in note
    assert emulated_bfloat16("float32", CPU) == []
    assert emulated_bfloat16("bfloat16", torch.device("cuda")) == []
    machine("avx512f avx512_vnni", "avx512_vnni", native=1.0, float32=1.0, bfloat16=1.2)
    assert emulated_bfloat16("bfloat16", CPU) == []  # too little to speak of


def test_bfloat16_instructions_are_believed_unless_a_variable_takes_them_away(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine("avx2 avx512_bf16", "avx512_vnni", native=1.0, float32=1.0, bfloat16=9.0)
    assert emulated_bfloat16("bfloat16", CPU) == []
    machine("avx2 avx512_bf16", "avx512_vnni", native=1.0, float32=1.0, bfloat16=9.0)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert emulated_bfloat16("bfloat16", CPU)


@pytest.mark.slow
def test_a_timing_leaves_random_numbers_threads_and_modes_alone(tmp_path: Path) -> None:
    code = (
        "import torch; from torch._subclasses.fake_tensor import FakeTensorMode\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from lptune.kernels import cpu_gemms\n"
        "torch.manual_seed(3); torch.set_num_threads(2)\n"
        "state = torch.get_rng_state()\n"
        "with FakeTensorMode(), torch.device('meta'), torch.inference_mode():\n"
        "    seconds = cpu_gemms.gemm_seconds()\n"
        "assert all(0 < each < 60 for each in seconds.values()), seconds\n"
        "assert torch.equal(torch.get_rng_state(), state)\n"
        "with ThreadPoolExecutor(1) as pool:\n"  # a new thread gets the number that was set last
        "    assert torch.get_num_threads() == pool.submit(torch.get_num_threads).result() == 2\n"
    )
    cold.run("-c", code, XDG_CACHE_HOME=str(tmp_path)).check_returncode()
