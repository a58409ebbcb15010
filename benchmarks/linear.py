"""Times forward and backward of a linear layer or a decoder block: every kind against bf16 and torchao.

    python benchmarks/linear.py [--threads N] [--shape T K N]... [--kind KIND]... [--mode eager|compiled]...
    python benchmarks/linear.py --block llama3_2/3b [--tokens T] [--kind KIND]... [--mode eager|compiled]...

Prints milliseconds and the ratio to bf16 in the same rounds: bf16 and a layer take turns in several rounds,
and the fastest round counts, because other load can only add time. First lptune's layers, of all shapes; then
torchao's, if torchao is installed and has the kind; its INT8 last, because it measures its 27 configurations
one after the other for each shape. Runs on a GPU if there is one, else on the CPU. A kind without an 8-bit
GEMM on this device is emulated and marked; its time says nothing about the kind. A kind that fails is named,
and the other kinds are still measured.

bf16 and lptune's layer are compiled as one graph, or fail. torchao's graph may break; breaks are counted.
"""

import importlib.util
import platform
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from comm import build  # benchmarks/comm.py
from harness import Results, device_name, device_type, fastest_ms, parser, strict_compilation
from torch import nn

from lptune import linear, models
from lptune.base.errors import UserError
from lptune.config import PRECISION_KINDS, PrecisionConfig
from lptune.hardware.host_memory import keep_freed_memory
from lptune.models.attention import make_visibilities

CPU_SHAPES = [(2048, 2048, 2048), (2048, 2048, 5632)]
GPU_SHAPES = [(8192, 4096, 14336), (8192, 4096, 4096), (8192, 14336, 4096), (8192, 4096, 1024)]
ROUNDS = 9
TORCHAO_KINDS = {
    "int8_rowcol": "",
    "float8_tensorwise": "tensorwise",
    "float8_rowwise": "rowwise",
    "float8_rowwise_with_gw_hp": "rowwise_with_gw_hp",
}
"""The kinds that torchao has, and its names of the float8 recipes."""

Shape = tuple[int, int, int]
Once = Callable[[], None]
Step = Callable[..., Once]
Build = Callable[[], tuple[nn.Module, Step]]
"""A new module to be converted, and what makes a forward and backward of it when it is."""


def convert_to_ours(kind: str, module: nn.Module) -> tuple[str, linear.Plan]:
    """Converts `module` in place. Returns the kind's label, marked if it is emulated, and the plan."""
    try:
        plan = linear.convert(module, PrecisionConfig(kind=kind, skip=()))
    except UserError:
        plan = linear.convert(module, PrecisionConfig(kind=kind, skip=(), emulate=True))
    linear.StochasticRounding(module, plan, seed=0).start(0, 0)
    emulated = plan.backend(next(module.parameters()).device.type) == "emulation"
    return f"{kind} (emulated)" if emulated else kind, plan


def convert_to_torchao(kind: str, module: nn.Module) -> str | None:
    """Applies torchao's conversion for this kind in place; returns None if torchao has none."""
    try:
        if kind == "int8_rowcol":
            from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig
            from torchao.quantization import quantize_

            # Since torchao 0.15, without module_swap this call changes nothing.
            quantize_(module, Int8MixedPrecisionTrainingConfig(module_swap=True))
            return "torchao int8_rowcol"
        recipe = TORCHAO_KINDS.get(kind)
        if recipe is None or not has_float8():
            return None
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(module, config=Float8LinearConfig.from_recipe_name(recipe))
        return f"torchao {kind}"
    except ImportError:
        return None


def has_float8() -> bool:
    """Whether torchao has float8 GEMMs here."""
    return device_type() == "cuda" and torch.cuda.get_device_capability() >= (8, 9)


def one_layer(shape: Shape, compiled: bool) -> Build:
    """An nn.Linear of `shape` in bfloat16: x (T, K), weight (N, K)."""
    tokens, k, n = shape

    def build_layer() -> tuple[nn.Module, Step]:
        layer = nn.Linear(k, n, bias=False, dtype=torch.bfloat16, device=device_type())
        return nn.Sequential(layer), partial(_step, (tokens, k), (tokens, n), compiled, ())

    return build_layer


def one_block(preset: str, tokens: int, compiled: bool) -> Build:
    """A decoder block of the preset in bfloat16, on one row of `tokens` tokens, without recomputation."""

    def build_block() -> tuple[nn.Module, Step]:
        model = build(preset)
        assert isinstance(model, models.Decoder)
        device, config = torch.device(device_type()), model.config
        block = model.model.layers[0].to(torch.bfloat16).to_empty(device=device)
        for parameter in block.parameters():
            nn.init.normal_(parameter, 0.0, 0.02)
        tables = model.model.ropes
        tables.to_empty(device=device)
        model.reset_buffers(device)
        layer = config.layers[0]
        kinds = dict(zip(config.rope_kinds, tables, strict=True))
        rope = kinds[layer.rope](None, tokens) if layer.rope else None
        visible = make_visibilities(config, None, 1, tokens, device, torch.bfloat16)[layer]
        size = (1, tokens, config.hidden_size)
        return block, partial(_step, size, size, compiled, (rope, visible))

    return build_block


def _step(
    x_size: tuple[int, ...],
    g_size: tuple[int, ...],
    compiled: bool,
    more: tuple[Any, ...],
    module: nn.Module,
    *,
    fullgraph: bool = True,
) -> Once:
    run = torch.compile(module, dynamic=False, fullgraph=fullgraph) if compiled else module
    x = torch.randn(x_size, dtype=torch.bfloat16, device=device_type(), requires_grad=True)
    g = torch.randn(g_size, dtype=torch.bfloat16, device=device_type())

    def once() -> None:
        x.grad = None
        module.zero_grad(set_to_none=True)
        run(x, *more).backward(g)

    once()
    return once


def bf16_step(build: Build) -> Once:
    """Forward and backward of the module in bf16, the baseline of all comparisons."""
    module, step = build()
    return step(module)


def our_step(build: Build, kind: str) -> tuple[str, Once]:
    """(label, forward and backward) of a converted module, verified to run in 8 bits."""
    module, step = build()
    label, plan = convert_to_ours(kind, module)
    once, scaling = step(module), linear.DelayedScaling(plan, next(module.parameters()).device)

    def once_in_a_step() -> None:
        with scaling.step():
            once()

    with linear.verify_step(module, plan, 1):
        once_in_a_step()
    return label, once_in_a_step


def torchao_step(build: Build, kind: str) -> tuple[str, Once] | None:
    """As `our_step`, for torchao's module; None if torchao is not installed or has no such kind."""
    module, step = build()
    label = convert_to_torchao(kind, module)
    return None if label is None else (label, step(module, fullgraph=False))


def compare(
    build: Build,
    what: str,
    mode: str,
    whose: str,
    kinds: Sequence[str],
    rounds: int,
    deadline: float,
    results: Results,
) -> None:
    """Times each kind of lptune's or of torchao's layers beside bf16; begins with none after `deadline`."""
    torch._dynamo.reset()
    bf16 = bf16_step(build)
    make = {"lptune": our_step, "torchao": torchao_step}[whose]
    print(f"\n{what}, {mode}: ms per forward + backward, {whose}", flush=True)
    for kind in kinds:
        row, breaks = {"what": what, "mode": mode, "kind": kind}, torch._dynamo.utils.counters["graph_break"]
        breaks.clear()
        if time.monotonic() > deadline:
            print(f"  {f'{whose} {kind}':<38}not run, the time was over", flush=True)
            continue
        try:
            made = make(build, kind)
        except Exception as error:
            message = f"{type(error).__name__}: {' '.join(str(error).split())}"
            results.add(**row, label=f"{whose} {kind}", failed=message[:500])
            print(f"  {f'{whose} {kind}':<38}failed: {message[:120]}", flush=True)
            continue
        if made is None:
            continue
        label, once = made
        times = fastest_ms({"none": bf16, label: once}, rounds)
        label += f", {breaks.total()} graph breaks" if breaks.total() else ""
        ms, of_bf16 = times[made[0]], times["none"]
        results.add(**row, label=label, ms=ms, bf16_ms=of_bf16, ratio=of_bf16 / ms)
        print(f"  {label:<38}{ms:10.2f}  {of_bf16 / ms:6.2f}x of bf16 ({of_bf16:.2f})", flush=True)


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments.add_argument("--shape", type=int, nargs=3, action="append", metavar=("T", "K", "N"))
    arguments.add_argument("--block", metavar="PRESET", help="a block of this model instead of layers")
    arguments.add_argument("--tokens", type=int, default=8192, help="of a block")
    arguments.add_argument("--kind", action="append", choices=[*PRECISION_KINDS][1:])
    arguments.add_argument("--mode", action="append", choices=["eager", "compiled"])
    arguments.add_argument("--rounds", type=int, default=ROUNDS)
    arguments.add_argument("--minutes", type=float, default=60.0, help="begin no further kind after them")
    args = arguments.parse_args()
    deadline = time.monotonic() + 60 * args.minutes
    torch.set_num_threads(args.threads)
    if device_type() == "cpu":
        keep_freed_memory()  # as training does; otherwise the kernel's zeroing of pages is timed
    # Each timed layer is compiled separately: for each kind bf16's, ours and torchao's.
    strict_compilation(4 * len(PRECISION_KINDS))
    shapes = [tuple(s) for s in args.shape] if args.shape else None
    shapes = shapes or (GPU_SHAPES if device_type() == "cuda" else CPU_SHAPES)
    kinds = args.kind or [kind for kind in PRECISION_KINDS if kind != "none"]
    passes = [("lptune", kinds)]
    if importlib.util.find_spec("torchao") is not None:
        of_torchao = [kind for kind in kinds if kind in TORCHAO_KINDS]
        passes += [("torchao", [kind]) for kind in sorted(of_torchao, key="int8_rowcol".__eq__)]
    with Results(args.json) as results:
        print(f"torch {torch.__version__}, Python {platform.python_version()}, {device_name()}")
        for whose, of_them in passes:
            for what in [args.block] if args.block else shapes:
                for mode in args.mode or ["eager", "compiled"]:
                    if args.block:
                        name = f"a block of {what}, {args.tokens} tokens"
                        build = one_block(what, args.tokens, mode == "compiled")
                    else:
                        name, build = " x ".join(map(str, what)), one_layer(what, mode == "compiled")
                    compare(build, name, mode, whose, of_them, args.rounds, deadline, results)
    return int(any("failed" in row and row["label"].startswith("lptune") for row in results.rows))


if __name__ == "__main__":
    sys.exit(main())
