"""The kinds with one scale per row or column: `int8_rowcol`, `int8_rotated`, `float8_rowwise`,
`float8_rowwise_with_gw_hp` (whose grad_weight is always `high`).

    output      = x @ W.T    contracts over K: one scale per row of x, and per row of W
    grad_input  = g @ W      contracts over N: one scale per row of g, and per column of W
    grad_weight = g.T @ x    contracts over T: one scale per column of g, and per column of x

A scale can be taken out of the sum only if it is constant along the contraction. `output` quantizes W by
rows, but in `grad_input` these row scales vary along the contraction. They are multiplied into g instead:

    g @ (q * s) = (g * s.T) @ q        `folded`

g * s.T is quantized by rows and multiplied by the q of `output`, so W is rounded once, not twice. (Backward
makes or gathers q again: saved copies would keep the unsharded model in memory.) This also works under an
8-bit all-gather, where the original weight is not available for quantizing by columns.

The same identity in `grad_weight`, g.T @ (q * s) = (g * s).T @ q, makes it possible to save x in 8 bits. But
then a row of x has one scale for all its channels (columns), and one outlier channel makes it coarse for all
others. So `column` is the default there, and `folded` an option (docs/numerics.md). A rotation spreads such a
channel over its block, and rotated kinds have `folded`.

`grad_input` needs g quantized by rows and `grad_weight` needs it quantized by columns. With the default
options one op makes both.

Where `spec.rotated`, x and W are rotated before they are quantized by rows, and the results of grad_input and
grad_weight are rotated back: they come from W H and x H (Int8Rotated).

`transposed` operands have the same shape, but are stored column by column: CUDA's 8-bit GEMMs want both
operands contiguous along the contraction (`k_major`).

Shapes: T tokens, K in_features, N out_features.
"""

from typing import ClassVar

import torch
from torch import Tensor

from lptune.kernels import (
    GRAD_INPUT,
    GRAD_WEIGHT,
    OUTPUT,
    Packed,
    Quantized,
    dequantize_rotated,
    grouped_mm,
    grouped_outer,
    in_runs,
    k_major,
    quantize_columns,
    quantize_columns_stochastic,
    quantize_grouped_columns,
    quantize_grouped_rows,
    quantize_packed_rows,
    quantize_rows,
    quantize_rows_and_columns,
    quantize_rows_stochastic,
    rotate,
    scaled_mm,
    transposed_copy,
)
from lptune.linear.grouped import grad_weight_of_groups, multiply_groups
from lptune.linear.kind import Agree, Kind, LinearSpec, Needs, Saved, Shard
from lptune.linear.weights.master_weight import GatheredWeight
from lptune.numerics import QuantizedColumns, QuantizedRows, dequantize


class Rowwise(Kind):
    """x, W and g have a scale for each row or column. A gather of W or x sends each row with its scale."""

    row_scales = True
    saves_rounded_x: ClassVar[bool] = False
    """Whether grad_weight, also where it is high, multiplies by the x of `output`."""

    def weight_rows(self, spec: LinearSpec, w_NK: Tensor, transposed: bool = False) -> QuantizedRows:
        """The 8-bit rows of a weight: quantized from the compute dtype, or as they were gathered."""
        if not isinstance(w_NK, GatheredWeight):
            return _rows(spec, w_NK, transposed=transposed)
        return QuantizedRows(transposed_copy(w_NK.q_NK) if transposed else w_NK.q_NK, w_NK.scale)

    def forward(
        self, spec: LinearSpec, x_TK: Tensor, w_NK: Tensor, layer: Tensor, quantized_x: Quantized | None
    ) -> tuple[Tensor, Saved]:
        """See Kind. quantized_x: by rows; allowed only if `output` is low and `grad_weight` is folded, since
        other GEMMs need the values of x_TK, which is a placeholder then.
        """
        assert quantized_x is None or (spec.output == "low" and spec.grad_weight == "folded")
        x, saved = _input_rows(spec, x_TK, quantized_x)
        if spec.output == "high":
            return x_TK @ _high_weight(spec, w_NK, x_TK.dtype).t(), saved
        assert x is not None
        w = _weight_rows(spec, w_NK)
        out_TN = scaled_mm(
            x.q_MK, w.q_MK.t(), x.scale_M1, w.scale_M1.t(), x_TK.dtype, layer, OUTPUT, emulate=spec.emulate
        )
        return out_TN, saved

    def backward(
        self, spec: LinearSpec, g_TN: Tensor, w_NK: Tensor, saved: Saved, layer: Tensor, needs: Needs
    ) -> tuple[Tensor | None, Tensor | None]:
        transposed = k_major(g_TN.device)
        w_rows = None
        if needs.input and spec.grad_input in ("folded", "requantized"):
            # `folded` multiplies by these rows. `requantized` only dequantizes them, from any layout.
            transposed_w = transposed and spec.grad_input == "folded"
            w_rows = _weight_rows(spec, w_NK, transposed_w)
        multiplier = w_rows.scale_M1.t() if w_rows and spec.grad_input == "folded" else None

        g_rows: QuantizedRows | None = None
        g_columns: QuantizedColumns | None = None
        wants_rows = needs.input and spec.grad_input != "high"
        wants_columns = needs.weight and spec.grad_weight == "column"
        if wants_rows and wants_columns and not spec.stochastic:
            g_rows, g_columns = quantize_rows_and_columns(
                g_TN,
                spec.grad_fmt,
                multiplier_1K=multiplier,
                power_of_two=spec.power_of_two,
                transposed=transposed,
            )
        else:
            if wants_rows:
                g_rows = _gradient_rows(spec, g_TN, multiplier, layer)
            if wants_columns:
                g_columns = _gradient_columns(spec, g_TN, None, layer)

        gx_TK = _grad_input(spec, g_TN, g_rows, w_NK, w_rows, layer) if needs.input else None
        gw_NK = _grad_weight(spec, g_TN, g_columns, saved, layer) if needs.weight else None
        return gx_TK, gw_NK

    def why_not_grouped(self, spec: LinearSpec) -> str | None:
        if spec.stochastic:
            return "stochastic rounding has no grouped quantizers"
        if spec.grad_input not in ("folded", "high"):
            return f"grad_input={spec.grad_input} has no GEMM for groups"
        return None

    def grouped_forward(
        self,
        spec: LinearSpec,
        x_SK: Tensor,
        w_RK: Tensor,
        ends_E: Tensor,
        layer: Tensor,
        quantized_x: Quantized | None = None,
    ) -> tuple[Tensor, Saved]:
        """See Kind. Rows have their own scales, so x is quantized for all groups at once, as W is."""
        x, saved = _input_rows(spec, x_SK, quantized_x)
        if spec.output == "high":
            return multiply_groups(x_SK, _high_weight(spec, w_RK, x_SK.dtype), ends_E, by_rows=True), saved
        assert x is not None
        w = _weight_rows(spec, w_RK)
        arguments = (x.q_MK, w.q_MK, x.scale_M1, w.scale_M1, ends_E, x_SK.dtype, layer, OUTPUT)
        return grouped_mm(*arguments, by_rows=True, emulate=spec.emulate), saved

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
        """See Kind. W's scales are folded into g, for each row those of its group; columns have a scale for
        each group.
        """
        dtype, power_of_two, gx_SK, gw_RK = g_SN.dtype, spec.power_of_two, None, None
        if needs.input and spec.grad_input == "high":
            gx_SK = multiply_groups(g_SN, _high_weight(spec, w_RK, dtype), ends_E, by_rows=False)
        elif needs.input:
            w = _weight_rows(spec, w_RK)
            scale_EN = w.scale_M1.view(len(ends_E), -1)
            g = quantize_grouped_rows(g_SN, spec.grad_fmt, scale_EN, ends_E, power_of_two=power_of_two)
            arguments = (g.q_MK, w.q_MK, g.scale_M1, None, ends_E, dtype, layer, GRAD_INPUT)
            gx_SK = _rotated_back(spec, grouped_mm(*arguments, by_rows=False, emulate=spec.emulate))
        if needs.weight and spec.grad_weight == "high":
            gw_RK = grad_weight_of_groups(g_SN, saved[0], ends_E)
        elif needs.weight:
            xq_SK, *folded = saved
            multiplier, x_scale_EK = folded[0] if folded else None, None
            columns = quantize_grouped_columns(
                g_SN, spec.grad_fmt, ends_E, multiplier_S1=multiplier, power_of_two=power_of_two
            )
            if folded:
                xq_SK = in_runs(xq_SK, ends_E)
            else:
                xq_SK, x_scale_EK = quantize_grouped_columns(
                    xq_SK, spec.fmt, ends_E, power_of_two=power_of_two
                )
            operands = (columns.q_MK, xq_SK, columns.scale_1K, x_scale_EK)
            gw_RK = grouped_outer(*operands, ends_E, dtype, layer, most=most, emulate=spec.emulate)
            gw_RK = _rotated_back(spec, gw_RK)
        return gx_SK, gw_RK

    def describe(self, spec: LinearSpec, gemm: str) -> str:
        how = getattr(spec, gemm)
        return f"{spec.formats(gemm)} {'rotated ' * spec.rotated}{'row' if how == 'low' else how}"

    def describe_gather(self, spec: LinearSpec) -> str:
        return f"{spec.fmt} {'rotated ' * spec.rotated}rows"

    def describe_tokens(self, spec: LinearSpec) -> str:
        return self.describe_gather(spec)

    def quantize_shard(self, spec: LinearSpec, shard: Shard, agree: Agree) -> Quantized:
        """See Kind. FSDP does not divide rows, so row scales need no communication: `agree` is unused."""
        return Quantized(*_rows(spec, shard.rows_MK, rounded_to=shard.compute_dtype))

    def pack_shard(self, spec: LinearSpec, shard: Shard, agree: Agree, num_rows: int) -> Packed:
        """See Kind. One pass: a row is rounded, quantized and packed while it is in the cache."""
        buffer = quantize_packed_rows(
            shard.rows_MK,
            num_rows,
            spec.fmt,
            power_of_two=spec.power_of_two,
            rounded_to=shard.compute_dtype,
            rotated=spec.rotated,
        )
        return Packed(buffer, None)

    def quantize_tokens(self, spec: LinearSpec, x_tK: Tensor, agree: Agree) -> Quantized:
        return Quantized(*_rows(spec, x_tK))


class Int8Rowcol(Rowwise):
    """`int8_rowcol`: INT8 with one scale per row or column.

    This kind runs on NVIDIA GPUs since Ampere, and on CPUs. By default grad_weight is `column`.
    """

    name = "int8_rowcol"
    served_as = "int8"
    fmt = "int8"
    operations = ("int8_gemm",)


class Int8Rotated(Rowwise):
    """`int8_rotated`: `int8_rowcol` after a rotation, for activations with outlier channels.

    Hadamard blocks of 128 spread an outlier over its block before x and W are quantized by rows
    (lptune/numerics/rotation.py). H is orthogonal and its own inverse, so

        output         (x H)(W H).T             x H row,          W H row
        grad_input     (g * s (q of W H)) H     g * s_W row,      W H as in `output`
        grad_weight    ((g * s).T (q of x H)) H g * s_x column,   x H as in `output`

    Each operand is rotated and quantized once: W H for forward, backward and the 8-bit gather (rows stay
    whole, and a rank rotates its own), and x H for both of its GEMMs, so that x is saved for backward in 8
    bits. The scales of rows are folded into g: a token without a gradient has no weight in grad_weight,
    however large it is. A rotation costs 7 additions per element, no GEMM and no collective.
    """

    name = "int8_rotated"
    fmt = "int8"
    rotated = True
    operations = ("int8_gemm",)


class Float8Rowwise(Rowwise):
    """`float8_rowwise`: e4m3 with one scale per row or column. All scales are powers of two.

    The GEMMs are those of int8_rowcol in float8. Scales that are powers of two make dequantizing to bfloat16
    exact. g is e4m3 too: one row has a smaller range of values than the whole tensor, so it does not need the
    range of e5m2.
    """

    name = "float8_rowwise"
    served_as = "float8"
    fmt = "e4m3"
    power_of_two = True
    operations = ("float8_gemm", "float8_other_gemm")


class Float8RowwiseWithGwHp(Float8Rowwise):
    """`float8_rowwise_with_gw_hp`: `float8_rowwise` with grad_weight in the compute dtype.

    grad_weight contracts over tokens, and an outlier token coarsens the scales of columns most. Running one
    of the three GEMMs in compute dtype gives up a third of the saving.
    """

    name = "float8_rowwise_with_gw_hp"


def _rows(
    spec: LinearSpec, matrix: Tensor, *, transposed: bool = False, rounded_to: torch.dtype | None = None
) -> QuantizedRows:
    """x or W in 8 bits, by rows. transposed, rounded_to: as for `quantize_rows`."""
    return quantize_rows(
        matrix,
        spec.fmt,
        power_of_two=spec.power_of_two,
        rotated=spec.rotated,
        transposed=transposed,
        rounded_to=rounded_to,
    )


def _input_rows(
    spec: LinearSpec, x_TK: Tensor, quantized_x: Quantized | None = None
) -> tuple[QuantizedRows | None, Saved]:
    """x in 8 bits, or None if no GEMM wants it so; and what backward gets."""
    if quantized_x is not None:
        x = QuantizedRows(*quantized_x)
    elif spec.output == "low" or spec.grad_weight == "folded":
        x = _rows(spec, x_TK)
    else:
        return None, (x_TK,)
    assert isinstance(spec.kind, Rowwise)
    return x, x if spec.grad_weight == "folded" or spec.kind.saves_rounded_x else (x_TK,)


def _high_weight(spec: LinearSpec, w_NK: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight of a GEMM that is `high`, in `dtype`."""
    if not spec.high_uses_8_bit_weight:
        return w_NK
    rows = _weight_rows(spec, w_NK)
    return dequantize_rotated(rows, dtype) if spec.rotated else dequantize(rows, dtype)


def _weight_rows(spec: LinearSpec, w_NK: Tensor, transposed: bool = False) -> QuantizedRows:
    assert isinstance(spec.kind, Rowwise)
    return spec.kind.weight_rows(spec, w_NK, transposed)


def _rotated_back(spec: LinearSpec, gradient: Tensor) -> Tensor:
    return rotate(gradient, gradient.dtype) if spec.rotated else gradient


def _gradient_rows(spec: LinearSpec, g_TN: Tensor, multiplier: Tensor | None, layer: Tensor) -> QuantizedRows:
    fmt, power_of_two = spec.grad_fmt, spec.power_of_two
    if spec.stochastic:
        return quantize_rows_stochastic(g_TN, fmt, layer, multiplier_1K=multiplier, power_of_two=power_of_two)
    return quantize_rows(g_TN, fmt, multiplier_1K=multiplier, power_of_two=power_of_two)


def _gradient_columns(
    spec: LinearSpec, g_TN: Tensor, multiplier: Tensor | None, layer: Tensor
) -> QuantizedColumns:
    fmt, power_of_two, transposed = spec.grad_fmt, spec.power_of_two, k_major(g_TN.device)
    if spec.stochastic:
        return quantize_columns_stochastic(
            g_TN, fmt, layer, multiplier_M1=multiplier, power_of_two=power_of_two, transposed=transposed
        )
    return quantize_columns(
        g_TN, fmt, multiplier_M1=multiplier, power_of_two=power_of_two, transposed=transposed
    )


def _grad_input(
    spec: LinearSpec,
    g_TN: Tensor,
    g: QuantizedRows | None,
    w_NK: Tensor,
    w_rows: QuantizedRows | None,
    layer: Tensor,
) -> Tensor:
    dtype = g_TN.dtype
    if spec.grad_input == "high":
        return g_TN @ _high_weight(spec, w_NK, dtype)
    assert g is not None
    if spec.grad_input == "folded":
        assert w_rows is not None
        q_NK, scale_1K = w_rows.q_MK, None  # g contains W's scales
    else:
        # Quantizes the original weight (`column`) or the dequantized rows (`requantized`) by columns.
        from_NK = w_NK if w_rows is None else dequantize(w_rows, dtype)
        q_NK, scale_1K = quantize_columns(
            from_NK, spec.fmt, power_of_two=spec.power_of_two, transposed=k_major(g_TN.device)
        )
    gx_TK = scaled_mm(g.q_MK, q_NK, g.scale_M1, scale_1K, dtype, layer, GRAD_INPUT, emulate=spec.emulate)
    return _rotated_back(spec, gx_TK)


def _grad_weight(
    spec: LinearSpec, g_TN: Tensor, g: QuantizedColumns | None, saved: Saved, layer: Tensor
) -> Tensor:
    dtype, transposed = g_TN.dtype, k_major(g_TN.device)
    if spec.grad_weight == "high":
        return g_TN.t() @ (saved[0] if len(saved) == 1 else dequantize(QuantizedRows(*saved), dtype))
    if spec.grad_weight == "folded":
        xq_TK, x_scale_T1 = saved
        g = _gradient_columns(spec, g_TN, x_scale_T1, layer)
        # No scale: g contains x's scales.
        xq_TK, x_scale_1K = transposed_copy(xq_TK) if transposed else xq_TK, None
    else:
        xq_TK, x_scale_1K = quantize_columns(
            saved[0], spec.fmt, power_of_two=spec.power_of_two, transposed=transposed
        )
    assert g is not None
    gw_NK = scaled_mm(
        g.q_MK.t(), xq_TK, g.scale_1K.t(), x_scale_1K, dtype, layer, GRAD_WEIGHT, emulate=spec.emulate
    )
    return _rotated_back(spec, gw_NK)
