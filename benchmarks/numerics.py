"""Measures the errors of each kind's three GEMMs against float64, beside the errors that formats predict.

    PYTHONPATH=. python benchmarks/numerics.py [--markdown] [--checkpoint FOLDER --text FILE]

- modes: one layer in every kind, eager and compiled, with each kind of activation checkpointing;
- folding: grad_input by column, requantized and folded; grad_weight by column and folded; on distributions
  that are hard for one of these options;
- with --checkpoint and --text: the same errors for every linear layer of a model, with x, W and g of one
  forward and backward pass over real tokens.

The bound is that of tests/proofs/noise.py, derived from formats and operands; nothing is fitted.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lptune import checkpoint, data, distributed, linear, models
from lptune.config import PRECISION_KINDS, PrecisionConfig
from lptune.kernels import GEMMS
from tests.proofs import noise

KINDS = tuple(PRECISION_KINDS)  # `none` first: bf16 itself
MODES = [(compile_, how) for compile_ in ("none", "block") for how in ("none", "selective", "full")]


class Operands(NamedTuple):
    """The operands x, W and g of a linear layer in one step."""

    x_TK: Tensor
    w_NK: Tensor
    g_TN: Tensor

    def truth(self) -> dict[str, Tensor]:
        x, w, g = (tensor.double() for tensor in self)
        return {"output": x @ w.t(), "grad_input": g @ w, "grad_weight": g.t() @ x}


class Block(nn.Module):
    """A layer in a block, for checkpointing and the compiler. The block's factors are powers of two, so only
    the layer rounds, and x and g of the layer follow exactly from x and g of the block.
    """

    def __init__(self, weight_NK: Tensor) -> None:
        super().__init__()
        n, k = weight_NK.shape
        self.linear = nn.Linear(k, n, bias=False, device="meta")
        self.linear.weight = nn.Parameter(weight_NK.clone())

    def forward(self, x_TK: Tensor) -> Tensor:
        out_TN: Tensor = self.linear(2.0 * x_TK)
        return 0.5 * out_TN


def precision(kind: str, **keys: str) -> PrecisionConfig:
    return PrecisionConfig(kind=kind, emulate=not kind.startswith(("int8", "none")), **keys)  # type: ignore[arg-type]


def run(
    operands: Operands, config: PrecisionConfig, compile_: str = "none", checkpointing: str = "none"
) -> tuple[dict[str, Tensor], dict[str, noise.Predicted], dict[str, Tensor]]:
    """(output, grad_input and grad_weight of a layer; their predicted errors; their float64 truth).

    The truth uses the weight that the layer has: `int8_weight_only` has rounded it permanently.
    """
    x_TK, w_NK, g_TN = operands
    block = Block(w_NK)
    plan = linear.convert(block, config)
    distributed.checkpoint_activations([block], checkpointing)
    torch._dynamo.reset()
    distributed.compile_forward([block], compile_, fullgraph=True)
    half_TK = (0.5 * x_TK).requires_grad_()
    scaling = linear.DelayedScaling(plan, torch.device("cpu"))  # empty, as in a first step
    linear.StochasticRounding(block, plan, seed=0).start(0, 0)
    with linear.verify_step(block, plan, 1), scaling.step():
        out_TN = block(half_TK)
        out_TN.backward(2.0 * g_TN)
    assert half_TK.grad is not None
    assert block.linear.weight.grad is not None
    results = {
        "output": 2.0 * out_TN.detach(),
        "grad_input": 0.5 * half_TK.grad,
        "grad_weight": block.linear.weight.grad,
    }
    held = Operands(x_TK, linear.dequantized(block.linear.weight.detach()).to(x_TK.dtype), g_TN)
    return results, noise.predicted_errors(plan.layers[0].spec, *held), held.truth()


# --- one layer in every mode


def modes_table(
    shape: tuple[int, int, int] = (512, 512, 768),
    kinds: Sequence[str] = KINDS,
    modes: Sequence[tuple[str, str]] = MODES,
) -> Iterator[list[str]]:
    """One row for each kind, or several if the modes of a kind differ."""
    generator = torch.Generator().manual_seed(0)
    t, k, n = shape
    x, w, g = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((t, k), (n, k), (t, n)))
    operands = Operands(x, w, g)
    yield ["kind", "modes", *(f"{gemm}: error, bound" for gemm in GEMMS), "holds"]
    for kind in kinds:
        rows: dict[tuple[str, ...], list[tuple[str, str]]] = {}
        for compile_, how in modes:
            results, predicted, truth = run(operands, precision(kind), compile_, how)
            errors = {gemm: noise.relative_error(results[gemm], truth[gemm]) for gemm in GEMMS}
            cells = [f"{errors[gemm]:.5f}, {predicted[gemm].bound:.5f}" for gemm in GEMMS]
            holds = all(predicted[gemm].least <= errors[gemm] <= predicted[gemm].bound for gemm in GEMMS)
            rows.setdefault((*cells, "yes" if holds else "NO"), []).append((compile_, how))
        for cells_, same in rows.items():
            named = ", ".join("/".join(("eager" if c == "none" else "compiled", how)) for c, how in same)
            yield [
                "bf16" if kind == "none" else kind,
                "all six" if len(same) == len(MODES) else named,
                *cells_,
            ]


# --- folding


def folding_tables() -> Iterator[list[list[str]]]:
    """SQNR in dB for each way to compute grad_input and grad_weight in INT8; the compute dtype is float32."""
    generator = torch.Generator().manual_seed(0)
    t, k, n = 1024, 2048, 1024

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def student(freedom: int, *shape: int) -> Tensor:
        chi2 = sum(normal(*shape).square() for _ in range(freedom))
        return normal(*shape) / (chi2 / freedom).sqrt()

    def with_outliers(x: Tensor, factor: float) -> Tensor:
        x[:, torch.randperm(x.shape[1], generator=generator)[:8]] *= factor
        return x

    ways = ("column", "requantized", "folded")
    table = [["grad_input, W / g", *ways]]
    for name, w, g in (
        ("gauss / gauss", normal(n, k), normal(t, n)),
        ("rows x lognormal(0.5) / gauss", normal(n, k) * (0.5 * normal(n, 1)).exp(), normal(t, n)),
        (
            "rows x lognormal(0.5) / 8 channels x 20",
            normal(n, k) * (0.5 * normal(n, 1)).exp(),
            with_outliers(normal(t, n), 20),
        ),
        ("student-t5 / student-t4", student(5, n, k), student(4, t, n)),
    ):
        operands = Operands(normal(t, k), w, g)
        table.append([name, *(f"{_sqnr(operands, 'grad_input', way):.1f}" for way in ways)])
    yield table

    table = [["grad_weight, x", "column (all / median channel)", "folded (all / median channel)"]]
    w, g = normal(n, k), normal(t, n)
    for name, x in (
        ("gauss", normal(t, k)),
        ("tokens x lognormal(0.7)", normal(t, k) * (0.7 * normal(t, 1)).exp()),
        ("8 channels x 20", with_outliers(normal(t, k), 20)),
        ("8 channels x 100", with_outliers(normal(t, k), 100)),
    ):
        table.append([name, *_all_and_median(Operands(x, w, g))])
    yield table


def _sqnr(operands: Operands, gemm: str, how: str, kind: str = "int8_rowcol") -> float:
    results, _, truth = run(operands, precision(kind, **{gemm: how}))
    return noise.sqnr_db(results[gemm], truth[gemm])


def _all_and_median(operands: Operands, kind: str = "int8_rowcol") -> list[str]:
    """SQNR of the whole grad_weight and of its median input channel, by column and folded."""
    cells = []
    for how in ("column", "folded"):
        results, _, truth = run(operands, precision(kind, grad_weight=how))
        gw_NK, truth_NK = results["grad_weight"].double(), truth["grad_weight"]
        ratio_K = truth_NK.norm(dim=0) / (gw_NK - truth_NK).norm(dim=0)
        median = 20 * float(ratio_K[truth_NK.norm(dim=0) > 0].median().log10())
        cells.append(f"{noise.sqnr_db(gw_NK, truth_NK):.1f} / {median:.1f}")
    return cells


# --- real activations


def real_operands(folder: Path, text: Path, num_rows: int = 4, seq_len: int = 256) -> dict[str, Operands]:
    """x, W and g of every linear layer in one bf16 forward and backward pass over the start of `text`."""
    index = checkpoint.read_index(folder)
    model = models.build_on_meta(models.read_config(folder))
    model.to_empty(device="cpu")
    model.reset_buffers("cpu")
    checkpoint.load_hf(model, index)
    ids = data.load_tokenizer(folder).encode(text.read_text(encoding="utf-8")[: 16 * num_rows * seq_len])
    rows = torch.tensor(ids[: num_rows * (seq_len + 1)]).view(num_rows, seq_len + 1)
    seen: dict[str, dict[str, Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            seen[name] = {}
            module.register_forward_hook(_keep(seen[name]))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(rows[:, :-1], None, rows[:, 1:])
    (loss / rows[:, 1:].numel()).backward()
    print(f"loss per token {float(loss.detach()) / rows[:, 1:].numel():.4f}, {rows[:, 1:].numel()} tokens")
    return {
        name: Operands(tensors["x"], model.get_parameter(f"{name}.weight").detach().bfloat16(), tensors["g"])
        for name, tensors in seen.items()
    }


def _keep(tensors: dict[str, Tensor]):  # type: ignore[no-untyped-def]
    def hook(module: nn.Module, inputs: tuple[Tensor], out: Tensor) -> None:
        tensors["x"] = inputs[0].detach().bfloat16().flatten(0, -2)

        def keep_gradient(g: Tensor) -> None:
            tensors["g"] = g.detach().bfloat16().flatten(0, -2)

        out.register_hook(keep_gradient)

    return hook


def real_tables(operands: dict[str, Operands]) -> Iterator[list[list[str]]]:
    """Errors by kind of layer (mean over the layers of this kind), then the options of folding."""
    groups: dict[str, list[Operands]] = {}
    for name, each in operands.items():
        groups.setdefault(name.rpartition(".")[2], []).append(each)
    found = {
        (kind, name): [_errors(each, kind) for each in layers]
        for kind in KINDS
        for name, layers in groups.items()
    }
    for gemm in GEMMS:
        table = [[f"{gemm}: error (of its bound)", *groups]]
        for kind in KINDS:
            row = []
            for name in groups:
                errors = [layer[gemm] for layer in found[kind, name]]
                error = sum(error for error, _ in errors) / len(errors)
                row.append(f"{error:.4f} ({max(error / bound.bound for error, bound in errors):.2f})")
            table.append(["bf16" if kind == "none" else kind, *row])
        yield table

    for kind in ("int8_rowcol", "float8_rowwise"):
        table = [
            [
                f"{kind}, SQNR in dB",
                *(f"grad_input {way}" for way in ("column", "requantized", "folded")),
                "grad_weight column (all / median channel)",
                "folded",
            ]
        ]
        for name, layers in groups.items():
            for number, each in enumerate(layers):
                ways = (
                    f"{_sqnr(each, 'grad_input', way, kind):.1f}"
                    for way in ("column", "requantized", "folded")
                )
                label = name if len(layers) == 1 else f"{name} {number}"
                table.append([label, *ways, *_all_and_median(each, kind)])
        yield table


def _errors(operands: Operands, kind: str) -> dict[str, tuple[float, noise.Predicted]]:
    results, predicted, truth = run(operands, precision(kind))
    return {gemm: (noise.relative_error(results[gemm], truth[gemm]), predicted[gemm]) for gemm in GEMMS}


def show(table: list[list[str]], markdown: bool) -> None:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    for number, row in enumerate(table):
        if markdown:
            print("| " + " | ".join(row) + " |")
            if number == 0:
                print("|---" * len(row) + "|")
        else:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print()


def main() -> None:
    from harness import strict_compilation  # benchmarks/harness.py

    strict_compilation()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--markdown", action="store_true", help="tables as docs/numerics.md shows them")
    parser.add_argument("--checkpoint", type=Path, help="a Hugging Face folder")
    parser.add_argument("--text", type=Path, help="a text file, at least a few thousand words")
    args = parser.parse_args()
    if (args.checkpoint is None) != (args.text is None):
        parser.error("--checkpoint and --text go together")
    show(list(modes_table()), args.markdown)
    for table in folding_tables():
        show(table, args.markdown)
    if args.checkpoint is not None:
        for table in real_tables(real_operands(args.checkpoint, args.text)):
            show(table, args.markdown)


if __name__ == "__main__":
    main()
