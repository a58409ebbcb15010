"""What a kind of low precision is, and what one layer chose of it.

    Kind          the rules of one `precision.kind`; lptune/linear/kinds/ has a file for each
    KINDS         name -> Kind, filled by lptune/linear/kinds/__init__.py
    LinearSpec    what one layer does: a kind's name and the choices that the kind leaves open, plain values

Everything that differs between kinds is a method or an attribute of Kind. The rest of the library asks
`kind_of(spec)` and compares no names, so a new kind is a new file, its row in lptune/config/precision.py and
its name in kinds/__init__.py.

Shapes: T tokens, K in_features, N out_features (of a rank's part under tensor parallelism).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, NamedTuple

from torch import Tensor, nn

from lptune.config import KindKeys, PrecisionConfig
from lptune.linear.noise import Operands
from lptune.linear.weights.row_tensor import HEADER_BYTES, Quantized
from lptune.linear.weights.weight_amax import Shard

Agree = Callable[[Tensor], Tensor]
"""This rank's amaxes -> the maximum over ranks, of the same shape; by an all-reduce or a lookup."""


class LinearSpec(NamedTuple):
    """How the three GEMMs of a layer run. `high` means: in compute dtype.

    A tuple of plain values: the compiler treats them as constants, and layers with equal specs share a graph.
    """

    kind: str  # a key of KINDS
    fmt: str  # of x and W; a key of numerics.FORMATS
    grad_fmt: str  # of g
    power_of_two: bool  # scales are powers of two
    output: str  # low | high
    grad_input: str  # one of the kind's keys.grad_input
    grad_weight: str  # one of the kind's keys.grad_weight
    emulate: bool
    stochastic: bool  # g is rounded stochastically
    gathers_low: bool  # FSDP gathers the weight in 8 bits
    token_gather: str  # how sequence parallelism gathers x: high | low | auto (low if all readers of x can)

    @classmethod
    def from_config(cls, precision: PrecisionConfig) -> "LinearSpec":
        """The spec that `precision` asks for on every converted layer. KeyError for an unknown kind."""
        kind = KINDS[precision.kind]
        return cls(
            kind=precision.kind,
            fmt=kind.fmt,
            grad_fmt=precision.resolved_grad_format,
            power_of_two=kind.power_of_two,
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

    def formats(self, gemm: str) -> str:
        """Those of the operands of `gemm`: `int8`, `e5m2 x e4m3`."""
        mixed = gemm != "output" and self.grad_fmt != self.fmt
        return f"{self.grad_fmt} x {self.fmt}" if mixed else self.fmt

    @property
    def high_uses_8_bit_weight(self) -> bool:
        """Whether a GEMM that is `high` multiplies by the dequantized weight: where forward uses the 8-bit
        weight, or FSDP gathers it in 8 bits. So backward uses forward's weight, and the result does not
        depend on the gather.
        """
        return self.output == "low" or self.gathers_low

    @property
    def multiplies_in_8_bits(self) -> bool:
        """Whether the low GEMMs multiply 8-bit numbers, and do not only read an 8-bit weight."""
        return bool(kind_of(self).operations)

    @property
    def described_tokens(self) -> str:
        """What is said of an 8-bit gather of x."""
        return kind_of(self).describe_tokens(self)

    def describe_gather(self) -> str:
        """What the plan table says of the all-gather of W."""
        kind = kind_of(self)
        return kind.describe_gather(self) if self.gathers_low or kind.keys.stores_low else "high"

    def describe(self, gemm: str) -> str:
        """What the plan table says of `gemm`: `int8 folded`, `e5m2 x e4m3 tensor`, `int8 weight`, `high`."""
        return kind_of(self).describe(self, gemm) if self.is_low(gemm) else "high"


class Kind(ABC):
    """The rules of one kind of low precision. A kind has no state: what is live of a layer is elsewhere."""

    name: ClassVar[str]
    """`precision.kind`."""
    keys: ClassVar[KindKeys]
    """What is legal for its three GEMMs and its gathers: equal to its row in config.PRECISION_KINDS."""
    fmt: ClassVar[str]
    """Of x and W; a key of numerics.FORMATS."""
    power_of_two: ClassVar[bool] = False
    """Whether scales are powers of two."""
    operations: ClassVar[tuple[str, ...]]
    """What kernels.choose_backend calls its 8-bit GEMMs, `output`'s first. Empty: the kind
    multiplies in compute dtype.
    """
    emulated_where_missing: ClassVar[bool] = False
    """Whether a device without these GEMMs emulates them unasked; the plan says so. Otherwise: an error."""

    # --- The three GEMMs.

    @abstractmethod
    def forward(
        self,
        spec: LinearSpec,
        x_TK: Tensor,
        w_NK: Tensor,
        layer: Tensor,
        quantized_x: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """(`x @ w.T` in x's dtype, what `backward` needs of x for grad_weight).

        w_NK has x's dtype; or it is a GatheredWeight, or what the kind stores. layer: the handle under which
        kernels count what ran. quantized_x: q and scale of x, where it was gathered so; x is then a
        placeholder of ones, of which only shape and dtype count.
        """

    @abstractmethod
    def backward(
        self,
        spec: LinearSpec,
        g_TN: Tensor,
        w_NK: Tensor,
        saved: tuple[Tensor, ...],
        layer: Tensor,
        needs_grad_input: bool,
        needs_grad_weight: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """(grad_input, grad_weight) in g's dtype; None where not needed. g_TN, w_NK: same dtype. saved: what
        `forward` returned; empty where grad_weight is not needed.
        """

    # --- What the plan says.

    @abstractmethod
    def describe(self, spec: LinearSpec, gemm: str) -> str:
        """Formats and scales of `gemm`, which is low."""

    @abstractmethod
    def describe_gather(self, spec: LinearSpec) -> str:
        """Format and scales of a gathered weight."""

    one_scale: ClassVar[bool] = False
    """Whether x, W and g have one scale each. `precision.skip_small` has thresholds of its own for these."""

    # --- How W travels in 8 bits.

    row_scales: ClassVar[bool] = False
    """Whether each 8-bit row has a scale of its own, which is sent with it. Otherwise scales cover rows of
    several ranks, which agree on amaxes before they quantize (weight_amax.py).
    """
    weight_block: ClassVar[int | None] = None
    """Side of W's square blocks, each with a scale; None: rows have one, or the tensor."""
    has_history: ClassVar[bool] = False
    """Whether scales come from the amaxes of past steps, which LowPrecision keeps (delayed.py)."""
    layer_class: ClassVar[type[nn.Linear] | None] = None
    """The subclass of LowPrecisionLinear that a layer becomes, where the parameter is not an ordinary one."""

    def quantize_shard(self, spec: LinearSpec, shard: Shard, agree: Agree) -> Quantized:
        """8-bit rows of `shard`, which is in compute dtype, as `forward` makes them of the whole weight: bit
        for bit. For kinds whose keys say can_gather_low.
        """
        raise ValueError(f"{self.name} has no 8-bit gather of weights")

    @property
    def header_bytes(self) -> int:
        """Of each gathered row: room for its scale."""
        return HEADER_BYTES if self.row_scales else 0

    # --- How tokens travel in 8 bits, under tensor parallelism.

    def quantize_tokens(self, spec: LinearSpec, x_tK: Tensor, agree: Agree) -> Quantized:
        """This rank's tokens, quantized as `forward` would quantize all of them: bit for bit. For kinds
        whose keys have tokens_low. Row scales, where there are any, are those of these tokens.
        """
        raise ValueError(f"{self.name} has no 8-bit gather of tokens")

    def describe_tokens(self, spec: LinearSpec) -> str:
        """Format and scales of gathered tokens."""
        raise ValueError(f"{self.name} has no 8-bit gather of tokens")

    # --- Predicted noise: the operands of a low GEMM as they are multiplied (bounds.py).

    @abstractmethod
    def weight_scale_block(self, n: int, k: int) -> tuple[int, int]:
        """Rows and columns of W (N, K) that share a scale in `output`."""

    @abstractmethod
    def noisy_output(self, spec: LinearSpec, x_TK: Tensor, w_NK: Tensor) -> Operands:
        """x and W.T of `output`."""

    @abstractmethod
    def noisy_grad_input(self, spec: LinearSpec, g_TN: Tensor, w_NK: Tensor) -> Operands:
        """g and W of `grad_input`."""

    @abstractmethod
    def noisy_grad_weight(self, spec: LinearSpec, g_TN: Tensor, x_TK: Tensor) -> Operands:
        """g.T and x of `grad_weight`."""


KINDS: dict[str, Kind] = {}
"""Every kind but `none`, by name."""


def kind_of(spec: LinearSpec) -> Kind:
    """The rules that a layer of `spec` follows."""
    return KINDS[spec.kind]
