"""Operations of a decoder layer and the bytes that they move in a GPU's memory, counted without a GPU.

A layer runs forward and backward on fake tensors, which have shapes but no values, as on one GPU: 8-bit
weights are kept for the step, operands have the layouts of CUDA. Each operation is counted with the bytes of
its inputs and results, each tensor once. An operation that repeats an earlier one on the same tensors counts
as repeated: the compiler runs it once (q, k and v quantize one x).

What the counts leave out: bytes that a kernel reads twice (PASSES has them), and what the compiler fuses,
which is why elementwise operations have a class of their own.

tests/benchmarks/test_traffic.py holds the counts to what is necessary. from_counts.py makes times of them,
and benchmarks/traffic.py prints them.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lptune import linear, models
from lptune.config import OptimizerConfig, ParallelConfig, PrecisionConfig
from lptune.hardware.devices import Device
from lptune.plan.dry_run import as_on, fake_world
from lptune.training import build_optimizer

GEMM, QUANTIZE, ATTENTION, COPY, ELEMENTWISE = "gemm", "quantize", "attention", "copy", "elementwise"

PASSES = {
    "quantize_columns": 2,
    "quantize_rows_and_columns": 2,
    "quantize_tensor": 2,
    "quantize_tensor_both_ways": 2,
}
"""Quantizers that read their input more than once: an amax needs all of a column, or of the tensor."""

_COPIES = ("clone", "copy", "contiguous", "pad", "index", "repeat", "view_copy", "transpose_copy")
# Not `cat`, by which a rotation swaps halves of a head: the compiler reads both halves where they are.


class Entry(NamedTuple):
    """One operation with the bytes that it moves."""

    phase: str  # weights | forward | backward
    what: str  # one of GEMM, QUANTIZE, ATTENTION, COPY, ELEMENTWISE
    name: str  # of the op, without its namespace
    read: int  # bytes
    written: int
    repeated: bool
    sizes: tuple[int, ...]  # of a GEMM: M, K, N

    @property
    def moved(self) -> int:
        """Bytes that its kernels read and write."""
        return self.read * PASSES.get(self.name, 1) + self.written


class TrafficMode(TorchDispatchMode):
    """Lists every operation that is dispatched within it and is no view."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[Entry] = []
        self.phase = "forward"
        self._seen: dict[Any, Any] = {}
        self._firsts: dict[tuple[int, int], int] = {}
        """Storage and version of a result of a repeated operation -> storage of that of the first one, which
        compiled code has alone. A tensor that is written to is another one."""
        self._kept: list[Any] = []

    def enter_phase(self, name: str) -> None:
        """Operations belong to phase `name` from now on; none repeats one of an earlier phase."""
        self.phase = name
        self._seen.clear()
        self._firsts.clear()
        self._kept.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = [each for each in tree_leaves((args, kwargs)) if _counts(each)]
        results = [each for each in tree_leaves(out) if _counts(each)]
        memory = {each.untyped_storage()._cdata for each in inputs}
        writes = func._schema.is_mutable
        if not results or (not writes and all(r.untyped_storage()._cdata in memory for r in results)):
            return out  # a view, or nothing
        name = func._schema.name.split("::")[1]
        if "empty" in name:  # moves no bytes
            return out
        key = (func, *(self._identity(each) for each in tree_leaves((args, kwargs))))
        is_repeated = not writes and key in self._seen
        self.entries.append(
            Entry(
                self.phase,
                _class_of(func, name),
                name,
                _bytes(inputs),
                _bytes(results),
                is_repeated,
                (*inputs[0].shape, inputs[1].shape[1]) if _class_of(func, name) == GEMM else (),
            )
        )
        # Their memory is kept, so that no later tensor gets it. The tensors are not: autograd takes a
        # gradient that nothing else refers to, and copies any other.
        storages = [each.untyped_storage() for each in (*inputs, *results)]
        if is_repeated:
            for again, first in zip(results, self._seen[key][len(inputs) :], strict=True):
                self._firsts[again.untyped_storage()._cdata, again._version] = first._cdata
            self._kept += storages
        else:
            self._seen[key] = storages
        return out

    def _identity(self, value: Any) -> Any:
        found = _identity(value)
        if not isinstance(found, tuple):
            return found
        storage, offset, version, *rest = found
        return self._firsts.get((storage, version), storage), offset, version, *rest


def _counts(value: Any) -> bool:
    """Whether `value` is a tensor of the device: layer handles, on the CPU, are real and not fake."""
    return isinstance(value, Tensor) and value.dtype != torch.int64


def _identity(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value if isinstance(value, int | float | str | bool | torch.dtype | None) else repr(value)
    if not _counts(value):
        return "handle"
    place = (value.untyped_storage()._cdata, value.storage_offset(), value._version)
    return *place, tuple(value.shape), value.stride()


def _bytes(tensors: list[Tensor]) -> int:
    """The bytes of the tensors; of an expanded one those that exist, of one that comes twice those of one."""
    found = {_identity(each): each for each in tensors}
    return sum(
        each.element_size()
        * math.prod(size for size, stride in zip(each.shape, each.stride(), strict=True) if stride)
        for each in found.values()
    )


def _class_of(func: Any, name: str) -> str:
    if name in ("mm", "addmm", "bmm", "scaled_mm", "block_scaled_mm"):
        return GEMM
    if func.namespace == "lptune":
        return QUANTIZE
    if "attn" in name or "attention" in name:
        return ATTENTION
    return COPY if name.lstrip("_").startswith(_COPIES) else ELEMENTWISE


@contextmanager
def one_gpu(device: Device | None = None) -> Iterator[Any]:
    """A world of one rank, in which lptune decides as on `device`; None is any Hopper."""
    with fake_world(ParallelConfig(), 1) as world, as_on("cuda", device):
        yield world


def layer_traffic(
    kind: str, config: models.Facts, tokens: int, seq_len: int, device: Device | None = None
) -> list[Entry]:
    """The operations of one layer of `config` in a step with one micro-batch of `tokens` tokens, on one GPU.
    device: None is any Hopper.

    Phases: `weights` makes the compute weights of the whole model; then `forward` and `backward` of a layer
    in the middle, whose input needs a gradient.
    """
    with one_gpu(device) as world:
        model = models.build_on_meta(config.with_layers([0]))
        if kind != "none":
            precision = PrecisionConfig(kind=kind)
            linear.convert(model, precision, device=torch.device("cuda"), num_tokens=tokens)
        linear.gather_in_8_bits(model, torch.bfloat16)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            linear.use_compute_weights(model, torch.bfloat16, world.mesh)
            weights = linear.ComputeWeights.of(model)
            assert weights is not None
            (block,) = model.blocks
            mode = TrafficMode()
            with mode:
                mode.enter_phase("weights")
                weights.put_in_place()
            inputs: dict[nn.Module, tuple[Any, ...]] = {}
            hook = block.register_forward_pre_hook(inputs.__setitem__)
            with torch.no_grad():
                model.hidden_states(torch.empty(tokens // seq_len, seq_len, dtype=torch.int64))
            hook.remove()
            hidden, *shared = inputs[block]
            hidden = torch.empty_like(hidden, requires_grad=True)
            with mode:
                mode.enter_phase("forward")
                out = block(hidden, *shared)
                mode.enter_phase("backward")
                out.backward(torch.empty_like(out))
                mode.enter_phase("end")
        return mode.entries


def update_traffic(cfg: OptimizerConfig) -> float:
    """Bytes that an update moves on a GPU for each element of a weight matrix."""
    with one_gpu(), FakeTensorMode(allow_non_fake_inputs=True):
        layer = nn.Linear(2048, 2048, False, dtype=torch.bfloat16 if cfg.master == "none" else torch.float32)
        optimizer = build_optimizer(layer, cfg)
        mode = TrafficMode()
        for context in (nullcontext(), mode):  # the first update makes the state
            layer.weight.grad = torch.empty_like(layer.weight)
            with context:
                optimizer.step()
    listed = sum(each.moved for each in mode.entries) / layer.weight.numel()
    if cfg.kind == "muon":
        return listed
    # One kernel reads g, w and moments in float32, and writes w and moments. What is not stored so is decoded
    # before it and encoded after it, by the operators that are listed.
    num_moments = int(cfg.momentum > 0) if cfg.kind == "sgd" else 2
    return 4.0 * (3 + 2 * num_moments) + listed
