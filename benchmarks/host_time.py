"""Host time of lptune's ops: the microseconds from the call in Python to the launch.

    python benchmarks/host_time.py [--calls 300] [--rounds 15] [--json FILE]

A kernel of a small layer runs for 20 microseconds. If the host needs longer for its launch, the GPU waits.

`first way` is what a launch costs if Triton derives the compiled kernel from the arguments; `again` is what
it costs if the launch is remembered (lptune/kernels/triton/again.py). Both are measured in turns in one
process. Without a GPU a stand-in takes the launches (stand_in_gpu.py): its time is that of all the Python,
and does not contain the driver's call in C.
"""

import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import harness
import torch
from stand_in_gpu import stand_in_gpu

from lptune import kernels
from lptune.kernels import backend
from lptune.kernels.triton import again

TOKENS, IN_FEATURES, OUT_FEATURES = 256, 512, 512  # small: a GPU must not be what limits the time


def ops(device: str) -> dict[str, Callable[[], object]]:
    """A call of each op that a step of the four main kinds has, in the layouts of CUDA, and of some more."""
    t, k, n = TOKENS, IN_FEATURES, OUT_FEATURES
    x, w = torch.randn(t, k, device=device).bfloat16(), torch.randn(n, k, device=device)
    q_TK, q_NK = (torch.randint(-127, 128, (size, k), dtype=torch.int8, device=device) for size in (t, n))
    scale_T1, scale_1N, scale_1K = (torch.rand(s, device=device) for s in ((t, 1), (1, n), (1, k)))
    layer, keyed, partial = kernels.layer_handle(-1), kernels.layer_handle(-1), functools.partial
    keyed[kernels.KEY] = 2**40
    return {
        "scaled_mm": partial(
            kernels.scaled_mm, q_TK, q_NK.t(), scale_T1, scale_1N, torch.bfloat16, layer, kernels.OUTPUT
        ),
        "quantize_rows": partial(kernels.quantize_rows, x, "int8"),
        "quantize_rows, a weight": partial(
            kernels.quantize_rows, w.float(), "int8", rounded_to=torch.bfloat16
        ),
        "quantize_columns": partial(kernels.quantize_columns, x, "int8", transposed=True),
        "quantize_rows_and_columns": partial(
            kernels.quantize_rows_and_columns, x, "int8", multiplier_1K=scale_1K, transposed=True
        ),
        "quantize_tensor_both_ways": partial(kernels.quantize_tensor_both_ways, x, "e5m2"),
        "quantize_blocks": partial(kernels.quantize_blocks, x, (1, 128), "e4m3"),
        "quantize_row_and_column_blocks": partial(
            kernels.quantize_row_and_column_blocks, x, 128, "e4m3", transposed=True
        ),
        "block_amaxes, a weight": partial(kernels.block_amaxes, w.float(), 128, 0),
        "quantize_by_amax, a weight": partial(
            kernels.quantize_by_amax,
            w.float(),
            torch.rand(n // 128, k // 128, device=device),
            "e4m3",
            block=128,
            rounded_to=torch.bfloat16,
        ),
        "quantize_delayed": partial(kernels.quantize_delayed, x, "e4m3", layer, "x"),
        "quantize_rows_stochastic": partial(kernels.quantize_rows_stochastic, x, "int8", keyed),
        "quantize_columns_stochastic": partial(kernels.quantize_columns_stochastic, x, "int8", keyed),
    }


@contextmanager
def gpu(folder: Path) -> Iterator[str]:
    """The GPU, or the stand-in, to which all ops then go; yields the device of the tensors."""
    if harness.device_type() == "cuda":
        yield "cuda"
        return
    with ExitStack() as stack:
        for choices in backend.BACKENDS.values():
            stack.enter_context(mock.patch.dict(choices, {"cpu": ("triton",)}))
        backend.choose_backend.cache_clear()
        stack.callback(backend.choose_backend.cache_clear)
        stack.enter_context(stand_in_gpu(folder, recorded=False))
        yield "cpu"


@contextmanager
def first_way() -> Iterator[None]:
    """No launch is remembered."""

    def run(
        key: object,
        launches: Sequence[again.Launch],
        tensors: Sequence[torch.Tensor | None],
        varying: tuple[int, ...] = (),
    ) -> None:
        for each in launches:
            each.run(tensors, varying)

    with (
        mock.patch.object(again, "again", return_value=False),
        mock.patch.object(again, "first", run),
    ):
        yield


def microseconds(call: Callable[[], object], num_calls: int) -> float:
    """Host time of one of `num_calls` calls. The GPU is idle at the start, and its queue does not fill up."""
    harness.synchronize()
    started = time.perf_counter()
    for _ in range(num_calls):
        call()
    found = (time.perf_counter() - started) / num_calls * 1e6
    harness.synchronize()
    return found


def main() -> None:
    """Measures each op in both ways and prints medians with their ranges."""
    parser = harness.parser(__doc__)
    parser.add_argument("--calls", type=int, default=300, help="calls of one measurement")
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each way")
    args = parser.parse_args()
    ways = {"first way": first_way, "again": nullcontext}
    with (
        tempfile.TemporaryDirectory() as folder,
        gpu(Path(folder)) as device,
        harness.Results(args.json) as results,
        torch.no_grad(),
    ):
        print(f"{'microseconds':32}" + "".join(f"{way:>28}" for way in ways))
        for name, call in ops(device).items():
            for _ in range(3):
                call()
            times: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(args.rounds):
                for way, entered in ways.items():
                    with entered():
                        times[way].append(microseconds(call, args.calls))
            row = "".join(
                f"{statistics.median(found):14.1f} ({min(found):5.1f} to {max(found):5.1f})"
                for found in times.values()
            )
            print(f"{name:32}{row}", flush=True)
            results.add(op=name, **times)


if __name__ == "__main__":
    main()
