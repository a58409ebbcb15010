"""Compiles a Triton kernel for a GPU that is not there, and reads what came out of it."""

import re
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import triton
from packaging.version import Version
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

triton_version = Version(triton.__version__)
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""What a program can have on each architecture (CUDA C++ programming guide, "technical specifications")."""


def suite_keeps(cases: Iterable[tuple[Any, ...]], *kept: tuple[Any, ...]) -> list[Any]:
    """For parametrize: cases, which begin with the architecture. The suite runs those of `kept`, one for each
    architecture; `make test-kernels` runs the others.

    Kept is the case with the fewest registers to spare, the first to spill when a kernel or Triton changes. A
    thread has 255, or 65,536 over the threads of a program if that is less. Measured with Triton 3.7.1.
    """
    cases = list(cases)
    assert set(kept) <= set(cases)
    assert sorted(case[0] for case in kept) == sorted({case[0] for case in cases})
    return [pytest.param(*case, marks=[] if case in kept else [pytest.mark.kernels]) for case in cases]


class Compiled(NamedTuple):
    """One kernel on one architecture."""

    ptx: str
    registers: int
    spilled_bytes: int  # the stack of a thread; Triton's kernels use it for nothing else
    shared_bytes: int
    cubin: bytes

    @property
    def waits(self) -> set[int]:
        """How many groups of Hopper's tensor core instructions may be pending where the kernel waits."""
        return {int(pending) for pending in re.findall(r"wgmma\.wait_group\.sync\.aligned (\d+)", self.ptx)}

    @property
    def tensor_core(self) -> str:
        """The matrix instructions it uses."""
        pattern = r"(wgmma\.mma_async[\w.:]+|mma\.sync[\w.:]+|tcgen05\.mma[\w.:]+)"
        return " ".join(sorted(set(re.findall(pattern, self.ptx))))


def compile_for(
    arch: int, kernel: Any, arguments: dict[str, Any], *, num_warps: int, num_stages: int = 3
) -> Compiled:
    """arguments: the type of each run-time argument in Triton's notation ("*fp32", "i32", "tensordesc<...>"),
    the value of each constexpr one, in any order.

    Pointers and sizes are taken to be multiples of 16, as the launcher finds them for real shapes; a size
    given as "1" is the constant 1, and None is no pointer.
    """
    if arch >= 100 and triton_version < Version("3.7"):
        pytest.skip("Triton 3.6 spills up to 392 bytes in some configurations on sm_100")
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        given = arguments[parameter.name]
        if parameter.is_constexpr or given in ("1", None):
            signature[parameter.name] = "constexpr"
            constants[(index,)] = 1 if given == "1" else given
        else:
            signature[parameter.name] = given
            if given[0] == "*" or given == "i32":
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    # As the launches of lptune.kernels.triton say.
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False}
    return _compiled(source, arch, options)


def compile_on_hopper(config: Any, dtype: str) -> Compiled:
    """The kernel in Gluon, row scales, a bfloat16 result. dtype: of a and b, as in `gemm_arguments`."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from lptune.kernels.triton import hopper

    constants = hopper.constants(config, (2, 2), 132, promote=dtype != "i8")
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    signature: dict[str, str] = {
        "a": f"tensordesc<{dtype}[{config.block_m}, {hopper.BLOCK_K}],{layout}>",
        "b": f"tensordesc<{dtype}[{config.block_n}, {hopper.BLOCK_K}],{layout}>",
        "out_ptr": "*bf16",
        "scale_a_ptr": "*fp32",
        "scale_b_ptr": "*fp32",
        **dict.fromkeys(("M", "N", "K"), "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    names = hopper.hopper_kernel.arg_names
    at = {name: (names.index(name),) for name in names}
    attributes = {at[name]: [["tt.divisibility", 16]] for name, kind in signature.items() if kind[0] in "*i"}
    source = GluonASTSource(
        hopper.hopper_kernel,
        {name: signature[name] for name in names},
        {at[name]: value for name, value in constants.items()},
        attributes,
    )
    return _compiled(source, 90, {"num_warps": config.num_warps, "enable_fp_fusion": False})


def _compiled(source: Any, arch: int, options: dict[str, Any]) -> Compiled:
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        dump = subprocess.run(
            [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", dump)
    assert usage, dump
    registers, stack, local = map(int, usage.groups())
    return Compiled(
        compiled.asm["ptx"], registers, stack + local, compiled.metadata.shared, compiled.asm["cubin"]
    )


def gemm_arguments(config: Any, dtype: str, tma: bool, **others: Any) -> dict[str, Any]:
    """What the GEMM kernels have in common. dtype: "i8", "fp8e4nv", or two of them as "fp8e5 fp8e4nv"."""
    a, b = dtype.split() if " " in dtype else (dtype, dtype)
    block_k = others["BLOCK_K"]
    return {
        "a": f"tensordesc<{a}[{config.block_m},{block_k}]>" if tma else f"*{a}",
        "b": f"tensordesc<{b}[{config.block_n},{block_k}]>" if tma else f"*{b}",
        "out_ptr": "*bf16",
        "M": "i32",
        "N": "i32",
        "K": "i32",
        "stride_a": "i32",
        "stride_b": "i32",
        "TMA": tma,
        "NUM_PROGRAMS": 132 * config.per_processor,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "GROUP_M": 8,
    } | others


def check(compiled: Compiled) -> None:
    assert compiled.spilled_bytes == 0
    # Triton issue 11111 needs one of these beside a one-byte store.
    assert not re.findall(r"(?:min|max)\.NaN", compiled.ptx)


def check_bits(compiled: Compiled) -> None:
    """What a quantizer's bits depend on: each product rounded by itself, subnormal numbers kept."""
    check(compiled)
    assert "mul.f32" in compiled.ptx or "mul.rn.f32" in compiled.ptx
    assert not re.findall(r"fma\.rn|\.ftz|\.approx|div\.full", compiled.ptx)
