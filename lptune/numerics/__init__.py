"""Pure tensor maths of low precision: formats, scaling, rounding. No modules, no kernels."""

from lptune.numerics.formats import E4M3, E5M2, FORMATS, INT8, Format
from lptune.numerics.groups import INT4_GROUP, dequantize_groups, quantize_groups
from lptune.numerics.mx import MX_BLOCK, QuantizedMX, quantize_mx, to_e8m0
from lptune.numerics.nvfp4 import (
    NVFP4_BLOCK,
    QuantizedNvfp4,
    dequantize_nvfp4,
    quantize_nvfp4,
    rotate_nvfp4,
    scaled_by_block,
)
from lptune.numerics.quantize import (
    QuantizedBlocks,
    QuantizedColumns,
    QuantizedRows,
    QuantizedTensor,
    dequantize,
    dequantize_blocks,
    expand_blocks,
    find_scale,
    nan_as_inf,
    quantize_blocks,
    quantize_columns,
    quantize_rows,
    quantize_tensor,
    round_to,
    scale_from_amax,
)
from lptune.numerics.rotation import rotate, rotation_runs
from lptune.numerics.rounding import (
    random_key,
    stochastic_round_to,
    stochastic_round_to_bfloat16,
    uniform,
)

__all__ = [
    "E4M3",
    "E5M2",
    "FORMATS",
    "INT4_GROUP",
    "INT8",
    "MX_BLOCK",
    "NVFP4_BLOCK",
    "Format",
    "QuantizedBlocks",
    "QuantizedColumns",
    "QuantizedMX",
    "QuantizedNvfp4",
    "QuantizedRows",
    "QuantizedTensor",
    "dequantize",
    "dequantize_blocks",
    "dequantize_groups",
    "dequantize_nvfp4",
    "expand_blocks",
    "find_scale",
    "nan_as_inf",
    "quantize_blocks",
    "quantize_columns",
    "quantize_groups",
    "quantize_mx",
    "quantize_nvfp4",
    "quantize_rows",
    "quantize_tensor",
    "random_key",
    "rotate",
    "rotate_nvfp4",
    "rotation_runs",
    "round_to",
    "scale_from_amax",
    "scaled_by_block",
    "stochastic_round_to",
    "stochastic_round_to_bfloat16",
    "to_e8m0",
    "uniform",
]
