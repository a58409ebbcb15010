"""Times GEMMs against the device's peak and quantizers against its copy bandwidth, on every backend.

    python benchmarks/kernels.py [--shape T K N]... [--skip-configs] [--json FILE]

Each GEMM gets operands from our quantizers, in the layouts that layers use: `output` (x, W.T), `grad_input`
(g, W), `grad_weight` (g.T, x). torch's calls (cuBLASLt, CUTLASS) are timed beside lptune's kernel, where
an operation has both; its INT8 GEMM, which returns int32 without scales, bare and with one
compiled pass over the result. There are two rooflines: the peak of the data sheet, and twice the
speed of a bfloat16 GEMM of the same shape on this device. On CUDA, a table of all configurations of our
kernel follows.

The bandwidth of a quantizer counts every byte once: the input that it reads and the values that it writes. It
is compared with a copy of as many bytes. Inputs take turns, so that the cache helps no more than in training.
"""

import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from harness import Results, device_name, device_type, median_ms, parser, strict_compilation

from lptune import kernels
from lptune.base.errors import UserError
from lptune.hardware.devices import known_device
from lptune.kernels import choose_backend, layer_handle

GPU_SHAPES = [(8192, 4096, 14336), (16384, 3072, 8192), (8192, 4096, 4096), (8192, 4096, 1024)]
CPU_SHAPES = [(512, 512, 512)]
INPUT_SETS = 3
_LAYER = layer_handle(-1)
Call = Callable[[], object]


@contextmanager
def backend(name: str | None) -> Iterator[None]:
    """In this context, operations use the backend `name` if they have it. None: lptune's choice."""
    before = os.environ.pop("LPTUNE_KERNELS", None)
    if name is not None:
        os.environ["LPTUNE_KERNELS"] = name
    choose_backend.cache_clear()
    try:
        yield
    finally:
        os.environ.pop("LPTUNE_KERNELS", None)
        if before is not None:
            os.environ["LPTUNE_KERNELS"] = before
        choose_backend.cache_clear()


def random(*size: int) -> torch.Tensor:
    """A Gaussian bfloat16 tensor on the device."""
    return torch.randn(size, device=device_type(), dtype=torch.bfloat16)


def gemms(kind: str, shape: tuple[int, int, int]) -> dict[str, tuple[Call, str]]:
    """The three GEMMs of a layer on new 8-bit operands of the right layouts, and the operation that each is.

    kind: int8, e4m3 (scales of rows), e4m3 tensor, e4m3 blocks.
    """
    t, k, n = shape
    x, w, g = random(t, k), random(n, k), random(t, n)
    transposed = kernels.k_major(x.device)
    if kind == "e4m3 blocks":
        return _block_gemms(x, w, g, transposed)
    fmt = kind.split()[0]
    if kind == "e4m3 tensor":
        x8, w8 = kernels.quantize_tensor(x, fmt), kernels.quantize_tensor(w, fmt)
        w_transposed = kernels.quantize_tensor(w, fmt, transposed=transposed).q_MK
        x_transposed = kernels.quantize_tensor(x, fmt, transposed=transposed).q_MK
        g8, g_transposed = kernels.quantize_tensor_both_ways(g, fmt)
        return {
            "output": _mm(x8.q_MK, w8.q_MK.t(), x8.scale_11, w8.scale_11, 0, "float8_gemm"),
            "grad_input": _mm(g8.q_MK, w_transposed, g8.scale_11, w8.scale_11, 1, "float8_gemm"),
            "grad_weight": _mm(g_transposed.t(), x_transposed, g8.scale_11, x8.scale_11, 2, "float8_gemm"),
        }
    first, other = ("int8_gemm",) * 2 if fmt == "int8" else ("float8_gemm", "float8_other_gemm")
    x_rows, w_rows = kernels.quantize_rows(x, fmt), kernels.quantize_rows(w, fmt)
    w_transposed = kernels.quantize_rows(w, fmt, transposed=transposed).q_MK
    x_columns = kernels.quantize_columns(x, fmt, transposed=transposed)
    g_rows, g_columns = kernels.quantize_rows_and_columns(
        g, fmt, multiplier_1K=w_rows.scale_M1.t(), transposed=transposed
    )
    gw_scales = (g_columns.scale_1K.t(), x_columns.scale_1K)
    return {
        "output": _mm(x_rows.q_MK, w_rows.q_MK.t(), x_rows.scale_M1, w_rows.scale_M1.t(), 0, first),
        "grad_input": _mm(g_rows.q_MK, w_transposed, g_rows.scale_M1, None, 1, other),
        "grad_weight": _mm(g_columns.q_MK.t(), x_columns.q_MK, *gw_scales, 2, other),
    }


def _mm(a: Any, b: Any, scale_a: Any, scale_b: Any, gemm: int, operation: str) -> tuple[Call, str]:
    call = functools.partial(kernels.scaled_mm, a, b, scale_a, scale_b, torch.bfloat16, _LAYER, gemm)
    return call, operation


def int_mm_calls(a: Any, b: Any, scale_a: Any, scale_b: Any) -> dict[str, Call]:
    """torch's INT8 GEMM: its int32 result, and that with its scales applied in one compiled pass."""
    scales = [each for each in (scale_a, scale_b) if each is not None]
    return {
        "_int_mm": lambda: torch._int_mm(a, b),
        "_int_mm + scales": lambda: _apply_scales(torch._int_mm(a, b), scales),
    }


@torch.compile(dynamic=False, fullgraph=True)
def _apply_scales(acc_MN: torch.Tensor, scales: list[torch.Tensor]) -> torch.Tensor:
    scaled = acc_MN.to(torch.float32)
    for scale in scales:
        scaled = scaled * scale
    return scaled.to(torch.bfloat16)


def _block_gemms(x: Any, w: Any, g: Any, transposed: bool) -> dict[str, tuple[Call, str]]:
    x8 = kernels.quantize_blocks(x, (1, 128), "e4m3")
    w8 = kernels.quantize_blocks(w, (128, 128), "e4m3")
    w_transposed = kernels.quantize_blocks(w, (128, 128), "e4m3", transposed=transposed).q_MK
    x_columns = kernels.quantize_blocks(x, (128, 1), "e4m3", transposed=transposed)
    g_rows, g_columns = kernels.quantize_row_and_column_blocks(g, 128, "e4m3", transposed=transposed)

    def mm(a: Any, b: Any, scale_a: Any, scale_b: Any, gemm: int) -> tuple[Call, str]:
        arguments = (a, b, scale_a, scale_b, 128, torch.bfloat16, _LAYER, gemm)
        return lambda: kernels.block_scaled_mm(*arguments), "block_gemm"

    return {
        "output": mm(x8.q_MK, w8.q_MK.t(), x8.scale, w8.scale.t(), 0),
        "grad_input": mm(g_rows.q_MK, w_transposed, g_rows.scale, w8.scale, 1),
        "grad_weight": mm(g_columns.q_MK.t(), x_columns.q_MK, g_columns.scale.t(), x_columns.scale, 2),
    }


def time_gemms(shape: tuple[int, int, int], results: Results) -> None:
    """Times the three GEMMs of every kind, on lptune's choice of backend and on torch's calls."""
    t, k, n = shape
    flops, device = 2 * t * k * n, known_device(device_name())
    pairs = [(random(t, k), random(k, n)) for _ in range(INPUT_SETS)]
    bf16 = flops / (1e-3 * median_ms([lambda a=a, b=b: a @ b for a, b in pairs]))  # type: ignore[misc]
    share = f", {bf16 / device.bf16:.1%} of peak" if device else ""
    print(f"\n{t} x {k} x {n}: bfloat16 {bf16 / 1e12:.1f} TFLOP/s{share}", flush=True)
    results.add(
        shape=shape, format="bfloat16", flops_per_s=bf16, of_peak=bf16 / device.bf16 if device else None
    )
    for kind in ("int8", "e4m3", "e4m3 tensor", "e4m3 blocks"):
        peak = device.peak(kind.split()[0]) if device else None
        sets = [gemms(kind, shape) for _ in range(INPUT_SETS)]
        for gemm, (_, operation) in sets[0].items():
            ours = choose_backend(operation, device_type())
            ways = {ours: [each[gemm][0] for each in sets]}
            if kind == "int8":
                for name in ("_int_mm", "_int_mm + scales"):
                    ways[name] = [int_mm_calls(*each[gemm][0].args[:4])[name] for each in sets]  # type: ignore[attr-defined]
            elif _torch_has(operation):
                ways["torch"] = ways[ours]
            for name, calls in ways.items():
                try:
                    with backend("torch" if name == "torch" else None):
                        ms = median_ms(calls)
                except Exception as error:
                    results.add(shape=shape, format=kind, gemm=gemm, backend=name, failed=str(error)[:300])
                    print(f"  {kind:<12} {gemm:<12}{name:<18}failed: {str(error)[:80]}", flush=True)
                    continue
                rate = flops / (1e-3 * ms)
                results.add(
                    shape=shape,
                    format=kind,
                    gemm=gemm,
                    backend=name,
                    chosen=name == ours,
                    ms=ms,
                    flops_per_s=rate,
                    of_peak=rate / peak if peak else None,
                    of_twice_bf16=rate / (2 * bf16),
                )
                of_peak = f"  {rate / peak:6.1%} of peak" if peak else ""
                print(
                    f"  {kind:<12} {gemm:<12}{name:<18}{rate / 1e12:9.1f} TFLOP/s"
                    f"  {rate / bf16:5.2f}x of bf16  {rate / (2 * bf16):6.1%} of twice that{of_peak}",
                    flush=True,
                )


def _torch_has(operation: str) -> bool:
    try:
        with backend("torch"):
            return choose_backend(operation, device_type()) == "torch"
    except UserError:
        return False


def time_configs(shape: tuple[int, int, int], results: Results) -> None:
    """Times the INT8 and float8 `output` with each configuration that autotuning may choose."""
    from lptune.kernels.triton import gemm, launch

    t, k, n = shape
    flops, device = 2 * t * k * n, torch.device("cuda", torch.cuda.current_device())
    print(f"\n{t} x {k} x {n}, output, by configuration (tile, warps, stages, programs, step)")
    for fmt in ("int8", "e4m3"):
        sets = []
        for _ in range(INPUT_SETS):
            x, w = kernels.quantize_rows(random(t, k), fmt), kernels.quantize_rows(random(n, k), fmt)
            sets.append((x.q_MK, w.q_MK.t(), x.scale_M1, w.scale_M1.t(), torch.bfloat16))
        tma = launch.has_tma(device)
        of_device = launch.capability(device)[0], fmt == "int8", tma
        for config in (*gemm.gemm_configs(*of_device), *gemm.hopper_configs(*of_device)):

            def call(arguments: Any, config: Any = config) -> Call:
                return lambda: gemm.scaled_mm(*arguments, config=config)

            try:
                rate = flops / (1e-3 * median_ms([call(arguments) for arguments in sets]))
            except Exception as error:  # the device has too little shared memory for this configuration
                results.add(shape=shape, format=fmt, config=list(config), failed=str(error)[:200])
                print(f"  {fmt:<6}{tuple(config)!s:<32} failed: {str(error)[:80]}", flush=True)
                continue
            results.add(shape=shape, format=fmt, config=list(config), flops_per_s=rate)
            print(f"  {fmt:<6}{tuple(config)!s:<32}{rate / 1e12:9.1f} TFLOP/s", flush=True)


def quantizers(fmt: str, x: torch.Tensor) -> dict[str, tuple[Call, int]]:
    """(call, bytes that it has to move) of each quantizer of a matrix, also those that transpose."""
    m, k = x.shape
    multiplier, transposed = torch.rand(1, k, device=x.device), kernels.k_major(x.device)
    q = kernels.quantize_tensor(x, fmt).q_MK
    once, both = 3 * m * k, 4 * m * k
    made: dict[str, tuple[Call, int]] = {
        "rows": (lambda: kernels.quantize_rows(x, fmt), once),
        "rows, folded": (lambda: kernels.quantize_rows(x, fmt, multiplier_1K=multiplier), once),
        "columns, transposed": (lambda: kernels.quantize_columns(x, fmt, transposed=transposed), once),
        "rows folded and columns transposed": (
            lambda: kernels.quantize_rows_and_columns(
                x, fmt, multiplier_1K=multiplier, transposed=transposed
            ),
            both,
        ),
        "tensor": (lambda: kernels.quantize_tensor(x, fmt), once),
        "tensor, both ways": (lambda: kernels.quantize_tensor_both_ways(x, fmt), both),
        "torch's transposing copy of 8 bits": (lambda: kernels.transposed_copy(q), 2 * m * k),
    }
    if fmt == "e4m3":
        made |= {
            "blocks 1 x 128": (lambda: kernels.quantize_blocks(x, (1, 128), fmt), once),
            "blocks 128 x 128, transposed": (
                lambda: kernels.quantize_blocks(x, (128, 128), fmt, transposed=transposed),
                once,
            ),
            "blocks by rows and by columns transposed": (
                lambda: kernels.quantize_row_and_column_blocks(x, 128, fmt, transposed=transposed),
                both,
            ),
        }
    return made


def time_quantizers(
    shape: tuple[int, int], results: Results, formats: Sequence[str] = ("int8", "e4m3")
) -> None:
    """Times every quantizer of matrices of this shape."""
    m, k = shape
    inputs = [random(m, k) for _ in range(INPUT_SETS)]
    print(f"\n{m} x {k}: quantizers")
    copies: dict[int, float] = {}
    for fmt in formats:
        sets = [quantizers(fmt, x) for x in inputs]
        for what, (_, num_bytes) in sets[0].items():
            if num_bytes not in copies:
                empty = functools.partial(
                    torch.empty, num_bytes // 2, dtype=torch.uint8, device=device_type()
                )
                calls = [functools.partial(empty().copy_, empty()) for _ in range(INPUT_SETS)]
                copies[num_bytes] = num_bytes / (1e-3 * median_ms(calls))
            rate = num_bytes / (1e-3 * median_ms([each[what][0] for each in sets]))
            of_copy = rate / copies[num_bytes]
            results.add(shape=shape, format=fmt, quantizer=what, bytes_per_s=rate, of_copy=of_copy)
            print(
                f"  {fmt:<5} {what:<38}{rate / 1e9:9.1f} GB/s  {of_copy:6.1%} of a copy "
                f"({copies[num_bytes] / 1e9:,.0f} GB/s)",
                flush=True,
            )


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--shape", type=int, nargs=3, action="append", metavar=("T", "K", "N"))
    arguments.add_argument(
        "--skip-configs", action="store_true", help="leave the table of configurations out"
    )
    arguments.add_argument("--minutes", type=float, default=60.0, help="begin no further shape after them")
    args = arguments.parse_args()
    deadline = time.monotonic() + 60 * args.minutes
    on_gpu = device_type() == "cuda"
    shapes = [tuple(s) for s in args.shape] if args.shape else GPU_SHAPES if on_gpu else CPU_SHAPES
    strict_compilation(3 * len(shapes))  # `_apply_scales` of each shape and GEMM
    with Results(args.json) as results:
        print(f"torch {torch.__version__}, {device_name()}")
        # The first shape is the most important one, so all its tables come before the other shapes.
        for i, shape in enumerate(shapes):
            if time.monotonic() > deadline:
                print(f"not run, the time was over: {' x '.join(map(str, shape))}")
                continue
            time_gemms(shape, results)
            time_quantizers(shape[:2], results)
            if i == 0 and on_gpu and not args.skip_configs:
                time_configs(shape, results)


if __name__ == "__main__":
    main()
