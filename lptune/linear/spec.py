"""What one linear layer does in each of its three GEMMs."""

from dataclasses import dataclass

from lptune.config import PrecisionConfig
from lptune.kernels import GEMMS


@dataclass(frozen=True)
class LinearSpec:
    """How the three GEMMs of a layer run. `high` means: in compute dtype."""

    kind: str
    output: str  # low | high
    grad_input: str  # folded | column | requantized | high
    grad_weight: str  # column | folded | high

    @classmethod
    def from_config(cls, precision: PrecisionConfig) -> "LinearSpec":
        """The spec that `precision` asks for on every converted layer."""
        return cls(precision.kind, precision.output, precision.grad_input, precision.grad_weight)

    def low_gemms(self) -> tuple[str, ...]:
        """Those of GEMMS that run in 8 bits."""
        return tuple(gemm for gemm in GEMMS if getattr(self, gemm) != "high")

    def describe(self, gemm: str) -> str:
        """What the plan table says of `gemm`: `int8`, `int8 folded`, `high`."""
        how = getattr(self, gemm)
        if how == "high":
            return "high"
        return "int8" if how == "low" else f"int8 {how}"
