"""Pure tensor maths of low precision: formats, scaling, rounding, error measures. No modules, no kernels."""

from lptune.numerics.error import (
    predicted_block_error,
    predicted_relative_error,
    relative_error,
    sqnr_db,
)
from lptune.numerics.formats import E4M3, E5M2, FORMATS, INT8, Format
from lptune.numerics.mx import MX_BLOCK, QuantizedMX, dequantize_mx, quantize_mx, to_e8m0
from lptune.numerics.quantize import (
    QuantizedBlocks,
    QuantizedColumns,
    QuantizedRows,
    QuantizedTensor,
    Scale,
    dequantize,
    dequantize_blocks,
    expand_blocks,
    quantize_blocks,
    quantize_columns,
    quantize_rows,
    quantize_tensor,
    quantize_with_scale,
    round_to,
    scale_from_amax,
)
from lptune.numerics.rounding import random_key, stochastic_round_to, uniform

__all__ = [
    "E4M3",
    "E5M2",
    "FORMATS",
    "INT8",
    "MX_BLOCK",
    "Format",
    "QuantizedBlocks",
    "QuantizedColumns",
    "QuantizedMX",
    "QuantizedRows",
    "QuantizedTensor",
    "Scale",
    "dequantize",
    "dequantize_blocks",
    "dequantize_mx",
    "expand_blocks",
    "predicted_block_error",
    "predicted_relative_error",
    "quantize_blocks",
    "quantize_columns",
    "quantize_mx",
    "quantize_rows",
    "quantize_tensor",
    "quantize_with_scale",
    "random_key",
    "relative_error",
    "round_to",
    "scale_from_amax",
    "sqnr_db",
    "stochastic_round_to",
    "to_e8m0",
    "uniform",
]
