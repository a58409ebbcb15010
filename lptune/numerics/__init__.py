"""Pure tensor maths of low precision: formats, scaling, error measures. No modules, no kernels."""

from lptune.numerics.error import predicted_relative_error, relative_error, sqnr_db
from lptune.numerics.formats import INT8, Format
from lptune.numerics.quantize import (
    QuantizedColumns,
    QuantizedRows,
    dequantize,
    quantize_columns,
    quantize_rows,
)

__all__ = [
    "INT8",
    "Format",
    "QuantizedColumns",
    "QuantizedRows",
    "dequantize",
    "predicted_relative_error",
    "quantize_columns",
    "quantize_rows",
    "relative_error",
    "sqnr_db",
]
