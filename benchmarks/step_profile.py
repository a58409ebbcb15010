"""Where the time of a step goes, for benchmarks/step.py: its operators by purpose, and Amdahl's bound.

An operator's time is its self time: that of the host on a CPU, that of its kernels on a GPU. Its purpose is
that of the first name that matches, from the operator upwards through the ranges that contain it. GEMMs of
the head are told from those of blocks by the vocabulary among their shapes; the compiled graph that contains
such a GEMM belongs to the head with all its kernels.

Amdahl: if the linear layers' GEMMs take the share f of a step of `none`, and 8-bit GEMMs are r times as fast,
no step can be more than 1 / (1 - f + f / r) times as fast.
"""

import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from harness import device_type, synchronize
from step_variants import UPDATE, Step
from torch import nn

from lptune import linear
from lptune.config import PrecisionConfig
from lptune.kernels import (
    GRAD_INPUT,
    GRAD_WEIGHT,
    OUTPUT,
    k_major,
    layer_handle,
    quantize_columns,
    quantize_rows,
    scaled_mm,
)

GEMMS, HEAD = "linear layers' GEMMs", "head and loss"
ELEMENTWISE, COPIES, OTHER = "compiled elementwise", "copies and casts", "other: Python, autograd, embedding"
PURPOSES = {
    "weights: FSDP, compute weights": (
        r"FSDP::|fsdp::|c10d::|^record_param_comms|_foreach_copy|chunk_cat|split_with_sizes_copy"
    ),
    "quantizers": r"lptune::(quantize|cast|transposed_copy)|torchao.*quantize",
    "attention": r"attention",
    GEMMS: r"^lptune::\w*mm$|^(aten|mkldnn|torchao)::\w*(mm|addmm|bmm|linear\w*|matmul)$",
    ELEMENTWISE: r"graph_\d+_(cpp|kernel)|^triton_|^cpp_fused|kernel_cpp",
    HEAD: r"nll_loss|log_softmax|cross_entropy",
}
COPYING = r"^aten::(copy_|_to_copy|to|clone|contiguous|cat)$|memcpy"
PROFILED_STEPS = 3
ROUNDS = 9


class Cost(NamedTuple):
    """An operator in a step."""

    purpose: str
    name: str
    """With the shapes of its inputs."""
    count: float
    """Calls in a step."""
    ms: float
    """Self time in a step."""


def profile(step: Callable[[], Step], vocab_size: int) -> list[Cost]:
    """The costs of a step, longest first, means of PROFILED_STEPS steps. vocab_size: rows of the head."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device_type() == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        for _ in range(PROFILED_STEPS):
            with torch.profiler.record_function("step"):
                step()
    events = [each for each in profiler.events() if each.device_type == torch.autograd.DeviceType.CPU]
    gemms = [each for each in events if purpose_by_name(each) == GEMMS]
    of_head = {graph_of(each) for each in gemms if vocab_size in _sizes(each)} - {None}
    counts, times_ms = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for each in events:
        us = each.self_device_time_total if device_type() == "cuda" else each.self_cpu_time_total
        purpose = purpose_by_name(each)
        is_of_head = vocab_size in _sizes(each) if purpose == GEMMS else graph_of(each) in of_head
        if purpose in (GEMMS, ELEMENTWISE, COPIES, OTHER) and is_of_head:
            purpose = HEAD
        shapes = [list(shape) for shape in each.input_shapes or () if shape]
        key = purpose, f"{each.name} {shapes or ''}" if purpose in (GEMMS, HEAD) else each.name
        counts[key] += 1
        times_ms[key] += us / 1e3  # type: ignore[assignment]
    found = [
        Cost(*key, counts[key] / PROFILED_STEPS, ms / PROFILED_STEPS) for key, ms in times_ms.items() if ms
    ]
    return sorted(found, key=lambda cost: -cost.ms)


def _chain(event: Any) -> Iterator[Any]:
    """The event and the ranges that contain it, from the inside outwards."""
    while event is not None:
        yield event
        event = event.cpu_parent


def _sizes(event: Any) -> set[int]:
    return {size for shape in event.input_shapes or () for size in shape if isinstance(size, int)}


def graph_of(event: Any) -> str | None:
    """The compiled graph that ran the event."""
    return next((each.name for each in _chain(event) if "CompiledFxGraph" in each.name), None)


def purpose_by_name(event: Any) -> str:
    """The purpose of an event by its name and those of its ranges. GEMMs may be those of the head."""
    names = [each.name for each in _chain(event)]
    if UPDATE in names:
        return "update: clipping, AdamW"
    for name in names:
        for purpose, pattern in PURPOSES.items():
            if re.search(pattern, name):
                return purpose
    # A copy serves the range that it is in, so copies are what is left.
    return COPIES if any(re.search(COPYING, name) for name in names) else OTHER


def by_purpose(costs: list[Cost]) -> dict[str, float]:
    """Milliseconds of a step by purpose, most first."""
    sums = Counter[str]()
    for cost in costs:
        sums[cost.purpose] += cost.ms  # type: ignore[assignment]
    return dict(sums.most_common())


def lines(name: str, costs: list[Cost], most: int = 16) -> Iterator[str]:
    """The profile as text: by purpose, then the longest operators."""
    total = sum(cost.ms for cost in costs)
    yield f"profile of {name}: {total:.1f} ms a step, with the profiler"
    for purpose, ms in by_purpose(costs).items():
        yield f"  {purpose:<38}{ms:>10.2f} ms {ms / total:>7.1%}"
    for cost in costs[:most]:
        yield f"    {cost.name[:84]:<86}{cost.count:>6.1f} x{cost.ms:>9.2f} ms {cost.ms / total:>7.1%}"


class Speeds(NamedTuple):
    """Milliseconds of all linear layers of a step, forward and backward, in three ways; medians."""

    high_ms: float
    """The GEMMs in the compute dtype."""
    scaled_mm_ms: float
    """The GEMMs in INT8, with operands that are quantized already."""
    linear_ms: float
    """The whole low-precision layers: quantizers, GEMMs, autograd."""
    gemm_ratios: list[float]
    """high_ms / scaled_mm_ms of each round."""
    linear_ratios: list[float]
    """high_ms / linear_ms of each round."""


def speeds(
    shapes: dict[tuple[int, int], int],
    num_tokens: int,
    rounds: int = ROUNDS,
    dtype: torch.dtype = torch.bfloat16,
) -> Speeds:
    """Times int8_rowcol's layers in turns with those of `dtype`, the compute dtype. shapes: (out, in) -> the
    number of such layers.
    """
    ways = [_ways(num_tokens, n, k, dtype) for n, k in shapes]
    sums = list[list[float]]()
    for turn in range(rounds + 1):
        times = [0.0, 0.0, 0.0]
        for count, calls in zip(shapes.values(), ways, strict=True):
            for i, call in enumerate(calls):
                synchronize()
                started = time.perf_counter()
                call()
                synchronize()
                times[i] += 1e3 * count * (time.perf_counter() - started)
        if turn:  # the first one warms up
            sums.append(times)
    medians = [statistics.median(column) for column in zip(*sums, strict=True)]
    return Speeds(*medians, [high / mm for high, mm, _ in sums], [high / whole for high, _, whole in sums])


def _ways(t: int, n: int, k: int, dtype: torch.dtype) -> list[Callable[[], object]]:
    """A layer (n, k) on t tokens: its three GEMMs in `dtype`, in INT8, and the whole INT8 layer, compiled."""
    options: dict[str, Any] = {"dtype": dtype, "device": device_type()}
    x_TK, w_NK, g_TN = (torch.randn(*shape, **options) for shape in ((t, k), (n, k), (t, n)))

    def high() -> None:
        F.linear(x_TK, w_NK)
        g_TN @ w_NK
        g_TN.t() @ x_TK

    transposed = k_major(x_TK.device)
    x, w, g = (quantize_rows(each, "int8") for each in (x_TK, w_NK, g_TN))
    w_in = quantize_rows(w_NK, "int8", transposed=transposed)
    x_columns, g_columns = (quantize_columns(each, "int8", transposed=transposed) for each in (x_TK, g_TN))
    handle = layer_handle(-1)

    def int8() -> None:
        scaled_mm(x.q_MK, w.q_MK.t(), x.scale_M1, w.scale_M1.t(), dtype, handle, OUTPUT)
        scaled_mm(g.q_MK, w_in.q_MK, g.scale_M1, None, dtype, handle, GRAD_INPUT)
        columns = g_columns.scale_1K.t(), x_columns.scale_1K
        scaled_mm(g_columns.q_MK.t(), x_columns.q_MK, *columns, dtype, handle, GRAD_WEIGHT)

    layer = nn.Sequential(nn.Linear(k, n, bias=False, **options))
    linear.convert(layer, PrecisionConfig(kind="int8_rowcol", skip=(), verify=False))
    run, leaf_TK = torch.compile(layer, dynamic=False, fullgraph=True), x_TK.clone().requires_grad_()

    def whole() -> None:
        leaf_TK.grad = None
        layer.zero_grad(set_to_none=True)
        run(leaf_TK).backward(g_TN)

    return [high, int8, whole]


def bound(share: float, ratio: float) -> float:
    """Amdahl's: how many times as fast a step is if `share` of it is `ratio` times as fast."""
    return 1 / (1 - share + share / ratio)
