"""Times a grouped linear layer, as the experts of a mixture are, in bf16 (torch) and in lptune's kinds.

    python benchmarks/experts.py [--shape TOKENS TOP_K EXPERTS K N]... [--kind KIND]... [--json FILE]

Of TOKENS * TOP_K rows, each expert gets what a random router gives it. `layer` is forward and backward with
all quantizers; the columns after it are the three GEMMs alone, on operands that are quantized already, with
the copies that they make of them. TFLOP/s count each row once. bf16's GEMMs are torch's grouped_mm.
"""

import functools
from collections.abc import Callable

import torch
from harness import Results, device_name, device_type, median_ms, parser, strict_compilation

from lptune import kernels, linear
from lptune.config import PrecisionConfig
from lptune.kernels import layer_handle
from lptune.linear.grouped import grad_weight_of_groups, multiply_groups
from lptune.models.hf.experts import GroupedLinear

GPU_SHAPES = [(16384, 8, 128, 2048, 1536), (16384, 8, 128, 768, 2048), (16384, 4, 32, 2880, 5760)]
CPU_SHAPES = [(256, 2, 8, 128, 256)]
KINDS = ("int8_rowcol", "float8_rowwise")
FMT = {"int8_rowcol": "int8", "int8_rotated": "int8", "float8_rowwise": "e4m3"}
_LAYER = layer_handle(-1)
Calls = dict[str, Callable[[], object]]


def layer_call(
    kind: str, num_groups: int, x_SK: torch.Tensor, g_SN: torch.Tensor, ends_E: torch.Tensor, most: int
) -> Calls:
    """Forward and backward of a layer of `kind`. most: no group has more rows."""
    with torch.device(device_type()):
        layers = torch.nn.Sequential(GroupedLinear(num_groups, x_SK.shape[1], g_SN.shape[1]).bfloat16())
    torch.nn.init.normal_(layers[0].weight, std=0.02)
    linear.convert(
        layers, PrecisionConfig(kind=kind, verify=False, emulate=device_type() == "cpu" and "float8" in kind)
    )
    x_SK = x_SK.clone().requires_grad_()

    def run() -> None:
        x_SK.grad = layers[0].weight.grad = None
        layers[0](x_SK, ends_E, most).backward(g_SN)

    return {"layer": run}


def high_gemms(w_RK: torch.Tensor, x_SK: torch.Tensor, g_SN: torch.Tensor, ends_E: torch.Tensor) -> Calls:
    """The three GEMMs in bf16."""
    return {
        "output": lambda: multiply_groups(x_SK, w_RK, ends_E, by_rows=True),
        "grad_input": lambda: multiply_groups(g_SN, w_RK, ends_E, by_rows=False),
        "grad_weight": lambda: grad_weight_of_groups(g_SN, x_SK, ends_E),
    }


def low_gemms(
    fmt: str, w_RK: torch.Tensor, x_SK: torch.Tensor, g_SN: torch.Tensor, ends_E: torch.Tensor, most: int
) -> Calls:
    """The three GEMMs on 8-bit operands, and the quantizers of x and of W."""
    bf16 = torch.bfloat16
    x, g, w = (kernels.quantize_rows(each, fmt) for each in (x_SK, g_SN, w_RK))
    x_columns, g_columns = (kernels.quantize_grouped_columns(each, fmt, ends_E) for each in (x_SK, g_SN))
    mm = functools.partial(kernels.grouped_mm, emulate=device_type() == "cpu" and fmt != "int8")
    outer = functools.partial(kernels.grouped_outer, emulate=device_type() == "cpu" and fmt != "int8")
    return {
        "output": lambda: mm(x[0], w[0], x[1], w[1], ends_E, bf16, _LAYER, 0, by_rows=True),
        "grad_input": lambda: mm(g[0], w[0], g[1], None, ends_E, bf16, _LAYER, 1, by_rows=False),
        "grad_weight": lambda: outer(
            g_columns[0], x_columns[0], g_columns[1], x_columns[1], ends_E, bf16, _LAYER, most=most
        ),
        "rows of x": lambda: kernels.quantize_rows(x_SK, fmt),
        "columns of x": lambda: kernels.quantize_grouped_columns(x_SK, fmt, ends_E),
        "rows of W": lambda: kernels.quantize_rows(w_RK, fmt),
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--shape", nargs=5, type=int, action="append")
    arguments.add_argument("--kind", action="append")
    args = arguments.parse_args()
    strict_compilation()
    device = device_type()
    with Results(args.json) as results:
        print(device_name())
        for tokens, top_k, num_groups, k, n in args.shape or (GPU_SHAPES if device == "cuda" else CPU_SHAPES):
            logits = torch.randn(tokens, num_groups) + torch.randn(num_groups) / 2
            chosen = logits.topk(top_k).indices
            ends = chosen.flatten().bincount(minlength=num_groups).cumsum(0).int().to(device)
            x, g = (torch.randn(tokens * top_k, size, device=device).bfloat16() for size in (k, n))
            w = torch.randn(num_groups * n, k, device=device).bfloat16() * 0.02
            print(f"{tokens} tokens x {top_k}, {num_groups} experts, {k} to {n}: ms (TFLOP/s)")
            for kind in ("none", *(args.kind or KINDS)):
                if kind == "none":
                    calls = high_gemms(w, x, g, ends)
                else:
                    calls = low_gemms(FMT[kind], w, x, g, ends, tokens)
                calls = layer_call(kind, num_groups, x, g, ends, tokens) | calls
                ms = {name: median_ms([call]) for name, call in calls.items()}
                results.add(shape=[tokens, top_k, num_groups, k, n], kind=kind, ms=ms)
                flops = 2e-9 * tokens * top_k * k * n
                work = {"layer": 3 * flops, **dict.fromkeys(("output", "grad_input", "grad_weight"), flops)}
                cells = (
                    f"{name} {each:.3f}" + (f" ({work[name] / each:,.0f})" if name in work else "")
                    for name, each in ms.items()
                )
                print(f"  {kind:<16}" + ", ".join(cells), flush=True)


if __name__ == "__main__":
    main()
