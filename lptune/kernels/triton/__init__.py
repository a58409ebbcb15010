"""The CUDA kernels, in Triton: quantizers and GEMMs. Imported only where they run (kernels/backend.py).

    formats.py    from an amax to a scale, from a value to 8 bits: device functions
    quantize.py   by column, by tensor, by row and column; what holds for all of them
    by_row.py     by row
    rotation.py   the rotation in the quantizer by row, or before it
    by_amax.py    by an amax that is known before: of a whole weight, of past steps
    stochastic.py by row, by column, by tensor, to bfloat16, rounded stochastically
    grouped.py    INT8 and float8 GEMMs of groups (experts), and their quantizer by columns
    gemm.py       INT8 and float8 GEMM, scales in the epilogue
    hopper.py     the same GEMMs for Hopper, in Gluon
    blocks.py     one scale per block: the quantizers
    block_mm.py   one scale per block: the GEMM, which applies them inside its sum
    launch.py     properties of the device, and measuring
    again.py      launches that are made again, for little of the host's time
    tuning.py     the fastest configuration on this device, kept on disk

Each kernel equals its reference in plain torch: INT8 GEMMs and all quantizers bitwise. Without a GPU they are
tested in Triton's interpreter and compiled ahead of time (tests/kernels/test_triton_*.py). The tests marked
gpu make the same comparisons on hardware; they passed on an H100, those of GEMMs also on an H200.
"""

from lptune.kernels.triton.block_mm import block_scaled_mm
from lptune.kernels.triton.blocks import quantize_blocks, quantize_row_and_column_blocks
from lptune.kernels.triton.by_amax import block_amaxes, quantize_by_amax, quantize_delayed
from lptune.kernels.triton.by_row import quantize_rows
from lptune.kernels.triton.gemm import scaled_mm
from lptune.kernels.triton.grouped import grouped_mm, grouped_outer, quantize_grouped_columns, transposed
from lptune.kernels.triton.quantize import (
    quantize_columns,
    quantize_rows_and_columns,
    quantize_tensor,
    quantize_tensor_both_ways,
)
from lptune.kernels.triton.rotation import rotate
from lptune.kernels.triton.stochastic import quantize_rows_stochastic, quantize_stochastic, round_to_bfloat16

__all__ = [
    "block_amaxes",
    "block_scaled_mm",
    "grouped_mm",
    "grouped_outer",
    "quantize_blocks",
    "quantize_by_amax",
    "quantize_columns",
    "quantize_delayed",
    "quantize_grouped_columns",
    "quantize_row_and_column_blocks",
    "quantize_rows",
    "quantize_rows_and_columns",
    "quantize_rows_stochastic",
    "quantize_stochastic",
    "quantize_tensor",
    "quantize_tensor_both_ways",
    "rotate",
    "round_to_bfloat16",
    "scaled_mm",
    "transposed",
]
