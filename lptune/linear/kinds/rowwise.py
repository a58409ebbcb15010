"""The code that kinds with one scale per row or column share: `int8_rowcol`, `int8_rotated`,
`float8_rowwise`, `float8_rowwise_with_gw_hp` (whose grad_weight is always `high`).

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
grad_weight are rotated back: they come from W H and x H (int8_rotated.py).

`transposed` operands have the same shape, but are stored column by column: CUDA's 8-bit GEMMs want both
operands contiguous along the contraction (`k_major`). The ops of lptune.kernels run the GEMMs. The functions
of lptune.numerics with the same names give the same bits, and are used where errors are predicted.

Shapes: T tokens, K in_features, N out_features.
"""

import torch
from torch import Tensor

from lptune import numerics
from lptune.kernels import (
    GRAD_INPUT,
    GRAD_WEIGHT,
    OUTPUT,
    Packed,
    Quantized,
    dequantize_rotated,
    k_major,
    quantize_columns,
    quantize_columns_stochastic,
    quantize_packed_rows,
    quantize_rows,
    quantize_rows_and_columns,
    quantize_rows_stochastic,
    rotate,
    scaled_mm,
    transposed_copy,
)
from lptune.linear.kind import Agree, Kind, LinearSpec
from lptune.linear.noise import Operand, Operands, cast_error, known, rounded
from lptune.linear.shared_input import Once
from lptune.linear.weights.master_weight import GatheredWeight
from lptune.linear.weights.twice_quantized import TwiceQuantized
from lptune.linear.weights.weight_amax import Shard
from lptune.numerics import (
    FORMATS,
    QuantizedColumns,
    QuantizedRows,
    dequantize,
    quantization_step,
)


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
        once: Once,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See Kind. quantized_x: by rows; allowed only if `output` is low and `grad_weight` is folded, since
        other GEMMs need the values of x_TK, which is a placeholder then.
        """
        assert quantized_x is None or (spec.output == "low" and spec.grad_weight == "folded")
        fmt, power_of_two = spec.fmt, spec.power_of_two
        saved: tuple[Tensor, ...] = (x_TK,)
        x = None if quantized_x is None else QuantizedRows(*quantized_x)
        if x is None and (spec.output == "low" or spec.grad_weight == "folded"):
            x = once(lambda: quantize_rows(x_TK, fmt, power_of_two=power_of_two, rotated=spec.rotated))
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
        once: Once,
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
        gw_NK = _grad_weight(spec, g_TN, g_columns, saved, layer, once) if needs_grad_weight else None
        return gx_TK, gw_NK

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

    def quantizes_twice(self, spec: LinearSpec) -> bool:
        return spec.output == "low" and spec.grad_input == "column"

    def quantize_twice(self, spec: LinearSpec, w_NK: Tensor) -> tuple[Quantized, Quantized]:
        rows, columns = quantize_rows_and_columns(
            w_NK, spec.fmt, power_of_two=spec.power_of_two, transposed=k_major(w_NK.device)
        )
        return Quantized(*rows), Quantized(*columns)

    def quantize_tokens(self, spec: LinearSpec, x_tK: Tensor, agree: Agree) -> Quantized:
        rows = quantize_rows(x_tK, spec.fmt, power_of_two=spec.power_of_two, rotated=spec.rotated)
        return Quantized(*rows)

    def weight_scale_block(self, n: int, k: int) -> tuple[int, int]:
        return 1, k

    def noisy_output(self, spec: LinearSpec, x_TK: Tensor, w_NK: Tensor) -> Operands:
        return _by_row(spec, x_TK), _by_row(spec, w_NK).t()

    def noisy_grad_input(self, spec: LinearSpec, g_TN: Tensor, w_NK: Tensor) -> Operands:
        if spec.grad_input == "folded":
            # The GEMM multiplies g * s by q = W / s. Rotating its result back changes no norm, and rounds
            # once more: two roundings of values that are spread evenly have less than the variance that
            # bounds.py takes for one, in which all values would be just above a power of two.
            s_N1 = _row_scales(spec, w_NK)
            folded_TN = g_TN.to(torch.float32) * s_N1.t()
            return _gradient_by_row(spec, folded_TN), _by_row(spec, w_NK).times(_inverse(s_N1))
        w = _requantized(spec, w_NK) if spec.grad_input == "requantized" else _by_column(spec, w_NK)
        return _gradient_by_row(spec, g_TN), w

    def noisy_grad_weight(self, spec: LinearSpec, g_TN: Tensor, x_TK: Tensor) -> Operands:
        if spec.grad_weight == "folded":
            # The GEMM multiplies g * s by q = x / s.
            s_T1 = _row_scales(spec, x_TK)
            folded_TN = g_TN.to(torch.float32) * s_T1
            return _gradient_by_column(spec, folded_TN).t(), _by_row(spec, x_TK).times(_inverse(s_T1))
        return _gradient_by_column(spec, g_TN).t(), _by_column(spec, x_TK)


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
        if isinstance(w_NK, TwiceQuantized):
            q_NK, scale_1K = w_NK.grad_q_NK, w_NK.grad_scale
        else:
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
    once: Once,
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
        xq_TK, x_scale_1K = once(lambda: transposed_copy(saved[0])) if transposed else xq_TK, None
    else:
        xq_TK, x_scale_1K = once(
            lambda: quantize_columns(
                saved[0], spec.fmt, power_of_two=spec.power_of_two, transposed=transposed
            )
        )
    assert g is not None
    gw_NK = scaled_mm(
        g.q_MK.t(), xq_TK, g.scale_1K.t(), x_scale_1K, dtype, layer, GRAD_WEIGHT, emulate=spec.emulate
    )
    return rotate(gw_NK, dtype) if spec.rotated else gw_NK


def _by_row(spec: LinearSpec, x_MK: Tensor) -> Operand:
    """x or W with one scale per row."""
    x_MK = numerics.rotate(x_MK) if spec.rotated else x_MK
    return rounded(x_MK, (1, x_MK.shape[1]), spec.fmt, power_of_two=spec.power_of_two)


def _by_column(spec: LinearSpec, x_MK: Tensor) -> Operand:
    """x or W with one scale per column."""
    return rounded(x_MK, (x_MK.shape[0], 1), spec.fmt, power_of_two=spec.power_of_two)


def _gradient_by_row(spec: LinearSpec, g_TN: Tensor) -> Operand:
    block = (1, g_TN.shape[1])
    return rounded(g_TN, block, spec.grad_fmt, power_of_two=spec.power_of_two, stochastic=spec.stochastic)


def _gradient_by_column(spec: LinearSpec, g_TN: Tensor) -> Operand:
    block = (g_TN.shape[0], 1)
    return rounded(g_TN, block, spec.grad_fmt, power_of_two=spec.power_of_two, stochastic=spec.stochastic)


def _row_scales(spec: LinearSpec, x_MK: Tensor) -> Tensor:
    """The scales (M, 1) of x or W quantized by rows."""
    x_MK = numerics.rotate(x_MK) if spec.rotated else x_MK
    return numerics.quantize_rows(x_MK, FORMATS[spec.fmt], power_of_two=spec.power_of_two).scale_M1


def _inverse(scale_M1: Tensor) -> Tensor:
    """1 / scale, or 0 for a row of zeros: the factor of an operand whose row scales are folded into g."""
    return torch.where(scale_M1 > 0, 1 / scale_M1.to(torch.float64), 0.0)


def _requantized(spec: LinearSpec, w_NK: Tensor) -> Operand:
    """W with the errors of quantizing it by rows, dequantizing it and quantizing it by columns.

    The error of the first rounding is taken as noise. That of the second is computed: dequantized values lie
    on a grid, so they are not spread evenly between two 8-bit numbers, as noise assumes. If scales of rows
    and columns are similar, or all are powers of two, the second error is much less than a step.
    """
    fmt, power_of_two = FORMATS[spec.fmt], spec.power_of_two
    rows = dequantize(numerics.quantize_rows(w_NK, fmt, power_of_two=power_of_two), w_NK.dtype)
    again = numerics.quantize_columns(rows, fmt, power_of_two=power_of_two)
    twice = again.q_MK.to(torch.float64) * again.scale_1K.to(torch.float64)
    error = twice - rows.to(torch.float64)
    # The quantizer itself gives this error, and the error widens the bound that tests the quantizer. So that
    # a faulty quantizer does not pass, its error may be at most half a step, as of rounding to nearest.
    step = quantization_step(rows, (w_NK.shape[0], 1), fmt, power_of_two=power_of_two)
    # Of a step, x * (1 / scale) is off by up to 127 * 2**-23 (two roundings). A NaN or inf in W is not the
    # quantizer's fault; it makes the predicted noise NaN.
    holds = (error.abs() <= step / 2 + step * 127 * 2**-23).all() or not w_NK.isfinite().all()
    assert holds, "the second rounding is off by more than half a step"
    cast = cast_error(w_NK, (1, w_NK.shape[1]), spec.fmt, power_of_two=power_of_two)
    return _by_row(spec, w_NK).plus(cast).plus(known(error))
