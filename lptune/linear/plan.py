"""The precision plan: for each linear layer, the precision of its GEMMs, or why it was not converted; and the
other weights that stay in compute dtype.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from lptune.base.text import group_name, table, without_number
from lptune.kernels import GEMMS, backend_text
from lptune.linear.kind import LinearSpec

FELL_BACK = "precision.shadow_on_bad: fell back"
"""The `reason` of a layer that the shadow check switched to high precision."""

PLAN_COLUMNS = ("layer", "shape (out x in)", *GEMMS, "all-gather (FSDP)", "note")
"""Column names of the plan table."""

_FROZEN = "frozen"


@dataclass(frozen=True)
class LayerPlan:
    """One linear layer of a plan. A layer that was not converted has no spec, and `reason` says why; with
    `precision.kind: none` no layer has a reason. A layer that fell back to high precision has both.
    """

    name: str
    in_features: int
    out_features: int
    spec: LinearSpec | None
    all_gather: str = "high"
    reason: str | None = None
    number: int | None = None
    """The layer number of a converted layer. precision_plan.json leaves it out: it is of one process."""
    is_frozen: bool = False
    """Whether the weight is not trained; the layer then has no grad_weight GEMM."""
    num_groups: int = 0
    """Of a grouped layer (grouped.py), whose out_features are those of all groups; 0: it is none."""
    share_used: float = 1.0
    """The share of the weight that multiplies a token: that of the experts that the token goes to."""

    @property
    def flops_per_gemm(self) -> float:
        """FLOPs of one GEMM per token."""
        return 2.0 * self.in_features * self.out_features * self.share_used

    def columns(self) -> tuple[str, str, str, str, str]:
        """The cells of the plan table: shape, the three GEMMs, the all-gather."""
        shape = f"{self.out_features // (self.num_groups or 1)} x {self.in_features}"
        if self.num_groups:
            shape = f"{self.num_groups} x {shape}"
        gemms = [self.spec.describe(gemm) if self.spec else "high" for gemm in GEMMS]
        if self.is_frozen:
            gemms[GEMMS.index("grad_weight")] = _FROZEN
        # mypy does not know that there are three.
        return (shape, *gemms, self.all_gather)  # type: ignore[return-value]


@dataclass(frozen=True)
class OtherWeight:
    """A weight outside nn.Linear, such as those of a mixture's experts, which stays in compute dtype. Its
    fields are those of LayerPlan; `reason` is None with `precision.kind: none`.
    """

    name: str
    shape: tuple[int, ...]
    num_used: int
    """Number of its elements that multiply a token: those of the experts that the token goes to."""
    reason: str | None
    is_frozen: bool = False

    def columns(self) -> tuple[str, str, str, str, str]:
        """The cells of the plan table, as of a LayerPlan."""
        return " x ".join(map(str, self.shape)), "high", "high", _FROZEN if self.is_frozen else "high", "high"

    @property
    def flops_per_token(self) -> float:
        """FLOPs of its products in forward and backward."""
        return 2.0 * (2 if self.is_frozen else 3) * self.num_used


@dataclass(frozen=True)
class Plan:
    """What `convert` did to every linear layer of a model, in module order, and what else stays high."""

    kind: str
    layers: tuple[LayerPlan, ...] = field(default_factory=tuple)
    frozen: tuple[str, ...] = ()
    """Names of all parameters that are not trained, of linear layers and of others."""
    others: tuple[OtherWeight, ...] = ()
    """Parameters of two or more dimensions outside linear layers, embeddings and norms."""

    def with_high(self, names: Collection[str]) -> "Plan":
        """This plan with all three GEMMs of the converted layers `names` in compute dtype."""
        layers = (
            replace(
                layer,
                spec=layer.spec._replace(output="high", grad_input="high", grad_weight="high"),
                reason=FELL_BACK,
            )
            if layer.spec and layer.name in names
            else layer
            for layer in self.layers
        )
        return replace(self, layers=tuple(layers))

    @property
    def converted(self) -> tuple[LayerPlan, ...]:
        """The layers that run in low precision or fell back to high, in module order."""
        return tuple(layer for layer in self.layers if layer.spec is not None)

    def backend(self, device_type: str) -> str | None:
        """The backend of the 8-bit GEMMs on `device_type`, or "emulation"; None without 8-bit GEMMs."""
        # `convert` gives all layers of a plan the same spec, so the first one speaks for all.
        specs = [layer.spec for layer in self.converted if layer.spec and layer.spec.multiplies_in_8_bits]
        if not specs:
            return None
        if specs[0].emulate:
            return "emulation"
        # A kind may have several 8-bit GEMMs, as float8_rowwise, and each has a backend.
        return " and ".join(sorted({backend_text(each, device_type) for each in specs[0].kind.operations}))

    @property
    def gemm_name(self) -> str:
        """What messages call the GEMMs of this plan that kernels count (`record_gemms`): "8-bit GEMMs", or
        "GEMMs from 8-bit weights" if they multiply in compute dtype; "4-bit" for formats of 4 bits.
        """
        specs = [layer.spec for layer in self.converted if layer.spec]
        if not specs:
            return "8-bit GEMMs"
        width = "4-bit" if specs[0].fmt in ("int4", "e2m1") else "8-bit"
        return f"{width} GEMMs" if specs[0].multiplies_in_8_bits else f"GEMMs from {width} weights"

    @property
    def flops_per_token(self) -> float:
        """FLOPs of all linear layers and other weights in forward and backward: three GEMMs of 2 * in * out
        each, two if the weight is frozen.
        """
        linear = sum((2 if layer.is_frozen else 3) * layer.flops_per_gemm for layer in self.layers)
        return linear + sum(other.flops_per_token for other in self.others)

    def to_json(self) -> dict[str, Any]:
        """The plan as precision_plan.json stores it."""
        rows = []
        for layer in self.layers:
            _, output, grad_input, grad_weight, gather = layer.columns()
            rows.append(
                {
                    "name": layer.name,
                    "shape": [layer.out_features, layer.in_features],
                    "output": output,
                    "grad_input": grad_input,
                    "grad_weight": grad_weight,
                    "all_gather": gather,
                    "spec": layer.spec._asdict() | {"kind": layer.spec.kind.name} if layer.spec else None,
                    "reason": layer.reason,
                }
            )
        return {
            "kind": self.kind,
            "num_converted": len(self.converted),
            "frozen": list(self.frozen),
            "layers": rows,
            "others": [
                {"name": other.name, "shape": list(other.shape), "reason": other.reason}
                for other in self.others
            ],
        }

    def rows(self) -> list[tuple[str, ...]]:
        """The rows of the plan table, with PLAN_COLUMNS. Layers that differ only in the number of their block
        share a row: `model.layers.0-27.mlp.up_proj`.
        """
        groups: dict[tuple[str, ...], list[LayerPlan | OtherWeight]] = {}
        weights: list[LayerPlan | OtherWeight] = [*self.layers, *self.others]
        for layer in weights:
            name = without_number(layer.name)
            key = (name, *layer.columns(), layer.reason or "")
            groups.setdefault(key, []).append(layer)
        return [(group_name([each.name for each in layers]), *key[1:]) for key, layers in groups.items()]

    def summary(self) -> str:
        """The plan in a few lines: how many layers run in low precision, which do not and why, and what is
        frozen.
        """
        left = [f"  not converted: {row[0]} ({row[-1]})" for row in self.rows() if row[-1]]
        return "\n".join([self.headline(), *left, *self._frozen_line()])

    def table(self) -> str:
        """The plan as text: a line that counts the layers, then a table of up to 140 columns."""
        lines = table([PLAN_COLUMNS, *self.rows()], rule=True)
        return "\n".join([self.headline(), *lines, *self._frozen_line()])

    def headline(self) -> str:
        """A line with the kind and the number of layers that were converted."""
        emulated = " (emulated)" if any(layer.spec.emulate for layer in self.layers if layer.spec) else ""
        count = f"{len(self.converted)} of {len(self.layers)} linear layers converted"
        if fell_back := sum(layer.reason is not None for layer in self.converted):
            count += f", of which {fell_back} fell back to compute dtype"
        if not self.converted:
            count = f"all {len(self.layers)} linear layers run in compute dtype"
        if self.others:
            others = sum(math.prod(other.shape) for other in self.others)
            share = others / (others + sum(layer.in_features * layer.out_features for layer in self.layers))
            count += f"; {share:.0%} of the weights are in no linear layer, and run in compute dtype"
        return f"precision {self.kind}{emulated}: {count}"

    def _frozen_line(self) -> list[str]:
        """A line that names the frozen parameters, if there are any."""
        groups: dict[str, list[str]] = {}
        for name in self.frozen:
            groups.setdefault(without_number(name), []).append(name)
        count = f"frozen, without gradient and optimizer state: {len(self.frozen)} parameters"
        return [f"{count}: {', '.join(map(group_name, groups.values()))}"] if groups else []
