"""GEMMs against the device's peak, quantizers against its copy bandwidth.

    python benchmarks/kernels.py [--shape T K N]... [--json FILE]

Each GEMM gets operands in the layouts that the layers pass, made by our quantizers: `output` (x, W.T),
`grad_input` (g, W), `grad_weight` (g.T, x). Beside it the bfloat16 GEMM of the same shape and, where the
device's peak is known, the share of it. A quantizer's bandwidth counts every byte once: the input read, the
values written; beside it a copy of the same number of bytes. Medians of CUDA events, or of wall time on CPU.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lptune import kernels
from lptune.kernels import layer_handle
from lptune.training.utilization import peak_flops_per_s

GPU_SHAPES = [(8192, 4096, 14336), (8192, 14336, 4096), (8192, 4096, 4096), (8192, 4096, 1024)]
CPU_SHAPES = [(512, 512, 512)]
_LAYER = layer_handle(-1)


def median_ms(run: Callable[[], object], device: str) -> float:
    """Milliseconds of one call, warmed up; enough calls for about 50 ms, five times."""
    run()
    if device != "cuda":
        times = []
        for _ in range(5):
            started = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - started))
        return statistics.median(times)
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    repeat = max(3, int(50 / max(start.elapsed_time(end), 1e-3)))
    times = []
    for _ in range(5):
        start.record()
        for _ in range(repeat):
            run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / repeat)
    return statistics.median(times)


def gemms(fmt: str, shape: tuple[int, int, int], device: str) -> dict[str, Callable[[], object]]:
    """The three GEMMs of a rowwise layer on 8-bit operands of the right layouts."""
    t, k, n = shape
    dtype = torch.bfloat16
    x, w, g = (torch.randn(size, device=device, dtype=dtype) for size in ((t, k), (n, k), (t, n)))
    turn = kernels.k_major(x.device)
    x_rows, w_rows = kernels.quantize_rows(x, fmt), kernels.quantize_rows(w, fmt)
    w_turned = kernels.quantize_rows(w, fmt, transposed=turn)
    x_columns = kernels.quantize_columns(x, fmt, transposed=turn)
    g_rows, g_columns = kernels.quantize_rows_and_columns(
        g, fmt, multiplier_1K=w_rows.scale_M1.t(), transposed=turn
    )

    def mm(a: Any, b: Any, scale_a: Any, scale_b: Any, gemm: int) -> Callable[[], object]:
        return lambda: kernels.scaled_mm(a, b, scale_a, scale_b, dtype, _LAYER, gemm)

    return {
        "output": mm(x_rows.q_MK, w_rows.q_MK.t(), x_rows.scale_M1, w_rows.scale_M1.t(), 0),
        "grad_input": mm(g_rows.q_MK, w_turned.q_MK, g_rows.scale_M1, None, 1),
        "grad_weight": mm(g_columns.q_MK.t(), x_columns.q_MK, g_columns.scale_1K.t(), x_columns.scale_1K, 2),
    }


def quantizers(fmt: str, shape: tuple[int, int], device: str) -> dict[str, tuple[Callable[[], object], int]]:
    """(call, bytes it has to move) of each quantizer."""
    m, k = shape
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    multiplier, turn = torch.rand(1, k, device=device), kernels.k_major(x.device)
    once, both = 3 * m * k, 4 * m * k
    return {
        "rows": (lambda: kernels.quantize_rows(x, fmt), once),
        "rows, folded": (lambda: kernels.quantize_rows(x, fmt, multiplier_1K=multiplier), once),
        "columns, transposed": (lambda: kernels.quantize_columns(x, fmt, transposed=turn), once),
        "rows folded and columns": (
            lambda: kernels.quantize_rows_and_columns(x, fmt, multiplier_1K=multiplier, transposed=turn),
            both,
        ),
        "tensor": (lambda: kernels.quantize_tensor(x, fmt), once),
    }


def copy_bytes_per_s(num_bytes: int, device: str) -> float:
    """Of a copy that reads half of `num_bytes` and writes the other half."""
    source = torch.empty(num_bytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return num_bytes / (1e-3 * median_ms(lambda: target.copy_(source), device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=int, nargs=3, action="append", metavar=("T", "K", "N"))
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    peaks = peak_flops_per_s(name)
    shapes = [tuple(s) for s in args.shape] if args.shape else GPU_SHAPES if device == "cuda" else CPU_SHAPES
    rows: list[dict[str, Any]] = []
    print(f"torch {torch.__version__}, {name}")
    for t, k, n in shapes:
        flops = 2 * t * k * n
        a, b = (torch.randn(size, device=device, dtype=torch.bfloat16) for size in ((t, k), (k, n)))
        bf16 = flops / (1e-3 * median_ms(lambda a=a, b=b: a @ b, device))  # type: ignore[misc]
        print(f"\n{t} x {k} x {n}: bfloat16 {bf16 / 1e12:.1f} TFLOP/s")
        for fmt in ("int8", "e4m3"):
            for gemm, run in gemms(fmt, (t, k, n), device).items():
                rate = flops / (1e-3 * median_ms(run, device))
                share = rate / peaks[1] if peaks else None
                row = {"shape": (t, k, n), "format": fmt, "gemm": gemm, "flops_per_s": rate, "of_peak": share}
                rows.append(row | {"of_bf16": rate / bf16})
                of_peak = f"  {share:6.1%} of peak" if share else ""
                print(
                    f"  {fmt:<5} {gemm:<12}{rate / 1e12:9.1f} TFLOP/s  {rate / bf16:5.2f}x of bf16{of_peak}"
                )
        for fmt in ("int8", "e4m3"):
            for what, (run, num_bytes) in quantizers(fmt, (t, k), device).items():
                copy = copy_bytes_per_s(num_bytes, device)
                rate = num_bytes / (1e-3 * median_ms(run, device))
                rows.append(
                    {
                        "shape": (t, k),
                        "format": fmt,
                        "quantizer": what,
                        "bytes_per_s": rate,
                        "of_copy": rate / copy,
                    }
                )
                print(f"  {fmt:<5} {what:<26}{rate / 1e9:9.1f} GB/s  {rate / copy:6.1%} of a copy")
    if args.json:
        facts = {"torch": torch.__version__, "device": name, "rows": rows}
        args.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
