"""Every kind, compiled and checkpointed in every way: one cell of that matrix, and all of them as a page.

    python -m tests.proofs.matrix [--only TEXT] [--write docs/matrix.md]

A cell trains a tiny decoder for three steps through `parallelize` (or, for `whole`, compiled in one graph
without it, under autocast) and checks, on every converted layer,

- counts: each of the three steps ran the planned 8-bit GEMMs and no other, recomputed as the mode says;
- graphs: one for all blocks of the model and one for its head and loss, and none compiled after the first
  step;
- bits: the first step's output, grad_input and grad_weight equal those of the layer called eagerly on the
  same x and g. The GEMMs are exact or ordered alike, so equal bits mean equal quantized operands, the weight
  among them;
- errors: the first step's three results are as far from float64 as `predicted_errors` says (up to
  sqrt(3) times as far for the head's two gradients, see there).

x and g are read inside the compiled graph by an identity op put around `low_precision_linear`.

tests/proofs/test_matrix.py runs a set of cells in which every pair of values of two factors meets.
"""

import argparse
import contextlib
import copy
import dataclasses
import itertools
import math
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch._dynamo
from torch import Tensor
from torch.distributed.tensor import DTensor

from lptune import distributed, linear, models, training
from lptune.config import (
    PRECISION_KINDS,
    DataConfig,
    FinetuneConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
)
from lptune.kernels import KEY, LIVE, NUMBER, LayerAmaxes, layer_handle
from lptune.linear import module as linear_module
from lptune.linear.module import low_precision_linear
from lptune.numerics import random_key
from tests.proofs.noise import predicted_errors, relative_error

FACTORS: dict[str, tuple[str, ...]] = {
    "kind": tuple(kind for kind in PRECISION_KINDS if kind != "none"),
    "compile": ("none", "block", "model", "whole"),
    "checkpointing": ("none", "selective", "full"),
    "model": ("tied head", "frozen layer", "bias"),
}
# `model`: FSDP's hooks would cut the graph; on one rank there are none.
_GRAPHS = {"none": 0, "block": 2, "model": 1, "whole": 1}
NUM_STEPS, BATCH, SEQ_LEN = 3, 2, 32


class Cell(NamedTuple):
    """One combination of values, one of each factor."""

    kind: str
    compile: str
    checkpointing: str
    model: str


@dataclass
class Outcome:
    """What a cell found. No failures: it passed."""

    failures: list[str] = field(default_factory=list)
    num_graphs: int = 0
    num_gemms: int = 0
    num_recomputed: int = 0
    errors: dict[str, float] = field(default_factory=dict)
    """GEMM -> the largest error of a layer over its bound."""
    seconds: float = 0.0

    def check(self, holds: bool, claim: str) -> None:
        if not holds:
            self.failures.append(claim)


def cells() -> list[Cell]:
    """All of them."""
    return [Cell(*values) for values in itertools.product(*FACTORS.values())]


def run(cell: Cell, *, fused: bool = False) -> Outcome:
    """Trains the cell's model for NUM_STEPS and checks it; whatever raises is a failure too.

    fused: with q, k, v and gate, up as one layer each, four layers to a block instead of seven: quicker.
    """
    started = time.perf_counter()
    outcome = Outcome()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        with distributed.session("cpu") as world, _tapped() as taps:
            _run(cell, fused, world, taps, outcome)
    except Exception as error:  # a cell that cannot run is one that failed
        outcome.failures.append(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
    outcome.seconds = time.perf_counter() - started
    return outcome


def _run(cell: Cell, fused: bool, world: distributed.World, taps: "Taps", outcome: Outcome) -> None:
    model, plan = _build(cell, fused, world)
    generator = torch.Generator().manual_seed(0)
    optimizer = training.build_optimizer(model, OptimizerConfig(lr=1e-3))
    low = linear.LowPrecision(model, plan, optimizer, world=world, verify=False)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=cell.compile == "whole")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(NUM_STEPS):
            tokens_BS = torch.randint(0, 256, (BATCH, SEQ_LEN + 1), generator=generator)
            with linear.verify_step(model, plan, 1) as verified, low.step(step, num_passes=1):
                low.micro_batch(0)
                with autocast:
                    loss = model(tokens_BS[:, :-1], None, tokens_BS[:, 1:])
                (loss / tokens_BS.numel()).backward()
            num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            if step == 0:
                outcome.num_graphs, outcome.num_gemms = num_graphs, verified.num_gemms
                outcome.num_recomputed = verified.num_recomputed
                _check_first_step(model, plan, taps, outcome)
            outcome.check(num_graphs == outcome.num_graphs, f"step {step + 1} compiled again")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    outcome.check(outcome.num_graphs == _GRAPHS[cell.compile], f"{outcome.num_graphs} graphs")
    # A compiler need not recompute what nobody reads; without one, `full` means every output of a block.
    in_blocks = sum("layers" in layer.name for layer in plan.converted)
    least, most = (in_blocks if cell.compile == "none" else 0), in_blocks
    if cell.checkpointing != "full":
        least = most = 0
    outcome.check(least <= outcome.num_recomputed <= most, f"{outcome.num_recomputed} outputs recomputed")


def _build(cell: Cell, fused: bool, world: distributed.World) -> tuple[models.Decoder, linear.Plan]:
    preset = copy.deepcopy(models.PRESETS["llama3_1"]["tiny"])
    preset["tie_word_embeddings"] = cell.model == "tied head"
    preset["attention_bias"] = preset["mlp_bias"] = cell.model == "bias"
    config = dataclasses.replace(models.config_from_dict(preset, "tiny"), fused_projections=fused)
    model = models.build_on_meta(config)
    precision = PrecisionConfig(kind=cell.kind, skip=(), emulate=not cell.kind.startswith("int8"))
    plan = linear.convert(model, precision)
    if cell.model == "frozen layer":  # in every block: another set of trained weights is another graph
        for block in model.model.layers:
            block.mlp.down_proj.weight.requires_grad_(False)  # type: ignore[union-attr, operator]
    if cell.compile == "whole":
        distributed.checkpoint_activations(model.model.layers, cell.checkpointing)
        distributed.compile_forward([model], cell.compile, fullgraph=True)
    else:
        cfg = FinetuneConfig(
            model=ModelConfig(path="unused"),
            data=DataConfig(source="unused"),
            precision=precision,
            compile=cell.compile,
            activation_checkpointing=cell.checkpointing,
        )
        distributed.parallelize(model, world, cfg)
    model.to_empty(device="cpu")
    model.reset_buffers("cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = model.initial_value(name, 0)
            local, start = distributed.local_rows(parameter)
            # A bias of zero would prove nothing. A small head would give all tokens the same probabilities,
            # and a gradient whose values repeat: their rounding is no noise (tests/proofs/noise.py).
            value = value + 0.1 if name.endswith("bias") else value * (8 if "lm_head" in name else 1)
            local.copy_(value[start : start + local.shape[0]])
    return model, plan


def _check_first_step(model: models.Decoder, plan: linear.Plan, taps: "Taps", outcome: Outcome) -> None:
    for layer in plan.converted:
        assert layer.spec is not None
        assert layer.number is not None
        weight = model.get_parameter(f"{layer.name}.weight")
        seen = {what: taps[layer.number, what] for what in ("x", "output", "g", "grad_input")}
        # Recomputed for backward. In one graph of several blocks the compiler adds residuals without rounding
        # them in between, where it has them at hand: then it is not the x of forward, bit for bit.
        again = taps.get((layer.number, "x again"), seen["x"])
        if weight.grad is not None:
            grad = weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad
            seen["grad_weight"] = grad.to(seen["x"].dtype)
        plain = linear.dequantized(weight)
        full = plain.full_tensor() if isinstance(plain, DTensor) else plain
        w_NK = full.detach().to(seen["x"].dtype)
        key = max(1, random_key(0, 0, layer.name))  # of the first step, for stochastic rounding
        alone = _alone(layer.spec, again, w_NK, seen["g"], key)
        recomputed = taps.get((layer.number, "output again"))
        if recomputed is not None and layer.spec.is_low("output"):
            # The GEMM's result is kept, or the GEMM runs again.
            same = torch.equal(recomputed, seen["output"]) or torch.equal(recomputed, alone["output"])
            outcome.check(same, f"{layer.name}: other bits in the recomputed output")
        alone["output"] = _alone(layer.spec, seen["x"], w_NK, seen["g"], key)["output"]
        predicted = predicted_errors(layer.spec, again, w_NK, seen["g"])
        predicted["output"] = predicted_errors(layer.spec, seen["x"], w_NK, seen["g"])["output"]
        truth = _truth(again, w_NK, seen["g"]) | {"output": _truth(seen["x"], w_NK, seen["g"])["output"]}
        for gemm in predicted.keys() & seen.keys():
            if layer.spec.is_low(gemm):
                outcome.check(torch.equal(seen[gemm], alone[gemm]), f"{layer.name}: other bits in {gemm}")
            error = relative_error(seen[gemm], truth[gemm])
            least, _, bound = predicted[gemm]
            if layer.name == "lm_head" and gemm != "output":
                # The -1 of every token's gradient is rounded alike (tests/proofs/noise.py).
                least, bound = 0.0, math.sqrt(3) * bound
            outcome.check(
                least <= error <= bound,
                f"{layer.name}: error {error:.5f} of {gemm}, not in [{least:.5f}, {bound:.5f}]",
            )
            outcome.errors[gemm] = max(outcome.errors.get(gemm, 0.0), error / bound)


def _alone(spec: linear.LinearSpec, x_TK: Tensor, w_NK: Tensor, g_TN: Tensor, key: int) -> dict[str, Tensor]:
    """The layer by itself, eagerly, under a number of its own: with an empty history for delayed scaling."""
    if spec.kind.keys.stores_low:
        return {"output": x_TK @ w_NK.t(), "grad_input": g_TN @ w_NK, "grad_weight": g_TN.t() @ x_TK}
    x_TK, w_NK = x_TK.clone().requires_grad_(), w_NK.clone().requires_grad_()
    number = LIVE.enter()
    LIVE[number].amaxes = LayerAmaxes(torch.zeros(3), torch.zeros(3), lambda: True)
    handle = layer_handle(number)
    handle[KEY] = key
    out_TN = low_precision_linear(x_TK, w_NK, handle, spec)
    out_TN.backward(g_TN)
    LIVE.leave(number)
    assert x_TK.grad is not None
    assert w_NK.grad is not None
    return {"output": out_TN.detach(), "grad_input": x_TK.grad, "grad_weight": w_NK.grad}


def _truth(x_TK: Tensor, w_NK: Tensor, g_TN: Tensor) -> dict[str, Tensor]:
    x64, w64, g64 = x_TK.double(), w_NK.double(), g_TN.double()
    return {"output": x64 @ w64.t(), "grad_input": g64 @ w64, "grad_weight": g64.t() @ x64}


# (layer's number, "x" | "output" | "g" | "grad_input") -> the tensor that passed there last; "x again" and
# "output again": while backward ran
Taps = dict[tuple[int, str], Tensor]
_taps: Taps = {}


@contextlib.contextmanager
def _tapped() -> Iterator[Taps]:
    """Records what goes into and comes out of every LowPrecisionLinear, compiled or not."""
    _taps.clear()
    linear_module.low_precision_linear = _tapped_linear
    try:
        yield _taps
    finally:
        linear_module.low_precision_linear = low_precision_linear


def _tapped_linear(x_TK: Tensor, w_NK: Tensor, layer: Tensor, spec: linear.LinearSpec, *more: Any) -> Tensor:
    out_TN = low_precision_linear(_tap(x_TK, layer, "x", "grad_input"), w_NK, layer, spec, *more)
    return _tap(out_TN, layer, "output", "g")  # type: ignore[no-any-return]


@torch.library.custom_op("lptune_tests::tap", mutates_args=())
def _tap(x: Tensor, layer: Tensor, forward: str, backward: str) -> Tensor:
    is_again = forward in ("x", "output") and torch._C._current_graph_task_id() != -1
    _taps[int(layer[NUMBER]), forward + " again" * is_again] = x.detach().clone()
    return x.clone()


@_tap.register_fake
def _(x: Tensor, layer: Tensor, forward: str, backward: str) -> Tensor:
    return torch.empty_like(x)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, layer, _, ctx.backward = inputs
    ctx.save_for_backward(layer)


def _tap_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return _tap(grad, ctx.saved_tensors[0], ctx.backward, ""), None, None, None


_tap.register_autograd(_tap_gradient, setup_context=_remember)


def page(outcomes: dict[Cell, Outcome], command: str) -> str:
    """docs/matrix.md: a row per way to compile, a column per checkpointing and model; equal kinds are one."""
    columns = list(itertools.product(FACTORS["checkpointing"], FACTORS["model"]))
    failed = {cell: outcome for cell, outcome in outcomes.items() if outcome.failures}
    worst = {
        gemm: max((outcome.errors.get(gemm, 0.0) for outcome in outcomes.values()), default=0.0)
        for gemm in ("output", "grad_input", "grad_weight")
    }
    lines = [
        "# Every kind, compiled and checkpointed in every way",
        "",
        f"Written by `{command}` (torch {torch.__version__}, CPU; float8 and MX emulated). Each cell",
        "trains a tiny Llama of two blocks for three steps, everything but a tied head in low precision; a",
        "number is how many GEMMs with 8-bit operands its first step ran, in brackets those of them that",
        "backward recomputed. What a cell asserts stands at the top of `tests/proofs/matrix.py`: counts,",
        "graphs, bits and errors. `FAILED` is a cell that did not hold; its reasons are below.",
        "",
        f"{len(outcomes) - len(failed)} of {len(outcomes)} cells hold. Largest error over its bound: "
        + ", ".join(f"{gemm} {ratio:.2f}" for gemm, ratio in worst.items())
        + ".",
        "",
        "`compile`: `none`, `block` and `model` as in a config, on one rank, which needs no FSDP; `whole` is",
        "the whole model in one graph under autocast, without `parallelize`. Graphs of all three steps: "
        + ", ".join(f"`{mode}` {number}" for mode, number in _GRAPHS.items())
        + ".",
        "",
        "| kind | compile | " + " | ".join(f"{how}, {model}" for how, model in columns) + " |",
        "|---|---|" + "---|" * len(columns),
    ]
    of_kind: dict[str, dict[str, str]] = {}  # kind -> way to compile -> its cells
    for kind, mode in itertools.product(FACTORS["kind"], FACTORS["compile"]):
        found = [outcomes.get(Cell(kind, mode, how, model)) for how, model in columns]
        if any(found):
            of_kind.setdefault(kind, {})[mode] = " | ".join(_text(outcome) for outcome in found)
    for kinds, of_mode in grouped(of_kind):
        for number, (modes, cells_) in enumerate(grouped(of_mode)):
            names = "" if number else ", ".join(f"`{kind}`" for kind in kinds)
            lines.append(f"| {names} | {', '.join(modes)} | {cells_} |")
    for cell, outcome in failed.items():
        lines += ["", f"**{', '.join(cell)}**", *(f"- {failure}" for failure in outcome.failures[:5])]
    return "\n".join(lines) + "\n"


_Value = TypeVar("_Value")


def grouped(rows: dict[str, _Value]) -> list[tuple[list[str], _Value]]:
    """The names whose values are equal, and that value, in the order of the first name of each group."""
    found: list[tuple[list[str], _Value]] = []
    for name, value in rows.items():
        names = next((names for names, other in found if other == value), None)
        if names is None:
            found.append(([name], value))
        else:
            names.append(name)
    return found


def _text(outcome: Outcome | None) -> str:
    if outcome is None:
        return "not run"
    again = f" ({outcome.num_recomputed})" if outcome.num_recomputed else ""
    return "**FAILED**" if outcome.failures else f"{outcome.num_gemms}{again}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run the matrix of kinds and modes.")
    parser.add_argument("--only", default="", help="cells whose values, joined by commas, contain this")
    parser.add_argument("--write", type=Path, help="the page to write")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")  # torch's own; the suite turns them into errors
    outcomes = {}
    for cell in cells():
        if options.only in ",".join(cell):
            outcome = outcomes[cell] = run(cell)
            print(f"{outcome.seconds:5.1f} s  {', '.join(cell)}: {outcome.failures or 'holds'}", flush=True)
    text = page(outcomes, "make matrix" if not options.only else f"tests.proofs.matrix --only {options.only}")
    if options.write:
        options.write.write_text(text, encoding="utf-8")
    else:
        print(text)
    return int(any(outcome.failures for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
