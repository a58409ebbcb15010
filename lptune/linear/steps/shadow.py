"""The shadow check: how far is each layer's low precision from high precision, on the weights of now?

    errors = ShadowPass(model, plan)
    with errors.comparing():                  the precision of training; each layer compares its own GEMMs
        errors.backward(loss(batch))
    with errors.high(), torch.no_grad():      every layer in compute dtype
        high_loss = loss(batch)
    errors.by_layer()

The comparison is local. A layer gets the x and the g that low precision gives it, and computes its three
GEMMs twice: as it is trained, and in compute dtype with the unquantized weight. So each error has one layer
as its cause. Gradients of two whole passes would not tell that: the error of one layer reaches the gradients
of all others and grows with the depth, so no threshold holds for all layers. They would also need a second
set of gradients in memory. The difference of the two losses is what all errors do together.

A check must not change the training:

- No gradient of a parameter is computed by autograd. Each layer adds a `probe` to its inputs, a number of
  which nothing depends, and `backward` asks for the gradient of the probe alone. Autograd then runs the
  backward of every layer, and accumulates into no parameter; FSDP finds no gradient to reduce.
- Compiled code is neither used nor compiled: the passes are eager.
- Amaxes of `float8_delayed` are measured into a copy, kernels count for nobody, and torch's random state is
  restored. Random bits of stochastic rounding depend on step and layer, so they are those of the step.

An 8-bit gather does not bring the unquantized weight. The layer then gathers its master in compute dtype, one
layer at a time. All ranks run the same layers in the same order, as FSDP demands too.

Shapes: T tokens, K in_features, N out_features.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lptune.kernels import GEMMS, LIVE, LayerAmaxes, not_recorded
from lptune.linear.dtensors import as_sharded
from lptune.linear.grouped import grad_weight_of_groups, multiply_groups
from lptune.linear.kind import Needs, Saved
from lptune.linear.module import LowPrecisionLinear, compute_weight
from lptune.linear.plan import Plan
from lptune.linear.weights.master_weight import plain_rows
from lptune.linear.weights.row_tensor import RowTensor
from lptune.numerics.formats import E2M1

_BLOCK = 2**22
"""Elements that are compared at a time: the float32 copies of a block are all that a comparison allocates."""

NOT_FINITE_DB = -1000.0
"""The SQNR of a result with an inf or NaN that high precision does not have. A number, for JSON."""

_OPERANDS = {"output": ("x", "w"), "grad_input": ("g", "w"), "grad_weight": ("g", "x")}
"""The operands of each GEMM, in the order of the arguments of the ops `scaled_mm` and `block_scaled_mm`."""


class LayerErrors(NamedTuple):
    """The errors of one layer, on this rank. A signal-to-quantization-noise ratio (SQNR) is inf if low and
    high precision agree bit for bit, or the exact result is zero; NOT_FINITE_DB if only low is not finite.
    """

    output_sqnr_db: float
    grad_input_sqnr_db: float
    grad_weight_sqnr_db: float
    grad_weight_cosine: float
    """1 for equal directions. It does not see a wrong scale, which turns nothing; the SQNR does."""
    saturated: float
    """The largest fraction, over the quantized operands x, W and g, of non-zero elements that have the
    format's largest magnitude. An element that sets its row's scale is one of them, so a healthy fraction is
    one in a row."""
    underflowed: float
    """The largest fraction, over the quantized operands, of non-zero elements that were rounded to 0."""

    @property
    def worst_sqnr_db(self) -> float:
        return min(self[: len(GEMMS)])

    @property
    def worst_gemm(self) -> str:
        return GEMMS[self.index(self.worst_sqnr_db)]


class ShadowPass:
    """The passes of one shadow check. No weight may change while it exists."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        """model: with masters in place and sharded, not gathered (`distributed.reshard`). plan: of `convert`,
        without layers that tensor parallelism cut.
        """
        self._layers: dict[str, _Layer] = {}
        for layer in plan.converted:
            module = model.get_submodule(layer.name)
            assert isinstance(module, LowPrecisionLinear)
            self._layers[layer.name] = _Layer(module)
        device = next(iter(model.parameters())).device
        self._probe = torch.zeros((), device=device, requires_grad=True)

    @contextmanager
    def comparing(self) -> Iterator[None]:
        """Within it, the layers of the model run as in training, and their backward measures the errors."""
        with self._passes():
            for layer in self._layers.values():
                layer.replace(partial(_compared, layer, self._probe))
            yield

    @contextmanager
    def low(self) -> Iterator[None]:
        """Within it, the layers of the model run as in training, without backward."""
        with self._passes():
            yield

    @contextmanager
    def high(self) -> Iterator[None]:
        """Within it, the layers of the model run in compute dtype, without backward."""
        with self._passes():
            for layer in self._layers.values():
                layer.replace(partial(_high, layer))
            yield

    def backward(self, loss: Tensor) -> None:
        """Runs the backward of every layer, and computes no gradient of a parameter. Within `comparing`."""
        torch.autograd.grad(loss, [self._probe], allow_unused=True)

    def by_layer(self) -> dict[str, LayerErrors]:
        """The errors of each layer that ran forward and backward, by its name. Waits for the device."""
        return {name: layer.errors() for name, layer in self._layers.items() if layer.sums}

    @contextmanager
    def _passes(self) -> Iterator[None]:
        devices = [self._probe.device] if self._probe.is_cuda else []
        with ExitStack() as stack:
            stack.enter_context(not_recorded())
            stack.enter_context(torch.random.fork_rng(devices))
            if "torch._dynamo" in sys.modules:  # slow to import; without it nothing is compiled
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            for layer in self._layers.values():
                stack.callback(layer.restore)
                layer.measure_apart()
            yield


class _Layer:
    """A layer during the check, and the sums from which its errors are computed."""

    def __init__(self, module: LowPrecisionLinear) -> None:
        self.module = module
        self.weight = module.weight  # the master, or this rank's rows of it
        self.sums: dict[str, Tensor] = {}
        self._amaxes = LIVE[module.number].amaxes

    def replace(self, multiply: Callable[..., Tensor]) -> None:
        """Makes the layer multiply by `multiply`. An attribute of the instance hides the method of the class,
        so the layer has no branch for it.
        """
        vars(self.module)["_multiply"] = multiply

    def measure_apart(self) -> None:
        """Makes delayed scaling measure amaxes into a copy, as in a step."""
        if self._amaxes is not None:
            apart = LayerAmaxes(self._amaxes.past_3, self._amaxes.current_3.clone(), lambda: True)
            LIVE[self.module.number].amaxes = apart

    def restore(self) -> None:
        vars(self.module).pop("_multiply", None)
        LIVE[self.module.number].amaxes = self._amaxes

    def high_weight(self, w_NK: Tensor, x: Tensor) -> Tensor:
        """The weight in the dtype of x, not quantized. w_NK: the weight of the pass. A collective if w_NK was
        gathered in 8 bits.
        """
        if not isinstance(w_NK, RowTensor):
            return compute_weight(w_NK.detach(), x.dtype)
        rows = plain_rows(self.weight.detach())
        if not isinstance(rows, DTensor):
            return rows.to(x.device, x.dtype)
        sharded = as_sharded(rows, rows.to_local().to(x.device, x.dtype))
        assert isinstance(sharded, DTensor)
        return sharded.full_tensor()

    def forward(self, x_TK: Tensor, weight_NK: Tensor, ends: Tensor | None) -> tuple[Tensor, Saved]:
        """The forward of training. ends: of a grouped layer."""
        spec, handle = self.module.spec, self.module.handle
        if ends is None:
            return spec.kind.forward(spec, x_TK, weight_NK, handle, None)
        return spec.kind.grouped_forward(spec, x_TK, weight_NK, ends, handle)

    def compare(
        self, x_TK: Tensor, w_NK: Tensor, g_TN: Tensor, ends: Tensor | None, needs_grad_weight: bool
    ) -> Tensor | None:
        """Measures the errors of the three GEMMs; returns grad_input as training computes it."""
        spec, handle, weight_NK = self.module.spec, self.module.handle, compute_weight(w_NK, x_TK.dtype)
        kind, needs = spec.kind, Needs(True, needs_grad_weight)
        high_NK = self.high_weight(w_NK, x_TK)
        exact = {"x": x_TK, "w": high_NK, "g": g_TN}
        with _Operands() as operands:
            out_TN, saved = self.forward(x_TK, weight_NK, ends)
            if ends is None:
                found = kind.backward(spec, g_TN, weight_NK, saved, handle, needs)
            else:
                found = kind.grouped_backward(spec, g_TN, weight_NK, ends, saved, handle, needs, None)
            gx_TK, gw_NK = found
        exact_nonzero = {name: tensor.count_nonzero() for name, tensor in exact.items()}
        for gemm, name, nonzero, largest in operands.counts:
            exactly = exact_nonzero[name]
            self._add(f"operand {gemm} {name}", torch.stack([exactly, exactly - nonzero, largest]).double())
        assert gx_TK is not None
        self._add("output", _sums(out_TN, _multiply(x_TK, high_NK, ends, by_rows=True)))
        self._add("grad_input", _sums(gx_TK, _multiply(g_TN, high_NK, ends, by_rows=False)))
        if gw_NK is not None:
            high = g_TN.t() @ x_TK if ends is None else grad_weight_of_groups(g_TN, x_TK, ends)
            self._add("grad_weight", _sums(gw_NK, high))
        return gx_TK

    def _add(self, key: str, sums: Tensor) -> None:
        self.sums[key] = self.sums[key] + sums if key in self.sums else sums

    def errors(self) -> LayerErrors:
        sums = {key: value.tolist() for key, value in self.sums.items()}
        fractions = [[n / each[0] for n in each[1:]] for key, each in sums.items() if _counts(key, each)]
        # A rotated operand may have more elements that are not zero than before.
        worst = (max(0.0, *each) for each in zip(*fractions, strict=True))
        underflowed, saturated = worst if fractions else (0, 0)
        output, grad_input, grad_weight = (
            _sqnr_db(*sums[gemm][:2]) if gemm in sums else math.inf for gemm in GEMMS
        )
        cosine = _cosine(*sums["grad_weight"]) if "grad_weight" in sums else 1.0
        return LayerErrors(output, grad_input, grad_weight, cosine, saturated, underflowed)


class _Compared(torch.autograd.Function):
    """The layer as in training; its backward also compares. `probe` makes autograd run it."""

    @staticmethod
    def forward(
        ctx: Any, x_TK: Tensor, w_NK: Tensor, probe: Tensor, layer: _Layer, ends: Tensor | None
    ) -> Tensor:
        ctx.layer, ctx.ends = layer, ends
        ctx.save_for_backward(x_TK, w_NK, probe)
        # Nothing else may run here: selective checkpointing saves and repeats this forward op by op.
        return layer.forward(x_TK, compute_weight(w_NK, x_TK.dtype), ends)[0]

    @staticmethod
    def backward(ctx: Any, g_TN: Tensor) -> tuple[Tensor | None, ...]:
        x_TK, w_NK, probe = ctx.saved_tensors
        gx_TK = ctx.layer.compare(x_TK, w_NK, g_TN.contiguous(), ctx.ends, ctx.needs_input_grad[1])
        return gx_TK, None, torch.zeros_like(probe), None, None


def _compared(
    layer: _Layer, probe: Tensor, x: Tensor, w_NK: Tensor, *_: Any, ends: Tensor | None = None, **__: Any
) -> Tensor:
    """Takes the place of LowPrecisionLinear._multiply."""
    x_TK = x.reshape(-1, x.shape[-1])
    out_TN: Tensor = _Compared.apply(x_TK, w_NK, probe, layer, ends)  # type: ignore[no-untyped-call]
    return out_TN.reshape(*x.shape[:-1], out_TN.shape[-1])


def _high(layer: _Layer, x: Tensor, w_NK: Tensor, *_: Any, ends: Tensor | None = None, **__: Any) -> Tensor:
    """Takes the place of LowPrecisionLinear._multiply."""
    out_TN = _multiply(x.reshape(-1, x.shape[-1]), layer.high_weight(w_NK, x), ends, by_rows=True)
    return out_TN.reshape(*x.shape[:-1], out_TN.shape[-1])


def _multiply(x_TC: Tensor, w_NK: Tensor, ends: Tensor | None, *, by_rows: bool) -> Tensor:
    """In compute dtype: x times the weight, transposed if `by_rows`. ends: of a grouped layer."""
    if ends is not None:
        return multiply_groups(x_TC, w_NK, ends, by_rows=by_rows)
    return x_TC @ (w_NK.t() if by_rows else w_NK)


class _Operands(TorchDispatchMode):
    """Looks at the operands of the 8-bit GEMMs that run within it, whatever kind made them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: list[tuple[str, str, Tensor, Tensor]] = []
        """(GEMM, operand, number of non-zero elements, number of elements of the largest magnitude)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ops = torch.ops.lptune
        of_two = (ops.scaled_mm.default, ops.block_scaled_mm.default, ops.nvfp4_mm.default)
        if func in (*of_two, ops.grouped_mm.default):
            gemm = GEMMS[args[[each.name for each in func._schema.arguments].index("gemm")]]
        elif func is ops.grouped_outer.default:
            gemm = "grad_weight"
        else:
            gemm = None
        if gemm is not None:
            for name, q in zip(_OPERANDS[gemm], args[:2], strict=True):
                is_fp4 = func is ops.nvfp4_mm.default  # held in float8
                self.counts.append((gemm, name, *_count(q, E2M1.max if is_fp4 else None)))
        return func(*args, **(kwargs or {}))


def _count(q: Tensor, largest: float | None) -> tuple[Tensor, Tensor]:
    """(number of non-zero elements, number of elements of the largest magnitude). None: that of the dtype."""
    if q.dtype == torch.int8:
        return q.count_nonzero(), (q.abs() == 127).sum()
    # By their bits: the sign is the first, and magnitudes are in the order of the others.
    bits = torch.tensor(largest or torch.finfo(q.dtype).max, dtype=q.dtype).view(torch.uint8).item()
    magnitude = q.view(torch.uint8) & 0x7F
    return magnitude.count_nonzero(), (magnitude == bits).sum()


def _sums(low: Tensor, high: Tensor) -> Tensor:
    """Float64 (4,): the sums of high ** 2, (low - high) ** 2, low * high, low ** 2."""
    sums = torch.zeros(4, dtype=torch.float64, device=high.device)
    largest = high.abs().amax().float()
    unit = torch.where(largest > 0, largest, 1.0)  # squares of small gradients would be 0 in float32
    for low_part, high_part in _blocks(low, high):
        a, b = ((part.float() / unit).flatten() for part in (low_part, high_part))
        difference = a - b
        pairs = ((b, b), (difference, difference), (a, b), (a, a))
        sums += torch.stack([left @ right for left, right in pairs])
    return sums * unit.double() ** 2


def _blocks(*matrices: Tensor) -> Iterator[tuple[Tensor, ...]]:
    rows = max(1, _BLOCK // max(1, matrices[0].shape[1]))
    return zip(*(matrix.split(rows) for matrix in matrices), strict=True)


def _counts(key: str, counts: Sequence[float]) -> bool:
    return key.startswith("operand") and counts[0] > 0


def _sqnr_db(signal: float, noise: float) -> float:
    """inf without noise, without a signal, or if high precision is not finite itself: no error of `low`."""
    if not math.isfinite(signal) or signal == 0 or noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if math.isfinite(noise) else NOT_FINITE_DB


def _cosine(high: float, _: float, product: float, low: float) -> float:
    if not math.isfinite(high) or high == 0:
        return 1.0
    return product / math.sqrt(high * low) if math.isfinite(low) and low > 0 else 0.0
