"""The INT8 GEMM op: exact against float64, its fake implementation, its counter."""

import ctypes
import hashlib
import itertools
import mmap
import os
import shlex
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import torch

from lptune.base.errors import UserError
from lptune.kernels import cpu_gemms, layer_handle, native, record_gemms, scaled_mm
from lptune.kernels.backend import choose_backend
from lptune.kernels.native import library
from lptune.numerics.formats import INT32_SAFE_CONTRACTION
from tests.helpers import cold

EMULATED_AMX = Path(__file__).with_name("emulated_amx.h")
NO_LAYER = layer_handle(-1)
SHAPES = [(1, 16, 16), (3, 5, 7), (17, 33, 9), (64, 128, 32), (300, 64, 2000), (33, 1100, 65)]
SHAPES += [(2, 0, 3), (0, 4, 2)]


def _operands(m: int, k: int, n: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(m * k + n)
    a = torch.randint(-127, 128, (m, k), dtype=torch.int8, generator=generator)
    b = torch.randint(-127, 128, (k, n), dtype=torch.int8, generator=generator)
    return a, b, torch.rand(m, 1, generator=generator), torch.rand(1, n, generator=generator)


def _forced(name: str) -> Iterator[str]:
    """LPTUNE_KERNELS=name, in a library that is compiled for it."""
    with ExitStack() as stack:
        for cached in (choose_backend, library.load):
            cached.cache_clear()
            stack.callback(cached.cache_clear)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("LPTUNE_KERNELS", name)
        if name == "amx" and native.instruction_set() == "avx512_vnni":  # its tiles can be emulated
            compiler, header = os.environ.get("CXX", "g++"), shlex.quote(str(EMULATED_AMX))
            digest = hashlib.sha256(
                EMULATED_AMX.read_bytes()
            ).hexdigest()  # an edited file is another library
            patch.setenv("CXX", f"{compiler} -include {header} -DEMULATED_BY_{digest}")
            library.load.cache_clear()
        if name in library.INSTRUCTION_SETS and native.instruction_set() != name:
            pytest.skip(f"needs {name} and a C++ compiler")
        if name == "torch" and not cpu_gemms.int_mm_is_exact():
            pytest.skip("torch's INT8 GEMM saturates here, so no run takes it")
        yield name


@pytest.fixture(params=[*library.INSTRUCTION_SETS, "torch", "float32", "reference"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from _forced(request.param)


@pytest.fixture(params=library.INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from _forced(request.param)


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


STRIDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda x: x,
    "columns": lambda x: x.t().contiguous().t(),
    "rows apart": lambda x: torch.cat([x, x], dim=1)[:, : x.shape[1]],
    "columns apart": lambda x: torch.cat([x, x]).t().contiguous().t()[: x.shape[0]],
    "nothing contiguous": lambda x: torch.stack([x, x], dim=-1)[..., 0],
}


@pytest.mark.parametrize("shape", [(20, 48, 36), (1, 70, 33), (40, 1, 50), (70, 200, 1)])
def test_strides_do_not_matter(backend: str, shape: tuple[int, int, int]) -> None:
    a, b, scale_a, scale_b = _operands(*shape)
    expected = ((a.double() @ b.double()).float() * scale_a * scale_b).to(torch.bfloat16)
    for of_a, of_b in itertools.product(STRIDED.values(), repeat=2):
        out = scaled_mm(of_a(a), of_b(b), scale_a, scale_b, torch.bfloat16, NO_LAYER, 0)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize(
    "shape",
    [
        (700, 1000, 90),  # several blocks of a, the last one smaller
        (600, 64, 1500),  # one block, and so parts of b
        (10, 20_000, 900),  # b is packed in two pieces, and a block of a is a single panel
        (300, 5000, 64),  # FEWEST_PANELS in a block
        (1100, 40, 1024),  # the output is streamed past the caches
        (2000, 1500, 600),  # enough work for several threads at once
    ],
)
@pytest.mark.usefixtures("instruction_set")
def test_blocks_parts_and_pieces_fit_together(shape: tuple[int, int, int], num_threads: int) -> None:
    a, b, scale_a, scale_b = _operands(*shape)
    a[0], a[1], b[:, 0], b[:, 1] = -128, 127, 127, -128  # no quantizer makes -128, but int8 has it
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        outs = [native.int8_mm(a, b, scale_a, scale_b, dtype) for dtype in (torch.float32, torch.bfloat16)]
    finally:
        torch.set_num_threads(before)
    exact = (a.double() @ b.double()).float() * scale_a * scale_b
    assert all(torch.equal(out, exact.to(out.dtype)) for out in outs)


@pytest.mark.parametrize(
    "values", [(127, 127), (-127, -127), (127, -127), (-128, -128), (-128, 127), (0, 127)]
)
@pytest.mark.usefixtures("instruction_set")
def test_operands_at_their_extremes_neither_saturate_nor_wrap(values: tuple[int, int]) -> None:
    m, k, n = 13, 2**17 - 1, 70  # 128 * 128 * k is just below 2**31
    a, b = (torch.full(size, v, dtype=torch.int8) for size, v in zip(((m, k), (k, n)), values, strict=True))
    a[::2, ::3] = 1
    exact = (a.double() @ b.double()).float()
    for of_b in (b, b.t().contiguous().t()):
        assert torch.equal(native.int8_mm(a, of_b, None, None, torch.float32), exact)


def _at_the_end_of_memory(x: torch.Tensor) -> torch.Tensor:
    """A copy of x whose last byte is followed by a page that cannot be read."""
    page = mmap.PAGESIZE
    size = -(-x.numel() // page) * page
    memory = mmap.mmap(-1, size + page)
    everything = torch.frombuffer(memory, dtype=torch.int8)
    protected = ctypes.CDLL(None).mprotect(
        ctypes.c_void_p(everything.data_ptr() + size), ctypes.c_size_t(page), 0
    )
    assert protected == 0
    return everything[size - x.numel() : size].view(x.shape).copy_(x)


def _multiply_at_the_end_of_memory() -> None:
    def columns(x: torch.Tensor) -> torch.Tensor:
        return _at_the_end_of_memory(x.t().contiguous()).t()

    for name in library.INSTRUCTION_SETS:
        with suppress(pytest.skip.Exception), contextmanager(_forced)(name):
            for shape in ((20, 70, 9), (1, 5, 1), (33, 130, 47)):
                a, b, _, _ = _operands(*shape)
                for of_a, of_b in itertools.product((_at_the_end_of_memory, columns), repeat=2):
                    out = native.int8_mm(of_a(a), of_b(b), None, None, torch.float32)
                    assert torch.equal(out, (a.double() @ b.double()).float())
            print(name)


def test_nothing_beyond_the_operands_is_read() -> None:
    # A process that reads there ends, so it is not this one.
    done = cold.run("-c", f"import {__name__} as this; this._multiply_at_the_end_of_memory()")
    done.check_returncode()
    assert native.instruction_set() in done.stdout.split() or not native.instruction_set()


@pytest.mark.usefixtures("instruction_set")
def test_threads_that_call_at_once_have_their_own_memory() -> None:
    operands = [_operands(200 + i, 300, 100) for i in range(4)]
    expected = [(a.double() @ b.double()).float() * sa * sb for a, b, sa, sb in operands]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            outs = pool.map(lambda each: native.int8_mm(*each, torch.float32), operands)
            assert all(torch.equal(out, exact) for out, exact in zip(outs, expected, strict=True))


def test_rounding_to_bfloat16_at_its_limits(backend: str) -> None:
    a, b = torch.tensor([[1], [3], [127]], dtype=torch.int8), torch.tensor([[127, -127]], dtype=torch.int8)
    for scale in (3e38, 2.66e36, 1e-40, 2**-133, 0.0, torch.inf, torch.nan, 1 + 2**-8, 1 + 3 * 2**-9):
        scale_a = torch.full((3, 1), scale)
        expected = ((a.double() @ b.double()).float() * scale_a).to(torch.bfloat16)
        out = scaled_mm(a, b, scale_a, None, torch.bfloat16, NO_LAYER, 0)
        assert torch.equal(out.isnan(), expected.isnan())
        assert torch.equal(out.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


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


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7FFF8000, 0x7F800001])
def test_a_nan_of_any_payload_stays_one(backend: str, bits: int) -> None:
    a, b, scale_a, _ = _operands(4, 16, 16)
    scale_a.view(torch.int32)[2] = bits
    out = scaled_mm(a, b, scale_a, None, torch.bfloat16, NO_LAYER, 0)
    assert out[2].isnan().all()
    scaled = native.apply_scales(a.int() @ b.int(), scale_a, None, torch.bfloat16)
    assert torch.equal(scaled.isnan(), out.isnan())


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
    with pytest.raises(ValueError, match=r"scales in float32, got torch\.bfloat16"):
        scaled_mm(a, b, scale_a.bfloat16(), None, torch.float32, NO_LAYER, 0)


def test_an_unknown_backend_is_one_line(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(choose_backend.cache_clear)
    monkeypatch.setenv("LPTUNE_KERNELS", "cuda")
    choose_backend.cache_clear()
    with pytest.raises(UserError, match="LPTUNE_KERNELS='cuda'"):
        choose_backend("int8_gemm", "cpu")


@pytest.mark.parametrize("isa", ["AVX2", pytest.param("AVX512_CORE", marks=pytest.mark.slow)])
def test_a_cpu_whose_int8_gemm_saturates_gets_an_exact_one(isa: str, tmp_path: Path) -> None:
    code = (
        "import torch; from lptune.kernels import *; a = torch.full((32, 640), 127, dtype=torch.int8)\n"
        "out = scaled_mm(a, a.t(), None, None, torch.float32, layer_handle(-1), 0)\n"
        "plain = torch._int_mm(a, a.t())\n"
        "print((out == 127 * 127 * 640).all().item(), (plain == 127 * 127 * 640).all().item(), "
        "choose_backend('int8_gemm', 'cpu'))"
    )
    # Without a compiler there is no GEMM of our own.
    done = cold.run("-c", code, ONEDNN_MAX_CPU_ISA=isa, CXX="false", XDG_CACHE_HOME=str(tmp_path))
    done.check_returncode()
    ours_is_exact, plain_is_exact, backend = done.stdout.split()
    assert ours_is_exact == "True"
    assert plain_is_exact == "True" or backend == "float32"  # where nothing saturates, the faster one


def test_an_instruction_set_that_is_not_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    for cached in (choose_backend, library.load):
        cached.cache_clear()
        request.addfinalizer(cached.cache_clear)
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setenv("LPTUNE_KERNELS", "avx2")
    with pytest.raises(UserError, match="LPTUNE_KERNELS='avx2' is not to be had here"):
        choose_backend("int8_gemm", "cpu")


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
