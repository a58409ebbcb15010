"""What Hopper's machine code says about the loop of the GEMMs: waits, barriers and loads in a step.

These are facts about Triton and its ptxas, on which the choice of configurations rests (gemm.py); found with
Triton 3.7.1. A test that fails here after an upgrade says: look again, the kernels may have become faster.
The suite reads one configuration of INT8, of float8 and of the kernel in Gluon, `make test-kernels` the rest.
"""

from typing import Any

import pytest

from lptune.kernels.triton import gemm
from tests.helpers.ahead_of_time import SHARED_BYTES, Compiled, compile_for, compile_on_hopper, gemm_arguments
from tests.helpers.sass import Loop, count, main_loop

INT8, FLOAT8 = "i8", "fp8e4nv"


def _compiled(config: gemm.GemmConfig, dtype: str, tma: bool) -> Compiled:
    scales = {"scale_a_ptr": "*fp32", "scale_b_ptr": "*fp32", "SCALE_A": 2, "SCALE_B": 2}
    arguments = gemm_arguments(config, dtype, tma, BLOCK_K=config.block_k) | scales
    return compile_for(
        90, gemm.scaled_mm_kernel, arguments, num_warps=config.num_warps, num_stages=config.num_stages
    )


def _loop(config: gemm.GemmConfig, dtype: str, tma: bool) -> Loop:
    return main_loop(_compiled(config, dtype, tma).cubin)


def _loaded_meanwhile(config: gemm.GemmConfig, loop: Loop) -> int:
    """How many steps are being loaded while the tensor core works on one."""
    return config.num_stages - (2 if loop.loads_follow_the_wait else 1)


ONE_PROGRAM = gemm.GemmConfig(128, 128, 8, 3, 1)


@pytest.mark.parametrize("tma", [True, pytest.param(False, marks=pytest.mark.kernels)])
def test_an_int8_step_waits_once_for_its_own_products_and_then_loads(tma: bool) -> None:
    loop = _loop(ONE_PROGRAM, INT8, tma)
    assert loop.count("product") == ONE_PROGRAM.block_k // 32
    assert loop.count("full wait") == 1
    assert loop.count("partial wait") == 0
    assert loop.count("addition") == 0
    assert loop.loads_follow_the_wait
    # All warps have the tile; with TMA, two more before the loads of a and of b.
    assert loop.count("barrier") == (3 if tma else 2)
    # Half of the 128 rows each for the two groups of warps: 64 x 128 x 128 products.
    assert loop.product_cycles == 256


def test_a_float8_step_waits_for_its_products_before_it_adds_them() -> None:
    loop = _loop(ONE_PROGRAM, FLOAT8, True)
    # Each thread has 64 of a group's 64 x 128 sums; ptxas waits, though PTX lets one group run on.
    assert loop.count("addition") == 64
    assert loop.count("full wait") == 1
    assert loop.instructions.index("full wait") < loop.instructions.index("addition")
    assert loop.loads_follow_the_wait


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("config", "dtype", "tma"),
    [
        (config, dtype, tma)
        for tma in (True, False)
        for dtype in (INT8, FLOAT8)
        for config in gemm.gemm_configs(9, dtype == INT8, tma)
    ],
)
def test_in_every_configuration_something_runs_while_something_waits(
    config: gemm.GemmConfig, dtype: str, tma: bool
) -> None:
    """A processor has a second program, or a program has a step in flight while the tensor core works."""
    loop = _loop(config, dtype, tma)
    assert config.per_processor > 1 or _loaded_meanwhile(config, loop) >= 1


@pytest.mark.kernels
def test_two_stages_load_nothing_while_the_tensor_core_works() -> None:
    """Why no configuration with one program has two stages."""
    config = ONE_PROGRAM._replace(num_stages=2)
    assert _loaded_meanwhile(config, _loop(config, INT8, True)) == 0


INT8_ON_HOPPER, FLOAT8_ON_HOPPER = (gemm.hopper_configs(9, is_int8, tma=True) for is_int8 in (True, False))


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        *((config, INT8) for config in INT8_ON_HOPPER[:1]),
        *(pytest.param(config, INT8, marks=pytest.mark.kernels) for config in INT8_ON_HOPPER[1:]),
        *(pytest.param(config, FLOAT8, marks=pytest.mark.kernels) for config in FLOAT8_ON_HOPPER),
    ],
)
def test_the_kernel_in_gluon_waits_as_it_says(config: Any, dtype: str) -> None:
    compiled = compile_on_hopper(config, dtype)
    assert compiled.spilled_bytes == 0
    assert compiled.shared_bytes <= SHARED_BYTES[90]
    # One loop for each group. INT8 waits for the step before, and for its own products after the last.
    assert count(compiled.cubin, "full wait") == config.num_groups
    assert count(compiled.cubin, "partial wait") == (config.num_groups if dtype == INT8 else 0)
    rows = config.block_m if dtype == INT8 else config.block_m // config.num_groups
    warpgroups = config.num_warps // 4
    instructions = (rows // 64 // warpgroups) * (config.block_n // 128) * (128 // 32)  # of 64 x 128 x 32
    assert count(compiled.cubin, "product") == config.num_groups * instructions
    stores = rows * config.block_n * 2 // 16 // (32 * config.num_warps)  # bfloat16, 16 bytes a thread
    assert count(compiled.cubin, "store of 16 bytes") == count(compiled.cubin, "store")
    assert count(compiled.cubin, "store") == config.num_groups * stores
