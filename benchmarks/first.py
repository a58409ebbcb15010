"""The first two minutes on a GPU: are the kernels right, how fast are GEMMs and quantizers, at which clocks?

    python benchmarks/first.py [--shape T K N] [--json FILE]

1. Quantizers and GEMMs at 512 x 384 x 640 against the reference on the CPU: INT8 and all quantizers bit for
   bit, float8 GEMMs up to the rounding of their bfloat16 results.
2. Every way to multiply at one large shape, on random data (zeros are faster) and under CUDA graphs, with the
   clock and the power that nvidia-smi reads meanwhile. A GEMM in 8 bits is limited by power, so two times can
   be compared only if the clocks are known.
3. Quantizers, and the transposed copy of 8 bits, against a plain copy of as many bytes.

Each row is written as soon as it is measured; a way that fails is named, and the others are still measured.
"""

import functools
import shutil
import statistics
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from harness import Results, device_name, device_type, median_ms, parser
from kernels import INPUT_SETS, Call, backend, int_mm_calls, random, time_quantizers  # benchmarks/kernels.py
from torch import Tensor

from lptune import kernels
from lptune.hardware.devices import FLOAT8_CAPABILITY
from lptune.kernels import layer_handle

SHAPE = (16384, 3072, 8192)
CHECKED = (512, 384, 640)
# Results in bfloat16 differ by a rounding of 2**-9 each; sums in float32 and of "fast accumulation" by less.
FLOAT8_ERROR = 2**-8
BATCH_MS = 150
"""Five of them give nvidia-smi, which takes some tens of ms, time for several readings."""


def formats() -> tuple[str, ...]:
    """Those that this device multiplies; a CPU emulates float8."""
    with_float8 = device_type() == "cpu" or torch.cuda.get_device_capability() >= FLOAT8_CAPABILITY
    return ("int8", "e4m3") if with_float8 else ("int8",)


def computed(shape: tuple[int, int, int], device: str) -> dict[str, Tensor]:
    """Results of the ops on `device`, from inputs that do not depend on it."""
    t, k, n = shape
    generator = torch.Generator().manual_seed(0)
    sizes = ((t, k), (n, k), (t, n))
    x, w, g = (torch.randn(s, generator=generator, dtype=torch.bfloat16).to(device) for s in sizes)
    transposed, found = kernels.k_major(x.device), dict[str, Tensor]()
    for fmt in formats():
        x_rows, w_rows = kernels.quantize_rows(x, fmt), kernels.quantize_rows(w, fmt)
        x_columns = kernels.quantize_columns(x, fmt, transposed=transposed)
        folded = w_rows.scale_M1.t()
        g_rows, g_columns = kernels.quantize_rows_and_columns(
            g, fmt, multiplier_1K=folded, transposed=transposed
        )
        of_tensor, other_way = kernels.quantize_tensor_both_ways(g, fmt)
        found |= {
            f"{fmt} quantize_rows": x_rows.q_MK,
            f"{fmt} quantize_rows, scales": x_rows.scale_M1,
            f"{fmt} quantize_columns": x_columns.q_MK,
            f"{fmt} quantize_rows_and_columns, rows": g_rows.q_MK,
            f"{fmt} quantize_rows_and_columns, columns": g_columns.q_MK,
            f"{fmt} quantize_rows_and_columns, scales": g_columns.scale_1K,
            f"{fmt} quantize_tensor_both_ways": of_tensor.q_MK,
            f"{fmt} quantize_tensor_both_ways, transposed": other_way,
        }
        w_transposed = kernels.quantize_rows(w, fmt, transposed=transposed).q_MK
        column_scales = g_columns.scale_1K.t(), x_columns.scale_1K
        operands: list[tuple[Any, ...]] = [
            (x_rows.q_MK, w_rows.q_MK.t(), x_rows.scale_M1, folded),
            (g_rows.q_MK, w_transposed, g_rows.scale_M1, None),
            (g_columns.q_MK.t(), x_columns.q_MK, *column_scales),
        ]
        for gemm, name in enumerate(("output", "grad_input", "grad_weight")):
            found[f"{fmt} scaled_mm, {name}"] = kernels.scaled_mm(
                *operands[gemm], torch.bfloat16, layer_handle(-1), gemm
            )
    return {name: each.cpu() for name, each in found.items()}


def check(results: Results) -> None:
    """Compares the ops of this device with the reference on the CPU."""
    with backend("reference"):
        expected = computed(CHECKED, "cpu")
    found = computed(CHECKED, device_type())
    print(f"\n{CHECKED}: this device against the reference")
    for name, right in expected.items():
        difference = (found[name].double() - right.double()).norm() / right.double().norm()
        same = torch.equal(found[name].view(torch.uint8), right.view(torch.uint8))
        agrees = same or (name.startswith("e4m3 scaled_mm") and bool(difference <= FLOAT8_ERROR))
        results.add(check=name, agrees=agrees, same_bits=same, difference=difference.item())
        said = "same bits" if same else f"differs by {difference:.2e} of its norm"
        print(f"  {name:<46}{said}{'' if agrees else ': WRONG'}", flush=True)


def gemms(shape: tuple[int, int, int]) -> Iterator[tuple[str, Callable[[], list[Call]]]]:
    """(name, function that makes the calls, one for each set of inputs) of every way to multiply."""
    t, k, n = shape
    pairs = [(random(t, k), random(n, k)) for _ in range(INPUT_SETS)]
    yield "bf16", lambda: [functools.partial(torch.mm, x, w.t()) for x, w in pairs]

    def by_rows(fmt: str) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        both = [(kernels.quantize_rows(x, fmt), kernels.quantize_rows(w, fmt)) for x, w in pairs]
        return [(x.q_MK, w.q_MK.t(), x.scale_M1, w.scale_M1.t()) for x, w in both]

    int8 = by_rows("int8")
    if device_type() == "cuda":
        yield from _triton_gemms(int8)
    for name in ("_int_mm", "_int_mm + scales"):
        yield name, lambda name=name: [int_mm_calls(*each)[name] for each in int8]  # type: ignore[misc]
    if device_type() != "cuda" or "e4m3" not in formats():
        return
    rows = by_rows("e4m3")
    both = [(kernels.quantize_tensor(x, "e4m3"), kernels.quantize_tensor(w, "e4m3")) for x, w in pairs]
    tensors = [(x.q_MK, w.q_MK.t(), x.scale_11, w.scale_11) for x, w in both]
    for scales, operands in (("tensor", tensors), ("rows", rows)):
        for fast in (False, True):
            name = f"_scaled_mm, {scales}{', fast accumulation' if fast else ''}"
            call = functools.partial(torch._scaled_mm, out_dtype=torch.bfloat16, use_fast_accum=fast)
            yield name, lambda call=call, operands=operands: [functools.partial(call, *o) for o in operands]  # type: ignore[misc]


def _triton_gemms(operands: list[tuple[Any, ...]]) -> Iterator[tuple[str, Callable[[], list[Call]]]]:
    from lptune.kernels.triton.gemm import GemmConfig, hopper_configs, scaled_mm

    configs = (GemmConfig(128, 128, 8, 3, 1), GemmConfig(128, 128, 4, 3, 2), GemmConfig(128, 256, 8, 4, 1))
    for config in (*configs, *hopper_configs(torch.cuda.get_device_capability()[0], is_int8=True, tma=True)):
        call = functools.partial(scaled_mm, out_dtype=torch.bfloat16, config=config)
        yield (
            f"Triton INT8 {tuple(config)}",
            lambda call=call: [functools.partial(call, *each) for each in operands],  # type: ignore[misc]
        )


@contextmanager
def clocks() -> Iterator[dict[str, float]]:
    """Yields a dict that gets, at the end of the block, the medians of what nvidia-smi read while it ran:
    clock of the processors, power, temperature. It stays empty where nvidia-smi does not say.
    """
    command = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu"]
    command += ["--format=csv,noheader,nounits"]
    if torch.cuda.is_available():
        command.append(f"--id=GPU-{torch.cuda.get_device_properties().uuid}")
    readings, ended, medians = list[list[float]](), threading.Event(), dict[str, float]()

    def read() -> None:
        while not ended.is_set():
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            try:
                clock, watts, celsius = map(float, done.stdout.split(","))
            except ValueError:  # a virtual GPU says [N/A]
                return
            readings.append([clock, watts, celsius])

    thread = threading.Thread(target=read, daemon=True)
    if shutil.which("nvidia-smi") is not None:
        thread.start()
    try:
        yield medians
    finally:
        ended.set()
        if thread.ident is not None:
            thread.join()
        columns = zip(*readings, strict=True)
        medians.update(zip(("MHz", "W", "C"), map(statistics.median, columns), strict=False))


def time_gemms(shape: tuple[int, int, int], results: Results) -> None:
    """Times each way, and prints it beside bf16."""
    t, k, n = shape
    bf16 = None
    print(f"\n{t} x {k} x {n}, output", flush=True)
    if device_type() != "cuda":
        print("  not on a CPU: lptune's Triton kernel, torch's float8 GEMM, clocks and power")
    for name, make in gemms(shape):
        try:
            calls = make()
            for call in calls:
                call()  # compiles, while the GPU idles
            with clocks() as read:
                ms = median_ms(calls, BATCH_MS)
        except Exception as error:
            why = " ".join(str(error).split())[:300]
            results.add(gemm=name, failed=f"{type(error).__name__}: {why}")
            print(f"  {name:<44}failed: {why[:90]}", flush=True)
            continue
        bf16 = bf16 or ms
        results.add(gemm=name, ms=ms, flops_per_s=2e3 * t * k * n / ms, of_bf16=bf16 / ms, **read)
        at = "".join(f"{value:>7.0f} {unit}" for unit, value in read.items())
        print(f"  {name:<44}{2e-9 * t * k * n / ms:9.1f} TFLOP/s {bf16 / ms:6.2f}x of bf16{at}", flush=True)


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--shape", type=int, nargs=3, default=SHAPE, metavar=("T", "K", "N"))
    args = arguments.parse_args()
    with Results(args.json) as results:
        print(f"torch {torch.__version__}, {device_name()}")
        shape = tuple(args.shape)
        for run in (
            lambda: check(results),
            lambda: time_gemms(shape, results),
            lambda: time_quantizers(shape[:2], results, ("int8",)),
        ):
            try:
                run()
            except Exception as error:  # the next one may work all the same
                traceback.print_exc()
                results.add(failed=f"{type(error).__name__}: {error}"[:500])
    return int(any(row.get("agrees") is False or "failed" in row for row in results.rows))


if __name__ == "__main__":
    sys.exit(main())
