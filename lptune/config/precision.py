"""The kinds of low precision and the keys that choose among them (what they compute: docs/numerics.md)."""

import math
from dataclasses import dataclass

from lptune.base.errors import UserError
from lptune.config.checks import at_least, one_of


@dataclass(frozen=True)
class KindKeys:
    """What is legal for a kind. The first entry of grad_input and of grad_weight is what `low` means."""

    grad_input: tuple[str, ...]
    grad_weight: tuple[str, ...]
    grad_formats: tuple[str, ...]
    """Formats that the gradient of the output may have; the first is the default."""
    can_round_stochastically: bool = False
    can_gather_low: bool = False
    """Whether one set of 8-bit values, which each rank can make of its shard, is all that GEMMs need of W."""
    output: tuple[str, ...] = ("low", "high")
    tokens_low: str | None = None
    """The grad_weight with which an 8-bit gather of x is all that GEMMs need of x; None: there is none."""
    stores_low: bool = False
    """Whether weights are stored in 8 bits; gathers then bring what is stored."""
    for_servers: bool = False
    """Whether it is taken for what is served: training is to take back what it costs at first."""
    rounds_stochastically: bool = False
    """Whether it always quantizes gradients with stochastic rounding, whatever `stochastic_rounding` is."""
    needs_float8: bool = False
    """Whether a device without float8 GEMMs cannot run it, other than by `emulate`."""
    min_sqnr_db: float = 20.0
    """What `precision.shadow_min_sqnr_db` is by default: at least 5 dB below the smallest SQNR that was
    measured in healthy training (docs/shadow.md)."""
    loss_change: tuple[float, float] | None = None
    """(How much larger the loss is than that of `none` before any training, its standard error), as shares of
    the loss of `none`: with the default options, on the model of docs/benchmarks.md. None: not measured."""


_ROWWISE_GRAD_INPUT = ("folded", "column", "requantized", "high")
_NONE = "none"

PRECISION_KINDS = {
    _NONE: KindKeys((), (), ()),
    "int8_rowcol": KindKeys(
        _ROWWISE_GRAD_INPUT,
        ("column", "folded", "high"),
        ("int8",),
        True,
        True,
        tokens_low="folded",
        loss_change=(0.0169, 0.0009),
    ),
    "int8_rotated": KindKeys(
        ("folded", "high"),
        ("folded", "high"),
        ("int8",),
        True,
        True,
        tokens_low="folded",
        loss_change=(0.0014, 0.0004),
    ),
    "int8_tensorwise": KindKeys(
        ("tensor", "high"),
        ("tensor", "high"),
        ("int8",),
        True,
        True,
        tokens_low="tensor",
        min_sqnr_db=9.0,
        loss_change=(0.1027, 0.0023),
    ),
    "float8_tensorwise": KindKeys(
        ("tensor", "high"),
        ("tensor", "high"),
        ("e5m2", "e4m3"),
        True,
        True,
        tokens_low="tensor",
        needs_float8=True,
        min_sqnr_db=15.0,
        loss_change=(0.0169, 0.001),
    ),
    "float8_delayed": KindKeys(
        ("tensor", "high"),
        ("tensor", "high"),
        ("e5m2", "e4m3"),
        can_gather_low=True,
        needs_float8=True,
        min_sqnr_db=15.0,
        loss_change=(0.0169, 0.001),
    ),
    "float8_rowwise": KindKeys(
        _ROWWISE_GRAD_INPUT,
        ("column", "folded", "high"),
        ("e4m3",),
        True,
        True,
        tokens_low="folded",
        needs_float8=True,
        loss_change=(0.0087, 0.0008),
    ),
    "float8_rowwise_with_gw_hp": KindKeys(
        _ROWWISE_GRAD_INPUT, ("high",), ("e4m3",), True, True, needs_float8=True, loss_change=(0.0087, 0.0008)
    ),
    "float8_blockwise": KindKeys(
        ("block", "high"),
        ("block", "high"),
        ("e4m3",),
        can_gather_low=True,
        needs_float8=True,
        loss_change=(0.0116, 0.0007),
    ),
    "mxfp8": KindKeys(("block", "high"), ("block", "high"), ("e4m3",), loss_change=(0.0089, 0.0009)),
    # Measured in healthy training: docs/shadow.md.
    "nvfp4": KindKeys(
        ("block", "high"),
        ("block", "high"),
        ("e2m1",),
        True,
        rounds_stochastically=True,
        min_sqnr_db=8.0,
    ),
    # Stored in INT8, multiplied in compute dtype: it has no 8-bit GEMM to switch off.
    "int8_weight_only": KindKeys(
        ("dequantized",),
        ("high",),
        ("int8",),
        can_gather_low=True,
        output=("low",),
        stores_low=True,
        loss_change=(0.0001, 0.0003),
    ),
    # Rounded to 4 bits for two GEMMs in compute dtype, which have no other form. Normal numbers have 20 dB.
    "int4_weight": KindKeys(
        ("dequantized",), ("high",), ("int4",), output=("low",), for_servers=True, min_sqnr_db=12.0
    ),
    # Ternary weights: the gradients of BitNet are of high precision.
    "bitnet": KindKeys(
        ("high", "folded"),
        ("high", "folded"),
        ("int8",),
        can_gather_low=True,
        output=("low",),
        for_servers=True,
        min_sqnr_db=-3.0,
    ),
}


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Which of the three GEMMs of a linear layer run in 8 bits, and how."""

    kind: str = "none"
    """none | int8_rowcol | int8_rotated | int8_tensorwise | float8_tensorwise | float8_delayed |
    float8_rowwise | float8_rowwise_with_gw_hp | float8_blockwise | mxfp8 | nvfp4 (4 bits) |
    int8_weight_only (stored in INT8, no master) | int4_weight (high GEMMs; weights rounded to 4 bits, for
    INT4 servers) | bitnet (ternary weights, INT8 tokens: BitNet b1.58, from scratch)."""
    output: str = "low"
    """low | high: precision of `output = x @ W.T`."""
    grad_input: str = "low"
    """low (the default of the kind) | high; kinds with row scales also take folded (their `low`) | column |
    requantized: which form of the weight `grad_input = g @ W` multiplies (docs/numerics.md)."""
    grad_weight: str = "low"
    """low (the default of the kind) | high; kinds with row scales also take column (their `low`) | folded:
    which form of the input `grad_weight = g.T @ x` multiplies; folded saves x in 8 bits."""
    grad_format: str = "auto"
    """auto | e5m2 | e4m3: format of g for float8_tensorwise and float8_delayed (auto: e5m2)."""
    stochastic_rounding: bool = False
    """Quantize gradients with stochastic rounding: up or down at random, with the right mean. For kinds with
    a scale per row, column or tensor; nvfp4 always does. The random bits depend on seed, step, layer and
    element. Costs time."""
    emulate: bool = False
    """Multiply the same 8-bit operands in wider arithmetic: any kind runs on any device, slowly."""
    skip: tuple[str, ...] = ("lm_head",)
    """Layer names or globs that stay in compute dtype."""
    skip_small: bool = False
    """Leave layers in compute dtype that would be slower in 8 bits, judged by their sizes and the tokens per
    micro-batch (measured by benchmarks/crossover.py; otherwise the thresholds published for H100)."""
    all_gather: str = "auto"
    """auto (low where the kind can) | low: FSDP gathers weights in 8 bits | high: in compute dtype. One rank
    copies its weights so, and gathers nothing (docs/distributed.md). int8_weight_only always gathers its
    stored INT8 values."""
    tp_all_gather: str = "auto"
    """auto (low where GEMMs need no other form of the activations) | low: sequence parallelism gathers
    activations in 8 bits, once for q, k, v and once for gate, up | high. low needs grad_weight=folded with
    int8_rowcol and float8_rowwise, and nothing with int8_tensorwise and float8_tensorwise."""
    verify: bool = True
    """Count the 8-bit GEMMs and gathers that each layer ran before its first update; fail if a planned one
    did not run."""
    shadow_every: int = 0
    """Steps between two shadow checks: one micro-batch also runs in high precision, on the same weights, and
    each layer's errors go to shadow.jsonl (docs/shadow.md); 0: never. It does not change the training."""
    shadow_on_bad: str = "warn"
    """warn: print a line if a layer's error is beyond shadow_min_sqnr_db | fallback: also run such layers in
    high precision from this step on. fallback gathers weights in compute dtype."""
    shadow_min_sqnr_db: float | None = None
    """The smallest signal-to-quantization-noise ratio, in dB, that a shadow check accepts of a GEMM. null: -3
    with bitnet, 8 with nvfp4, 9 with int8_tensorwise, 12 with int4_weight, 15 with float8_tensorwise and
    float8_delayed, 20 with the other kinds."""

    def __post_init__(self) -> None:
        one_of("precision.kind", self.kind, tuple(PRECISION_KINDS))
        one_of("precision.all_gather", self.all_gather, ("auto", "low", "high"))
        one_of("precision.tp_all_gather", self.tp_all_gather, ("auto", "low", "high"))
        at_least("precision.shadow_every", self.shadow_every, 0)
        one_of("precision.shadow_on_bad", self.shadow_on_bad, ("warn", "fallback"))
        if not math.isfinite(self.shadow_min_sqnr_db or 0.0):
            raise UserError(f"precision.shadow_min_sqnr_db: must be finite, found {self.shadow_min_sqnr_db}")
        kind = PRECISION_KINDS[self.kind]
        if self.shadow_every and kind.stores_low:
            raise UserError(
                f"precision.shadow_every: precision.kind={self.kind} keeps no weights of higher precision, "
                "with which to compare; set it to 0"
            )
        if self.falls_back and self.all_gather == "low":
            raise UserError(
                "precision.shadow_on_bad: fallback needs weights in compute dtype, and precision.all_gather: "
                "low brings 8 bits; leave out one of the two"
            )
        anything = self.is_none  # with kind=none a config may keep its other choices
        for key, choices in (
            ("output", kind.output),
            ("grad_input", ("low", *(_all("grad_input") if anything else kind.grad_input))),
            ("grad_weight", ("low", *(_all("grad_weight") if anything else kind.grad_weight))),
            ("grad_format", ("auto", *(_all("grad_formats") if anything else kind.grad_formats))),
        ):
            value = getattr(self, key)
            of_kind = "" if anything else f" (precision.kind: {self.kind})"
            one_of(f"precision.{key}", value, choices, of_kind)
        if kind.stores_low and self.all_gather == "high":
            raise UserError(
                f"precision.all_gather: high is not possible with precision.kind: {self.kind}, which "
                "always gathers its stored 8-bit values; leave it out"
            )
        if anything:
            return
        for key, value, is_asked, able in (
            ("stochastic_rounding", "true", self.stochastic_rounding, "can_round_stochastically"),
            ("all_gather", "low", self.all_gather == "low", "can_gather_low"),
            ("tp_all_gather", "low", self.tp_all_gather == "low", "tokens_low"),
        ):
            if is_asked and not getattr(kind, able):
                others = [name for name, each in PRECISION_KINDS.items() if getattr(each, able)]
                raise UserError(
                    f"precision.{key}: {value} is not possible with precision.kind: {self.kind}; "
                    f"{', '.join(others)} support it"
                )
        if self.all_gather == "low" and self.grad_input == "column":
            raise UserError(
                "precision.grad_input: column quantizes the original weight, which an 8-bit gather does "
                "not bring; set precision.all_gather=high, or grad_input to folded, requantized or high"
            )
        if self.tp_all_gather == "low" and not self.gathers_tokens_low:
            needed = "low" if kind.tokens_low == "tensor" else kind.tokens_low
            raise UserError(
                "precision.tp_all_gather: low brings x in 8 bits only; it needs output=low and "
                f"grad_weight={needed}"
            )
        if not self.low_gemms():
            raise UserError(
                f"precision.kind: {self.kind} with output, grad_input and grad_weight all `high` "
                "runs nothing in low precision; set precision.kind=none"
            )

    @property
    def is_none(self) -> bool:
        """Whether precision is switched off: everything runs in compute dtype."""
        return self.kind == _NONE

    @property
    def needs_float8(self) -> bool:
        """Whether GEMMs of float8 operands have to be there."""
        return PRECISION_KINDS[self.kind].needs_float8 and not self.emulate

    def low_gemms(self) -> tuple[str, ...]:
        """The GEMMs among output, grad_input and grad_weight that run in 8 bits."""
        return tuple(
            gemm
            for gemm, how in (
                ("output", self.output),
                ("grad_input", self.resolved_grad_input),
                ("grad_weight", self.resolved_grad_weight),
            )
            if how != "high"
        )

    @property
    def checks_shadow(self) -> bool:
        """Whether a run makes shadow checks."""
        return not self.is_none and self.shadow_every > 0

    @property
    def min_sqnr_db(self) -> float:
        """`shadow_min_sqnr_db`, or the default of the kind."""
        default = PRECISION_KINDS[self.kind].min_sqnr_db
        return default if self.shadow_min_sqnr_db is None else self.shadow_min_sqnr_db

    @property
    def falls_back(self) -> bool:
        """Whether a shadow check may switch layers to high precision."""
        return self.checks_shadow and self.shadow_on_bad == "fallback"

    @property
    def gathers_low(self) -> bool:
        """Whether FSDP gathers a float32 weight in 8 bits: `all_gather` is low, or auto and the kind can."""
        kind = PRECISION_KINDS[self.kind]
        able = kind.can_gather_low and self.grad_input != "column" and not kind.stores_low
        # FSDP fixes the form of a gather when it shards, and a layer may need its weight unquantized later.
        able = able and not self.falls_back
        # With a high-precision output, forward would gain nothing and multiply a rounded weight.
        return able and (self.all_gather == "low" or (self.all_gather == "auto" and self.output == "low"))

    @property
    def gathers_tokens_low(self) -> bool:
        """Whether sequence parallelism gathers activations in 8 bits: `tp_all_gather` allows it, and every
        GEMM uses the same 8-bit copy of x. The result is bitwise that of a high-precision gather.
        """
        kind = PRECISION_KINDS[self.kind]
        able = kind.tokens_low is not None and self.resolved_grad_weight == kind.tokens_low
        return able and self.output == "low" and self.tp_all_gather != "high"

    @property
    def resolved_grad_input(self) -> str:
        """`grad_input` with `low` replaced by what it means for the kind."""
        return PRECISION_KINDS[self.kind].grad_input[0] if self.grad_input == "low" else self.grad_input

    @property
    def resolved_grad_weight(self) -> str:
        """`grad_weight` with `low` replaced by what it means for the kind."""
        return PRECISION_KINDS[self.kind].grad_weight[0] if self.grad_weight == "low" else self.grad_weight

    @property
    def resolved_grad_format(self) -> str:
        """`grad_format` with `auto` replaced by what it means for the kind."""
        return PRECISION_KINDS[self.kind].grad_formats[0] if self.grad_format == "auto" else self.grad_format


def _all(field: str) -> tuple[str, ...]:
    return tuple(
        dict.fromkeys(choice for kind in PRECISION_KINDS.values() for choice in getattr(kind, field))
    )
