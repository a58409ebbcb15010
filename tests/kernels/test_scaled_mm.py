"""The INT8 GEMM op: exact against float64, its fake implementation, its counter."""

from collections.abc import Iterator

import pytest
import torch

from lptune.config import UserError
from lptune.kernels import layer_handle, record_gemms, scaled_mm
from lptune.kernels.backend import choose_backend
from lptune.numerics.formats import INT32_SAFE_CONTRACTION
from tests.helpers import cold

NO_LAYER = layer_handle(-1)
SHAPES = [(1, 16, 16), (3, 5, 7), (17, 33, 9), (64, 128, 32), (300, 64, 2000)]


def _operands(m: int, k: int, n: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(m * k + n)
    a = torch.randint(-127, 128, (m, k), dtype=torch.int8, generator=generator)
    b = torch.randint(-127, 128, (k, n), dtype=torch.int8, generator=generator)
    return a, b, torch.rand(m, 1, generator=generator), torch.rand(1, n, generator=generator)


@pytest.fixture(params=["torch", "float32", "reference"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("LPTUNE_KERNELS", request.param)
    choose_backend.cache_clear()
    yield str(request.param)
    choose_backend.cache_clear()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_the_result_is_the_exact_sum_scaled_in_float32(
    backend: str, shape: tuple[int, int, int], out_dtype: torch.dtype
) -> None:
    a, b, scale_a, scale_b = _operands(*shape)
    exact = (a.double() @ b.double()).float()
    for sa, sb in ((scale_a, scale_b), (scale_a, None), (None, scale_b), (None, None)):
        expected = exact if sa is None else exact * sa
        expected = (expected if sb is None else expected * sb).to(out_dtype)
        assert torch.equal(scaled_mm(a, b, sa, sb, out_dtype, NO_LAYER, 0), expected)


@pytest.mark.parametrize("transposed", ["a", "b", "both"])
def test_strides_do_not_matter(transposed: str) -> None:
    a, b, scale_a, scale_b = _operands(20, 48, 36)
    expected = scaled_mm(a, b, scale_a, scale_b, torch.float32, NO_LAYER, 0)
    a = a.t().contiguous().t() if transposed in ("a", "both") else a
    b = b.t().contiguous().t() if transposed in ("b", "both") else b
    assert torch.equal(scaled_mm(a, b, scale_a, scale_b, torch.float32, NO_LAYER, 0), expected)


def test_contractions_beyond_int32_are_split(backend: str) -> None:
    k = INT32_SAFE_CONTRACTION + 1000
    a = torch.full((2, k), 127, dtype=torch.int8)
    b = torch.full((k, 3), -127, dtype=torch.int8)
    out = scaled_mm(a, b, None, None, torch.float32, NO_LAYER, 0)
    exact = -127.0 * 127.0 * k
    assert exact < -(2**31)
    # Two parts, each rounded to float32 once, and their sum once.
    assert torch.allclose(
        out.double(), torch.full((2, 3), exact, dtype=torch.float64), rtol=2 * 2**-24, atol=0
    )


def test_nan_scales_come_out_as_nan() -> None:
    a, b, scale_a, scale_b = _operands(4, 16, 16)
    scale_a[2] = torch.nan
    out = scaled_mm(a, b, scale_a, scale_b, torch.bfloat16, NO_LAYER, 0)
    assert out[2].isnan().all()
    assert out[[0, 1, 3]].isfinite().all()


def test_opcheck() -> None:
    a, b, scale_a, scale_b = _operands(8, 16, 24)
    arguments = [
        (a, b, scale_a, scale_b, torch.bfloat16, NO_LAYER, 1, False),
        (a, b, None, scale_b, torch.float32, NO_LAYER, 2, True),
    ]
    for args in arguments:
        torch.library.opcheck(torch.ops.lptune.scaled_mm.default, args)
    torch.library.opcheck(torch.ops.lptune.cast.default, (torch.randn(3, 4), torch.bfloat16))


def test_bad_operands_are_named() -> None:
    a, b, scale_a, scale_b = _operands(8, 16, 24)
    with pytest.raises(ValueError, match=r"two int8 or two float8 operands, got torch\.float32"):
        scaled_mm(a.float(), b, None, None, torch.float32, NO_LAYER, 0)
    with pytest.raises(ValueError, match=r"\(M, K\) and \(K, N\), got \(8, 16\) and \(24, 16\)"):
        scaled_mm(a, b.t(), None, None, torch.float32, NO_LAYER, 0)
    with pytest.raises(ValueError, match=r"scale_a of shape \(M, 1\) or \(1, 1\)"):
        scaled_mm(a, b, scale_b, None, torch.float32, NO_LAYER, 0)
    with pytest.raises(ValueError, match=r"scale_b of shape \(1, N\) or \(1, 1\)"):
        scaled_mm(a, b, None, scale_a, torch.float32, NO_LAYER, 0)


def test_an_unknown_backend_is_one_line(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(choose_backend.cache_clear)
    monkeypatch.setenv("LPTUNE_KERNELS", "cuda")
    choose_backend.cache_clear()
    with pytest.raises(UserError, match="LPTUNE_KERNELS='cuda'"):
        choose_backend("int8_gemm", "cpu")


@pytest.mark.parametrize("isa", ["AVX2", "AVX512_CORE"])
def test_a_cpu_whose_int8_gemm_saturates_gets_an_exact_one(isa: str) -> None:
    code = (
        "import torch; from lptune.kernels import *; a = torch.full((32, 640), 127, dtype=torch.int8)\n"
        "out = scaled_mm(a, a.t(), None, None, torch.float32, layer_handle(-1), 0)\n"
        "plain = torch._int_mm(a, a.t())\n"
        "print((out == 127 * 127 * 640).all().item(), (plain == 127 * 127 * 640).all().item(), "
        "choose_backend('int8_gemm', 'cpu'))"
    )
    done = cold.run("-c", code, ONEDNN_MAX_CPU_ISA=isa)
    done.check_returncode()
    ours_is_exact, plain_is_exact, backend = done.stdout.split()
    assert ours_is_exact == "True"
    # Where the processor or oneDNN does not saturate there is nothing to replace.
    assert backend == ("torch" if plain_is_exact == "True" else "float32")


@pytest.mark.parametrize("compiled", [False, True])
def test_every_execution_is_counted_for_its_layer(compiled: bool) -> None:
    a, b, scale_a, scale_b = _operands(8, 16, 24)

    def twice(layer: torch.Tensor) -> torch.Tensor:
        first = scaled_mm(a, b, scale_a, scale_b, torch.float32, layer, 0)
        return first + scaled_mm(a, b, scale_a, None, torch.float32, layer, 2)

    run = torch.compile(twice, fullgraph=True) if compiled else twice
    with record_gemms() as executed:
        for number in (4, 5, 5):
            run(layer_handle(number))
    run(layer_handle(6))
    assert executed == {(4, 0): 1, (4, 2): 1, (5, 0): 2, (5, 2): 2}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", SHAPES)
def test_cuda_equals_cpu_bitwise(shape: tuple[int, int, int]) -> None:
    a, b, scale_a, scale_b = _operands(*shape)
    expected = scaled_mm(a, b, scale_a, scale_b, torch.bfloat16, NO_LAYER, 0)
    on_gpu = scaled_mm(a.cuda(), b.cuda(), scale_a.cuda(), scale_b.cuda(), torch.bfloat16, NO_LAYER, 0)
    assert torch.equal(on_gpu.cpu(), expected)
