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
from lptune.linear.grouped_high import grad_weight_of_groups, multiply_groups
from lptune.linear.kind import Agree, Kind, LinearSpec, Shard
from lptune.linear.weights.master_weight import GatheredWeight
from lptune.numerics import QuantizedColumns, QuantizedRows, dequantize


class Rowwise(Kind):
    """x, W and g have a scale for each row or column. A gather of W or x sends each row with its scale."""

    row_scales = True

    def forward(
        self,
        spec: LinearSpec,
        x_TK: Tensor,
        w_NK: Tensor,
        layer: Tensor,
        quantized_x: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See Kind. quantized_x: by rows; allowed only if `output` is low and `grad_weight` is folded, since
        other GEMMs need the values of x_TK, which is a placeholder then.
        """
        assert quantized_x is None or (spec.output == "low" and spec.grad_weight == "folded")
        fmt, power_of_two = spec.fmt, spec.power_of_two
        saved: tuple[Tensor, ...] = (x_TK,)
        x = None if quantized_x is None else QuantizedRows(*quantized_x)
        if x is None and (spec.output == "low" or spec.grad_weight == "folded"):
            x = quantize_rows(x_TK, fmt, power_of_two=power_of_two, rotated=spec.rotated)
        if spec.grad_weight == "folded":
            assert x is not None
            saved = (x.q_MK, x.scale_M1)
        if spec.output == "high":
            return x_TK @ _high_weight(spec, w_NK, x_TK.dtype).t(), saved
        assert x is not None
        w = _weight_rows(spec, w_NK)
        out_TN = scaled_mm(
            x.q_MK, w.q_MK.t(), x.scale_M1, w.scale_M1.t(), x_TK.dtype, layer, OUTPUT, emulate=spec.emulate
        )
        return out_TN, saved

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
        transposed = k_major(g_TN.device)
        w_rows = None
        if needs_grad_input and spec.grad_input in ("folded", "requantized"):
            # `folded` multiplies by these rows. `requantized` only dequantizes them, from any layout.
            transposed_w = transposed and spec.grad_input == "folded"
            w_rows = _weight_rows(spec, w_NK, transposed_w)
        multiplier = w_rows.scale_M1.t() if w_rows and spec.grad_input == "folded" else None

        g_rows: QuantizedRows | None = None
        g_columns: QuantizedColumns | None = None
        wants_rows = needs_grad_input and spec.grad_input != "high"
        wants_columns = needs_grad_weight and spec.grad_weight == "column"
        if spec.stochastic:
            # These ops store row by row; `_grad_weight` makes a transposed copy.
            if wants_rows:
                g_rows = quantize_rows_stochastic(
                    g_TN, spec.grad_fmt, layer, multiplier_1K=multiplier, power_of_two=spec.power_of_two
                )
            if wants_columns:
                g_columns = quantize_columns_stochastic(
                    g_TN, spec.grad_fmt, layer, power_of_two=spec.power_of_two, transposed=transposed
                )
        elif wants_rows and wants_columns:
            g_rows, g_columns = quantize_rows_and_columns(
                g_TN,
                spec.grad_fmt,
                multiplier_1K=multiplier,
                power_of_two=spec.power_of_two,
                transposed=transposed,
            )
        elif wants_rows:
            g_rows = quantize_rows(
                g_TN, spec.grad_fmt, multiplier_1K=multiplier, power_of_two=spec.power_of_two
            )
        elif wants_columns:
            g_columns = quantize_columns(
                g_TN, spec.grad_fmt, power_of_two=spec.power_of_two, transposed=transposed
            )

        gx_TK = _grad_input(spec, g_TN, g_rows, w_NK, w_rows, layer) if needs_grad_input else None
        gw_NK = _grad_weight(spec, g_TN, g_columns, saved, layer) if needs_grad_weight else None
        return gx_TK, gw_NK

    def why_not_grouped(self, spec: LinearSpec) -> str | None:
        if spec.stochastic:
            return "stochastic rounding has no grouped quantizers"
        if spec.grad_input not in ("folded", "high"):
            return f"grad_input={spec.grad_input} has no GEMM for groups"
        return None

    def grouped_forward(
        self, spec: LinearSpec, x_SK: Tensor, w_RK: Tensor, ends_E: Tensor, layer: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See Kind. Rows have their own scales, so x is quantized for all groups at once, as W is."""
        saved: tuple[Tensor, ...] = (x_SK,)
        x = None
        if spec.output == "low" or spec.grad_weight == "folded":
            x = quantize_rows(x_SK, spec.fmt, power_of_two=spec.power_of_two, rotated=spec.rotated)
        if spec.grad_weight == "folded":
            assert x is not None
            saved = (x.q_MK, x.scale_M1)
        if spec.output == "high":
            return multiply_groups(x_SK, _high_weight(spec, w_RK, x_SK.dtype), ends_E, by_rows=True), saved
        assert x is not None
        w, dtype, emulate = _weight_rows(spec, w_RK), x_SK.dtype, spec.emulate
        out_SN = grouped_mm(
            x.q_MK,
            w.q_MK,
            x.scale_M1,
            w.scale_M1,
            ends_E,
            dtype,
            layer,
            OUTPUT,
            by_rows=True,
            emulate=emulate,
        )
        return out_SN, saved

    def grouped_backward(
        self,
        spec: LinearSpec,
        g_SN: Tensor,
        w_RK: Tensor,
        ends_E: Tensor,
        saved: tuple[Tensor, ...],
        layer: Tensor,
        needs_grad_input: bool,
        needs_grad_weight: bool,
        most: int | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """See Kind. W's scales are folded into g, for each row those of its group; columns have a scale for
        each group.
        """
        dtype, emulate, gx_SK, gw_RK = g_SN.dtype, spec.emulate, None, None
        if needs_grad_input and spec.grad_input == "high":
            gx_SK = multiply_groups(g_SN, _high_weight(spec, w_RK, dtype), ends_E, by_rows=False)
        elif needs_grad_input:
            w = _weight_rows(spec, w_RK)
            scale_EN = w.scale_M1.view(len(ends_E), -1)
            g = quantize_grouped_rows(g_SN, spec.grad_fmt, scale_EN, ends_E, power_of_two=spec.power_of_two)
            gx_SK = grouped_mm(
                g.q_MK,
                w.q_MK,
                g.scale_M1,
                None,
                ends_E,
                dtype,
                layer,
                GRAD_INPUT,
                by_rows=False,
                emulate=emulate,
            )
            gx_SK = rotate(gx_SK, dtype) if spec.rotated else gx_SK
        if needs_grad_weight and spec.grad_weight == "high":
            gw_RK = grad_weight_of_groups(g_SN, saved[0], ends_E)
        elif needs_grad_weight:
            xq_SK, *folded = saved
            columns = quantize_grouped_columns(
                g_SN,
                spec.grad_fmt,
                ends_E,
                multiplier_S1=folded[0] if folded else None,
                power_of_two=spec.power_of_two,
            )
            x_scale_EK = None
            if folded:
                xq_SK = in_runs(xq_SK, ends_E)
            else:
                xq_SK, x_scale_EK = quantize_grouped_columns(
                    xq_SK, spec.fmt, ends_E, power_of_two=spec.power_of_two
                )
            gw_RK = grouped_outer(
                columns.q_MK,
                xq_SK,
                columns.scale_1K,
                x_scale_EK,
                ends_E,
                dtype,
                layer,
                most=most,
                emulate=emulate,
            )
            gw_RK = rotate(gw_RK, dtype) if spec.rotated else gw_RK
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
        return Quantized(
            *quantize_rows(
                shard.rows_MK,
                spec.fmt,
                power_of_two=spec.power_of_two,
                rounded_to=shard.compute_dtype,
                rotated=spec.rotated,
            )
        )

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
        rows = quantize_rows(x_tK, spec.fmt, power_of_two=spec.power_of_two, rotated=spec.rotated)
        return Quantized(*rows)


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
    operations = ("float8_gemm", "float8_rowwise_gemm")


class Float8RowwiseWithGwHp(Float8Rowwise):
    """`float8_rowwise_with_gw_hp`: `float8_rowwise` with grad_weight in the compute dtype.

    grad_weight contracts over tokens, and an outlier token coarsens the scales of columns most. Running one
    of the three GEMMs in compute dtype gives up a third of the saving.
    """

    name = "float8_rowwise_with_gw_hp"


def _high_weight(spec: LinearSpec, w_NK: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight of a GEMM that is `high`, in `dtype`."""
    if not spec.high_uses_8_bit_weight:
        return w_NK
    rows = _weight_rows(spec, w_NK)
    return dequantize_rotated(rows, dtype) if spec.rotated else dequantize(rows, dtype)


def _weight_rows(spec: LinearSpec, w_NK: Tensor, transposed: bool = False) -> QuantizedRows:
    """The 8-bit rows of a weight: quantized from the compute dtype, or as they were gathered."""
    if not isinstance(w_NK, GatheredWeight):
        return quantize_rows(
            w_NK, spec.fmt, power_of_two=spec.power_of_two, transposed=transposed, rotated=spec.rotated
        )
    return QuantizedRows(transposed_copy(w_NK.q_NK) if transposed else w_NK.q_NK, w_NK.scale)


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
    return rotate(gx_TK, dtype) if spec.rotated else gx_TK


def _grad_weight(
    spec: LinearSpec,
    g_TN: Tensor,
    g: QuantizedColumns | None,
    saved: tuple[Tensor, ...],
    layer: Tensor,
) -> Tensor:
    dtype, transposed = g_TN.dtype, k_major(g_TN.device)
    if spec.grad_weight == "high":
        return g_TN.t() @ saved[0]
    if spec.grad_weight == "folded":
        xq_TK, x_scale_T1 = saved
        if spec.stochastic:
            g = quantize_columns_stochastic(
                g_TN,
                spec.grad_fmt,
                layer,
                multiplier_M1=x_scale_T1,
                power_of_two=spec.power_of_two,
                transposed=transposed,
            )
        else:
            g = quantize_columns(
                g_TN,
                spec.grad_fmt,
                multiplier_M1=x_scale_T1,
                power_of_two=spec.power_of_two,
                transposed=transposed,
            )
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
    return rotate(gw_NK, dtype) if spec.rotated else gw_NK
