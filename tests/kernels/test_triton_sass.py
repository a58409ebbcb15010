"""What Hopper's machine code says about the loop of the GEMMs: waits, barriers and loads in a step.

These are facts about Triton and its ptxas, on which the choice of configurations rests (gemm.py); found with
Triton 3.7.1. A test that fails here after an upgrade says: look again, the kernels may have become faster.
The suite reads the default of INT8 and of float8, `make test-kernels` the rest.
"""

import pytest

from lptune.kernels.triton import gemm
from tests.helpers.ahead_of_time import Compiled, compile_for, gemm_arguments
from tests.helpers.sass import Loop, main_loop

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


DEFAULT = gemm.gemm_configs(9, True, True)[0]


@pytest.mark.parametrize("tma", [True, pytest.param(False, marks=pytest.mark.kernels)])
def test_an_int8_step_waits_once_for_its_own_products_and_then_loads(tma: bool) -> None:
    loop = _loop(DEFAULT, INT8, tma)
    assert loop.count("product") == DEFAULT.block_k // 32
    assert loop.count("full wait") == 1
    assert loop.count("partial wait") == 0
    assert loop.count("addition") == 0
    assert loop.loads_follow_the_wait
    # All warps have the tile; with TMA, two more before the loads of a and of b.
    assert loop.count("barrier") == (3 if tma else 2)
    # Half of the 128 rows each for the two groups of warps: 64 x 128 x 128 products.
    assert loop.product_cycles == 256


@pytest.mark.kernels
def test_a_step_of_256_has_twice_the_products_and_the_same_waits() -> None:
    short, long = (_loop(DEFAULT._replace(block_k=size), INT8, True) for size in (128, 256))
    assert long.product_cycles == 2 * short.product_cycles
    for kind in ("full wait", "barrier", "load", "wait for load"):
        assert long.count(kind) == short.count(kind), kind


def test_a_float8_step_waits_for_its_products_before_it_adds_them() -> None:
    loop = _loop(DEFAULT, FLOAT8, True)
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
    config = DEFAULT._replace(num_stages=2, block_k=256)
    assert _loaded_meanwhile(config, _loop(config, INT8, True)) == 0
