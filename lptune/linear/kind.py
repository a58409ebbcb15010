"""The protocol of a kind of low precision, and the settings of one layer.

    Kind          the rules of one `precision.kind`; lptune/linear/kinds/ has a class for each
    KINDS         name -> Kind, filled by lptune/linear/kinds/__init__.py
    LinearSpec    the settings of one layer: its kind, and the values of the kind's options

Everything that differs between kinds is a method or an attribute of Kind. The rest of the library asks
`spec.kind` and never compares names. So a new kind is a new class, its row in lptune/config/precision.py and
its name in kinds/__init__.py.

Shapes: T tokens, K in_features, N out_features (of a rank's part under tensor parallelism).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from lptune.config import PRECISION_KINDS, KindKeys, PrecisionConfig
from lptune.kernels import HEADER_BYTES, Packed, Quantized, pack_rows

Agree = Callable[[Tensor], Tensor]
"""Maps this rank's amaxes to their elementwise maximum over ranks, by an all-reduce or a lookup."""

Saved = tuple[Tensor, ...]
"""What forward keeps for backward: the operand x of grad_weight."""


class Needs(NamedTuple):
    """Which gradients backward is to return."""

    input: bool
    weight: bool


class Shard(NamedTuple):
    """Rows [first_row, first_row + M) of a weight (N, K): what FSDP gives to this rank."""

    rows_MK: Tensor  # any float dtype
    first_row: int
    full_rows: int  # N
    block: int | None  # side of the square blocks with one amax each; None: one amax for the whole weight
    compute_dtype: torch.dtype
    mean_scale: bool = False  # the scale is of sums of rows, (N, 1), not of amaxes


class LinearSpec(NamedTuple):
    """How the three GEMMs of a layer run. `high` means: in compute dtype.

    All fields are constants for the compiler: plain values, and a kind, of which there is one object in a
    process. Layers with equal specs share a compiled graph.
    """

    kind: "Kind"
    fmt: str  # of x and W: Kind.fmt
    grad_fmt: str  # of g
    power_of_two: bool  # scales are powers of two
    rotated: bool  # each GEMM rotates its operands along the contraction (numerics/rotation.py)
    output: str  # low | high
    grad_input: str  # one of the kind's keys.grad_input
    grad_weight: str  # one of the kind's keys.grad_weight
    emulate: bool
    stochastic: bool  # g is rounded stochastically
    gathers_low: bool  # FSDP gathers the weight in 8 bits
    token_gather: str  # how sequence parallelism gathers x: high | low | auto (low if all readers of x can)

    @classmethod
    def from_config(cls, precision: PrecisionConfig) -> "LinearSpec":
        """The spec of every layer that `precision` converts. Raises KeyError for an unknown kind."""
        kind = KINDS[precision.kind]
        return cls(
            kind=kind,
            fmt=kind.fmt,
            grad_fmt=precision.resolved_grad_format,
            power_of_two=kind.power_of_two,
            rotated=kind.rotated,
            output=precision.output,
            grad_input=precision.resolved_grad_input,
            grad_weight=precision.resolved_grad_weight,
            emulate=precision.emulate,
            stochastic=precision.stochastic_rounding or kind.keys.rounds_stochastically,
            gathers_low=precision.gathers_low,
            token_gather=precision.tp_all_gather if precision.gathers_tokens_low else "high",
        )

    def is_low(self, gemm: str) -> bool:
        """Whether `gemm`, one of kernels.GEMMS, has an 8-bit operand. Kernels count such GEMMs."""
        return bool(getattr(self, gemm) != "high")

    def formats(self, gemm: str) -> str:
        """The formats of the operands of `gemm`, as the plan shows them: `int8`, `e5m2 x e4m3`."""
        mixed = gemm != "output" and self.grad_fmt != self.fmt
        return f"{self.grad_fmt} x {self.fmt}" if mixed else self.fmt

    @property
    def high_uses_8_bit_weight(self) -> bool:
        """Whether a GEMM that is `high` multiplies by the dequantized weight.

        It does if `output` uses the 8-bit weight or FSDP gathers 8 bits. Backward then uses the same weight
        as forward, and results do not depend on the dtype of the gather.
        """
        return self.output == "low" or self.gathers_low

    @property
    def multiplies_in_8_bits(self) -> bool:
        """Whether the low GEMMs multiply in 8 bits. False if they only dequantize an 8-bit weight."""
        return bool(self.kind.operations)

    @property
    def described_tokens(self) -> str:
        """Format and scales of an 8-bit gather of x, for messages: `int8 rows`."""
        return self.kind.describe_tokens(self)

    def describe_gather(self) -> str:
        """Format and scales of the all-gather of W, for the plan table: `int8 rows`, `high`."""
        is_low = self.gathers_low or self.kind.keys.stores_low
        return self.kind.describe_gather(self) if is_low else "high"

    def describe(self, gemm: str) -> str:
        """Formats and scales of `gemm` in the plan table: `int8 folded`, `e5m2 x e4m3 tensor`, `high`."""
        return self.kind.describe(self, gemm) if self.is_low(gemm) else "high"


class Kind(ABC):
    """The rules of one kind of low precision. It has no state; kernels/record.py has the state of layers.

    A copy or a pickle of it is the kind of this name in KINDS.
    """

    name: ClassVar[str]
    """The value of `precision.kind` that selects this kind."""
    fmt: ClassVar[str]
    """Format of x and W, a key of numerics.FORMATS; or e2m1, or int4 of W alone."""
    power_of_two: ClassVar[bool] = False
    """Whether all scales are powers of two."""
    rotated: ClassVar[bool] = False
    """Whether x and W are rotated by Hadamard blocks before they are quantized."""
    operations: ClassVar[tuple[str, ...]]
    """Names of its 8-bit GEMMs for kernels.choose_backend, the one of `output` first. Empty if the kind
    multiplies in compute dtype.
    """
    emulated_where_missing: ClassVar[bool] = False
    """On a device without these GEMMs: True: `convert` emulates them, and the plan says so. False: `convert`
    raises UserError.
    """

    @property
    def keys(self) -> KindKeys:
        """The legal values for its three GEMMs and its gathers."""
        return PRECISION_KINDS[self.name]

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Callable[[str], "Kind"], tuple[str]]:
        return _kind_named, (self.name,)

    # --- The three GEMMs.

    @abstractmethod
    def forward(
        self, spec: LinearSpec, x_TK: Tensor, w_NK: Tensor, layer: Tensor, quantized_x: Quantized | None
    ) -> tuple[Tensor, Saved]:
        """Returns (`x @ w.T` in x's dtype, the tensors that `backward` gets as `saved`).

        w_NK: has x's dtype; or is a GatheredWeight; or the RowTensor that the kind stores. layer: the layer
        handle, for the count of GEMMs. quantized_x: x, if it was gathered in 8 bits; x_TK is
        then a placeholder of ones, and only its shape and dtype are used.
        """

    @abstractmethod
    def backward(
        self, spec: LinearSpec, g_TN: Tensor, w_NK: Tensor, saved: Saved, layer: Tensor, needs: Needs
    ) -> tuple[Tensor | None, Tensor | None]:
        """Returns (grad_input, grad_weight) in g's dtype, each None if it is not needed.

        w_NK: as in `forward`, in g's dtype. saved: from `forward`; empty if grad_weight is not needed.
        """

    # --- The three GEMMs of a grouped layer (grouped.py).

    def why_not_grouped(self, spec: LinearSpec) -> str | None:
        """Why a grouped layer of this spec stays in compute dtype; None: it need not."""
        return f"{self.name} has no GEMMs for groups"

    def grouped_forward(
        self,
        spec: LinearSpec,
        x_SK: Tensor,
        w_RK: Tensor,
        ends_E: Tensor,
        layer: Tensor,
        quantized_x: Quantized | None = None,
    ) -> tuple[Tensor, Saved]:
        """As `forward`, for each group's own rows. w_RK: (E * N, K). ends_E: int32, where groups end.
        quantized_x: as in `forward`; given only where tokens travel to experts (tp_all_gather).
        """
        raise ValueError(self.why_not_grouped(spec))

    def grouped_backward(
        self,
        spec: LinearSpec,
        g_SN: Tensor,
        w_RK: Tensor,
        ends_E: Tensor,
        saved: Saved,
        layer: Tensor,
        needs: Needs,
        most: int | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """As `backward`; the arguments are those of `grouped_forward`. most: no group has more rows; None: a
        group may have all.
        """
        raise ValueError(self.why_not_grouped(spec))

    # --- What the plan says.

    @abstractmethod
    def describe(self, spec: LinearSpec, gemm: str) -> str:
        """Formats and scales of `gemm`, which is low, for the plan table."""

    @abstractmethod
    def describe_gather(self, spec: LinearSpec) -> str:
        """Format and scales of a weight that is gathered in 8 bits, for the plan table."""

    one_scale: ClassVar[bool] = False
    """Whether x, W and g have one scale each; `precision.skip_small` has other thresholds for such kinds."""

    # --- How W travels in 8 bits.

    row_scales: ClassVar[bool] = False
    """True: each 8-bit row has its own scale, which is sent with the row. False: a scale covers rows of
    several ranks, and the ranks agree on amaxes before they quantize (weight_amax.py).
    """
    weight_block: ClassVar[int | None] = None
    """Side of W's square scale blocks; None if W has a scale per row or one scale."""
    weight_group: ClassVar[int] = 1
    """Columns of a row that share one of several scales. A layer, and its part under tensor parallelism, has
    whole groups.
    """
    mean_scale: ClassVar[bool] = False
    """Whether W's one scale is a mean. Ranks then agree on sums of rows, where others agree on amaxes."""
    weights_in_byte: ClassVar[int] = 1
    """Codes of a row that share a byte of a gather."""
    has_history: ClassVar[bool] = False
    """Whether scales come from the amaxes of past steps, which LowPrecision keeps (delayed.py)."""
    layer_class: ClassVar[type[nn.Linear] | None] = None
    """The subclass of LowPrecisionLinear for this kind's layers, if its parameter is not a float tensor."""

    def quantize_shard(self, spec: LinearSpec, shard: Shard, agree: Agree) -> Quantized:
        """8-bit rows of `shard`, bitwise equal to those that `forward` makes of the whole weight.

        shard: its rows, of any float dtype, are first rounded to its compute dtype. Raises ValueError if the
        kind's keys lack can_gather_low.
        """
        raise ValueError(f"{self.name} has no 8-bit gather of weights")

    def pack_shard(self, spec: LinearSpec, shard: Shard, agree: Agree, num_rows: int) -> Packed:
        """`quantize_shard` in a buffer of `num_rows` rows, for other ranks. A kind whose kernel writes to the
        buffer overrides this; the bits stay the same.
        """
        sent = self.quantize_shard(spec, shard, agree)
        buffer = pack_rows(sent, num_rows, self.header_bytes)
        return Packed(buffer, None if self.row_scales else sent.scale)

    @property
    def header_bytes(self) -> int:
        """Bytes before each gathered row, for its scale; 0 if scales are not sent."""
        return HEADER_BYTES if self.row_scales else 0

    # --- What an export stores in 8 bits.

    served_as: ClassVar[str | None] = None
    """The `export.quantized` whose folder has this kind's own 8-bit weights; None: no format has them."""

    def quantize_to_serve(
        self, spec: LinearSpec, w_NK: Tensor, compute_dtype: torch.dtype, beside: Mapping[str, Tensor]
    ) -> Quantized:
        """8-bit values and scales of a whole weight, bitwise those that `forward` multiplies by.

        w_NK: any float dtype. beside: what a checkpoint stores beside it (weights/int8_weight.py), by prefix.
        """
        shard = Shard(w_NK, 0, w_NK.shape[0], self.weight_block, compute_dtype, self.mean_scale)
        return self.quantize_shard(spec, shard, lambda amax: amax)

    # --- How tokens travel in 8 bits, under tensor parallelism.

    def quantize_tokens(self, spec: LinearSpec, x_tK: Tensor, agree: Agree) -> Quantized:
        """This rank's tokens in 8 bits, bitwise equal to what `forward` makes of all tokens. t: this rank's
        tokens; row scales have t rows. Raises ValueError if the kind's keys lack tokens_low.
        """
        raise ValueError(f"{self.name} has no 8-bit gather of tokens")

    def describe_tokens(self, spec: LinearSpec) -> str:
        """Format and scales of tokens that are gathered in 8 bits, for messages."""
        raise ValueError(f"{self.name} has no 8-bit gather of tokens")


KINDS: dict[str, Kind] = {}
"""All kinds by name, except `none`."""


def _kind_named(name: str) -> Kind:
    return KINDS[name]
