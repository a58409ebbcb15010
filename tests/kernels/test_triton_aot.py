"""The Triton kernels compiled for GPUs that are not there: what their machine code says about them.

Spilled registers, the matrix instructions that were chosen and the instructions that are known to be
miscompiled can be read off without running anything. The functions are called as the ops call them. The suite
compiles the calls of SUITE with their default configuration, `make test-kernels` all calls with all
configurations that autotuning may choose.
"""

import itertools
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from tests.helpers.ahead_of_time import SHARED_BYTES, Compiled, compile_for, configurations, triton
from tests.helpers.triton_calls import calls, grouped_calls

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1",
    reason="a stand-in takes the place of the driver",
)
TRITON = Version(triton.__version__)
ARCHS, CONSUMER = (80, 90, 100), (86, 89, 120)
# Layers have rows of a multiple of 16, and scales of both operands; float32 results take more memory.
CALLS = [name for name in calls() if not name.endswith((", pointers", "no scales", ", float32"))]
CALLS += grouped_calls()
GEMMS = [name for name in CALLS if "scaled_mm" in name or name.startswith("grouped_")]
SUITE = (
    ("scaled_mm", 80), ("scaled_mm", 90), ("scaled_mm", 100), ("scaled_mm", 86),
    ("scaled_mm, float8", 90), ("scaled_mm, float8", 100), ("scaled_mm, float8", 120),
    ("block_scaled_mm", 90), ("block_scaled_mm", 89), ("block_scaled_mm, vectors", 90),
    ("block_scaled_mm, MX", 100),
    ("grouped_mm", 90), ("grouped_outer", 80), ("grouped_outer, float8", 90), ("grouped columns", 90),
    ("rows, long", 90), ("rows, rotated, long", 90), ("rows, a master", 80), ("rotate", 100), ("both", 90),
    ("tensor both ways", 90), ("column blocks", 90), ("row and column blocks", 100),
    ("row and column blocks, MX", 90), ("by amax, a master", 90), ("by amax, blocks", 90), ("delayed", 80),
    ("delayed both ways", 90), ("block amaxes", 90), ("stochastic rows, may be dropped", 90),
    ("stochastic columns, e4m3", 90), ("stochastic tensor both ways", 80),
)  # fmt: skip
WGMMA = r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\."
F8, F8_SCALED = r"tcgen05\.mma\.cta_group::1\.kind::f8f6f4", r"kind::mxf8f6f4\.block_scale"
INT8_MMA = r"mma\.sync\.aligned\.m16n8k32\.row\.col\.satfinite\.s32\.s8\.s8\.s32"


def _instruction(call: str, arch: int) -> str:
    """The pattern of the matrix instruction that a GEMM must use; others on consumer GPUs are not told."""
    is_float8 = "float8" in call or call.startswith("block")
    if arch == 90:
        return WGMMA + (r"f32\.e4m3\.e4m3" if is_float8 else r"s32\.s8\.s8")
    if arch == 100 and is_float8:
        return F8_SCALED if call.endswith("MX") else F8
    if arch == 100 and Version("3.8") <= TRITON:
        return r"tcgen05\.mma\.cta_group::1\.kind::i8"
    return ".*" if is_float8 else INT8_MMA


def _check(compiled: Compiled, call: str, arch: int, config: Any, is_default: bool) -> None:
    what = (call, arch, config, compiled.name)
    assert compiled.spilled_bytes == 0, what
    # Triton issue 11111 needs one of these beside a one-byte store.
    assert not re.findall(r"(?:min|max)\.NaN", compiled.ptx), what
    if is_default or arch in ARCHS:
        assert compiled.shared_bytes <= SHARED_BYTES[arch], what
    if call in GEMMS and compiled.name != "places_kernel":  # which writes a table for the GEMM
        assert re.search(_instruction(call, arch), compiled.tensor_core), (*what, compiled.tensor_core)
        if arch == 90 and hasattr(config, "per_processor"):
            # A processor has 228 KB of shared memory, of which each program takes 1 KB more than its own, and
            # 65,536 registers, dealt out by 8 to a thread.
            programs, threads = config.per_processor, 32 * compiled.num_warps
            assert programs * (compiled.shared_bytes + 1024) <= 228 << 10, what
            assert programs * threads * -(-compiled.registers // 8) * 8 <= 65536, what
    elif "amax" not in compiled.name and "delayed_scale" not in compiled.name:
        # What a quantizer's bits depend on: each product rounded by itself, subnormal numbers kept.
        assert not re.findall(r"fma\.rn|\.ftz|\.approx|div\.full", compiled.ptx), what


def _exists(call: str, arch: int) -> bool:
    """No float8 before Ada; on consumer GPUs all but the GEMMs is as on those of data centres."""
    is_float8 = "float8" in call or call.startswith("block_scaled")
    return (arch >= 89 or not is_float8) and (arch not in CONSUMER or call in GEMMS)


@pytest.mark.parametrize(("call", "arch"), SUITE)
def test_kernels_compile_without_spills_to_the_instructions_they_are_made_for(
    call: str, arch: int, tmp_path: Path
) -> None:
    if arch >= 100 and Version("3.7") > TRITON:
        pytest.skip("Triton 3.6 spills up to 392 bytes in some configurations on sm_100")
    configs = configurations(call, arch, tmp_path)
    # The last ones on Hopper are those of the kernel in Gluon.
    for config in (configs[0], configs[-1]) if arch == 90 and call in GEMMS else configs[:1]:
        for compiled in compile_for(call, arch, config, tmp_path):
            _check(compiled, call, arch, config, is_default=config == configs[0])
    if call.endswith("a master"):  # the compiler must not drop the rounding, which is there and back
        assert re.search(r"cvt\.rn\.bf16", compiled.ptx)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("call", "arch"),
    [pair for pair in itertools.product(CALLS, (*ARCHS, *CONSUMER)) if _exists(*pair)],
)
def test_every_configuration_compiles_without_spills(call: str, arch: int, tmp_path: Path) -> None:
    if arch >= 100 and Version("3.7") > TRITON:
        pytest.skip("Triton 3.6 spills up to 392 bytes in some configurations on sm_100")
    for tma in (True, False) if call in GEMMS and arch >= 90 else (True,):
        configs = configurations(call, arch, tmp_path, tma)
        for config in configs:
            for compiled in compile_for(call, arch, config, tmp_path, tma):
                _check(compiled, call, arch, config, is_default=config == configs[0])
