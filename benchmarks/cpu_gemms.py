"""INT8 GEMMs of a CPU by instruction set: ours, torch's and float32's, in three shapes and three layouts.

    python benchmarks/cpu_gemms.py [--threads 1] [--rounds 7] [--shape T K N]... [--json FILE]

For each instruction set of lptune's GEMM that this CPU has, a process of its own (`LPTUNE_KERNELS`, and the
limits of ATen and oneDNN) prints multiply-adds per second: lptune's GEMM and torch's, each with scales and a
result in bfloat16, and float32's matmul. They take turns; the fastest of the rounds counts. Layouts, of a and
b: `NT` output (both contiguous along the contraction), `NN` grad_input, `TN` grad_weight (neither is). The
last line of a set is what a run on such a CPU takes, by a timing. INT8 results are compared with float64's.
"""

import os
import subprocess
import sys
from functools import partial
from typing import Any

import torch
from harness import Results, device_name, fastest_ms, parser
from torch import Tensor

from lptune.kernels import cpu_gemms, native
from lptune.kernels.native.library import INSTRUCTION_SETS

SHAPES = [(2048, 2048, 2048), (2048, 256, 256), (2048, 2048, 8192)]
LIMITS = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx_vnni": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2_VNNI"},
    "avx512_vnni": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "amx": {},
}


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--shape", type=int, nargs=3, action="append", metavar=("T", "K", "N"))
    arguments.add_argument("--only", choices=INSTRUCTION_SETS, help="this one, in this process")
    args = arguments.parse_args()
    if args.only:
        return one_set(args)
    print(f"torch {torch.__version__}, {device_name()}; 10^9 multiply-adds a second, {args.threads} threads")
    failed = 0
    for name in INSTRUCTION_SETS:
        variables = {**os.environ, "LPTUNE_KERNELS": name, **LIMITS[name]}
        done = subprocess.run([sys.executable, *sys.argv, "--only", name], env=variables)
        failed |= done.returncode
    return failed


def one_set(args: Any) -> int:
    if native.instruction_set() != args.only:
        print(f"\n{args.only}: not on this CPU", flush=True)
        return 0
    torch.set_num_threads(args.threads)
    print(f"\n{args.only:<22}{'lptune':>8}{'torch':>8}{'float32':>9}   of float32", flush=True)
    path = args.json and args.json.with_stem(f"{args.json.stem}-{args.only}")
    wrong = False
    with Results(path, instruction_set=args.only, threads=args.threads) as results:
        for shape in args.shape or SHAPES:
            for layout in ("NT", "NN", "TN"):
                wrong |= row(shape, layout, args.rounds, results)
        del os.environ["LPTUNE_KERNELS"]  # the library that is loaded stays
        chosen, slowdown = cpu_gemms.fastest_int8_gemm(), cpu_gemms.bfloat16_slowdown()
        results.update(chosen=chosen, bfloat16_slowdown=slowdown)
    bf16 = "" if slowdown is None else f"; a bfloat16 GEMM takes {slowdown:.1f}x the time of a float32 GEMM"
    print(f"  a run takes {chosen}{bf16}", flush=True)
    return int(wrong)


def row(shape: tuple[int, int, int], layout: str, rounds: int, results: Results) -> bool:
    """Measures and prints one line; whether a result was wrong."""
    t, k, n = shape
    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.randint(-127, 128, size, dtype=torch.int8, generator=generator) for size in ((t, k), (k, n))
    )
    if layout[0] == "T":
        a = a.t().contiguous().t()
    if layout[1] == "T":
        b = b.t().contiguous().t()
    scales = torch.rand(t, 1, generator=generator), torch.rand(1, n, generator=generator)
    high = a.float(), b.float()
    gemms = {
        "lptune": partial(native.int8_mm, a, b, *scales, torch.bfloat16),
        "torch": partial(_torchs, a, b, *scales),
        "float32": partial(torch.mm, *high),
    }
    exact = ((a.double() @ b.double()).float() * scales[0] * scales[1]).bfloat16()
    right = {name: torch.equal(gemms[name](), exact) for name in ("lptune", "torch")}
    ms = fastest_ms(gemms, rounds)  # type: ignore[arg-type]
    rates = {name: t * k * n / each / 1e6 for name, each in ms.items()}
    results.add(shape=shape, layout=layout, ms=ms, exact=right)
    note = "" if right["torch"] else "  (torch's is not exact)"
    print(
        f"  {f'{t} x {k} x {n}':<16}{layout:>4}{rates['lptune']:>8.0f}{rates['torch']:>8.0f}"
        f"{rates['float32']:>9.0f}{rates['lptune'] / rates['float32']:>10.2f}x{note}",
        flush=True,
    )
    if not right["lptune"]:
        print("  WRONG: lptune's result differs from float64's", flush=True)
    return not right["lptune"]


def _torchs(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    return native.apply_scales(torch._int_mm(a, b), scale_a, scale_b, torch.bfloat16)


if __name__ == "__main__":
    sys.exit(main())
