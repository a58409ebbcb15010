"""Which INT8 GEMM a CPU runs, and what is said of bfloat16: by instruction sets."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lptune.kernels import choose_backend, cpu_gemms, emulated_bfloat16, native

CPU = torch.device("cpu")
Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Stands for a processor: its flags, the instruction set of our GEMM, whether torch's is exact."""
    monkeypatch.delenv("LPTUNE_KERNELS", raising=False)

    def make(flags: str, instruction_set: str = "", *, is_arm: bool = False, is_exact: bool = True) -> None:
        choose_backend.cache_clear()
        monkeypatch.setattr(cpu_gemms, "cpu_flags", lambda: frozenset(flags.split()))
        monkeypatch.setattr(cpu_gemms.platform, "machine", lambda: "aarch64" if is_arm else "x86_64")
        monkeypatch.setattr(cpu_gemms, "int_mm_is_exact", lambda: is_exact)
        monkeypatch.setattr(native, "instruction_set", lambda: instruction_set)

    yield make
    choose_backend.cache_clear()


def test_a_fast_int8_gemm_is_chosen(machine: Machine) -> None:
    for flags, options, chosen in (
        ("avx2 avx512_vnni", {"instruction_set": "avx512_vnni"}, "native"),
        ("avx2", {"instruction_set": "avx2"}, "native"),
        ("avx2", {}, "float32"),  # no compiler, and torch's is a plain loop
        ("avx2 avx512_vnni", {}, "torch"),
        ("avx2 avx512_vnni", {"is_exact": False}, "float32"),  # a variable takes VNNI from oneDNN
        ("asimddp i8mm", {"is_arm": True}, "torch"),
    ):
        machine(flags, **options)
        assert choose_backend("int8_gemm", "cpu") == chosen, (flags, options)


def test_modes_of_the_caller_do_not_count() -> None:
    expected = cpu_gemms.int_mm_is_exact()
    cpu_gemms.int_mm_is_exact.cache_clear()
    with FakeTensorMode(), torch.device("meta"):
        assert cpu_gemms.int_mm_is_exact() is expected


def test_emulated_bfloat16_is_noted(machine: Machine) -> None:
    machine("avx2")
    (note,) = emulated_bfloat16("bfloat16", CPU)
    assert "compute_dtype=float32" in note
    assert emulated_bfloat16("float32", CPU) == []
    assert emulated_bfloat16("bfloat16", torch.device("cuda")) == []
    for flags in ("avx2 avx512f", "asimddp bf16", ""):  # of the last processor nothing is known
        machine(flags)
        assert emulated_bfloat16("bfloat16", CPU) == []
