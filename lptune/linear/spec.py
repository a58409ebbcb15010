"""What one linear layer does in each of its three GEMMs."""

from typing import NamedTuple

from lptune.config import PrecisionConfig

# kind: what shares a scale, the format of x and W, whether scales are powers of two.
_SCALING = {
    "int8_rowcol": ("rowwise", "int8", False),
    "int8_tensorwise": ("tensorwise", "int8", False),
    "float8_tensorwise": ("tensorwise", "e4m3", False),
    "float8_delayed": ("delayed", "e4m3", False),
    "float8_rowwise": ("rowwise", "e4m3", True),
    "float8_rowwise_with_gw_hp": ("rowwise", "e4m3", True),
    "float8_blockwise": ("blockwise", "e4m3", False),
    "mxfp8": ("mx", "e4m3", True),
    "int8_weight_only": ("weight_only", "int8", False),
}


class LinearSpec(NamedTuple):
    """How the three GEMMs of a layer run. `high` means: in compute dtype.

    A tuple of plain values: the compiler treats them as constants, and layers with equal specs share a graph.
    """

    kind: str
    scaling: str  # rowwise | tensorwise | delayed | blockwise | mx | weight_only
    fmt: str  # of x and W; a key of numerics.FORMATS
    grad_fmt: str  # of g
    power_of_two: bool
    output: str  # low | high
    grad_input: str  # folded | column | requantized | tensor | block | dequantized | high
    grad_weight: str  # column | folded | tensor | block | high
    emulate: bool
    stochastic: bool  # g is rounded stochastically
    gathers_low: bool  # FSDP gathers the weight in 8 bits
    token_gather: str  # of x, where it is cut by tokens: high | auto (low if all that share x can) | low

    @classmethod
    def from_config(cls, precision: PrecisionConfig) -> "LinearSpec":
        """The spec that `precision` asks for on every converted layer."""
        scaling, fmt, power_of_two = _SCALING[precision.kind]
        return cls(
            kind=precision.kind,
            scaling=scaling,
            fmt=fmt,
            grad_fmt=precision.resolved_grad_format,
            power_of_two=power_of_two,
            output=precision.output,
            grad_input=precision.resolved_grad_input,
            grad_weight=precision.resolved_grad_weight,
            emulate=precision.emulate,
            stochastic=precision.stochastic_rounding,
            gathers_low=precision.gathers_low,
            token_gather=precision.tp_all_gather if precision.gathers_tokens_low else "high",
        )

    def is_low(self, gemm: str) -> bool:
        """Whether `gemm`, one of kernels.GEMMS, takes an 8-bit operand, and is counted when it runs."""
        return bool(getattr(self, gemm) != "high")

    @property
    def multiplies_in_8_bits(self) -> bool:
        """Whether the low GEMMs multiply 8-bit numbers, and do not only read an 8-bit weight."""
        return self.scaling != "weight_only"

    @property
    def high_uses_8_bit_weight(self) -> bool:
        """Whether a GEMM that is `high` multiplies by the dequantized weight, and not by the weight itself:
        backward then sees what forward saw, and a gathered weight is what an ungathered one is.
        """
        return self.output == "low" or self.gathers_low

    @property
    def described_tokens(self) -> str:
        """What is said of an 8-bit gather of x."""
        return f"{self.fmt} rows" if self.scaling == "rowwise" else f"{self.fmt} tensor"

    @property
    def operations(self) -> tuple[str, ...]:
        """What kernels.choose_backend calls the 8-bit GEMMs of this spec, `output`'s first."""
        if self.scaling in ("blockwise", "mx"):
            return ("block_gemm",) if self.scaling == "blockwise" else ("other_block_gemm",)
        if self.fmt == "int8":
            return ("int8_gemm",)
        return ("float8_gemm", "float8_rowwise_gemm") if self.scaling == "rowwise" else ("float8_gemm",)

    @property
    def weight_scales(self) -> str:
        """What of W has a scale of its own: `row`, `tensor` or `block`."""
        return {"rowwise": "row", "weight_only": "row", "blockwise": "block", "mx": "block"}.get(
            self.scaling, "tensor"
        )

    @property
    def weight_block(self) -> int | None:
        """The side of W's square blocks; None where its scales are none of blocks."""
        return 128 if self.scaling == "blockwise" else None

    def describe_gather(self) -> str:
        """What the plan table says of the all-gather."""
        if self.scaling == "weight_only":
            return "int8"
        if not self.gathers_low:
            return "high"
        shared = {"row": "rows", "tensor": "tensor", "block": f"block{self.weight_block}"}
        return f"{self.fmt} {shared[self.weight_scales]}"

    def describe(self, gemm: str) -> str:
        """What the plan table says of `gemm`: `int8 folded`, `e5m2 x e4m3 tensor`, `int8 weight`, `high`."""
        how = getattr(self, gemm)
        if how == "high":
            return "high"
        if self.scaling == "weight_only":
            return f"{self.fmt} weight"
        formats = self.fmt
        if gemm != "output" and self.grad_fmt != self.fmt:
            formats = f"{self.grad_fmt} x {self.fmt}"
        if how == "low":
            how = {"rowwise": "row", "blockwise": "block", "mx": "block"}.get(self.scaling, "tensor")
        size = {"blockwise": "128", "mx": "32"}.get(self.scaling, "")
        return f"{formats} {how}{size}"
