"""8-bit GEMMs and quantizers as custom ops `lptune::*`, each with a reference in plain torch.

A custom op is opaque to torch.compile: code inside it runs if and only if the op runs. So the count of
executed GEMMs (`record_gemms`) is kept inside the ops and nowhere else.
"""

from lptune.kernels.backend import backend_text, choose_backend, k_major, requested_backend, type_of
from lptune.kernels.block_mm import block_scaled_mm
from lptune.kernels.by_amax import block_amaxes, quantize_by_amax
from lptune.kernels.cpu_gemms import emulated_bfloat16
from lptune.kernels.delayed import (
    OPERANDS,
    WEIGHT,
    quantize_delayed,
    quantize_delayed_both_ways,
)
from lptune.kernels.grouped import (
    grouped_mm,
    grouped_outer,
    in_runs,
    quantize_grouped_columns,
    quantize_grouped_rows,
)
from lptune.kernels.layout import transposed_copy
from lptune.kernels.nvfp4 import nvfp4_mm, quantize_nvfp4
from lptune.kernels.packed_rows import HEADER_BYTES, Packed, Quantized, pack_rows, unpack_rows
from lptune.kernels.quantize import (
    dequantize_rotated,
    quantize_blocks,
    quantize_columns,
    quantize_packed_rows,
    quantize_row_and_column_blocks,
    quantize_rows,
    quantize_rows_and_columns,
    quantize_tensor,
    quantize_tensor_both_ways,
    rotate,
)
from lptune.kernels.record import (
    GEMMS,
    GRAD_INPUT,
    GRAD_WEIGHT,
    KEY,
    LIVE,
    MICRO_BATCH,
    NUMBER,
    OUTPUT,
    PART,
    RECOMPUTED,
    AmaxSource,
    Executed,
    LayerAmaxes,
    expect_gather,
    gathered_bytes,
    handle_of_part,
    layer_handle,
    not_recorded,
    note_gather,
    record_gemms,
)
from lptune.kernels.scaled_mm import cast, scaled_mm
from lptune.kernels.stochastic import (
    quantize_columns_stochastic,
    quantize_rows_stochastic,
    quantize_tensor_stochastic,
    quantize_tensor_stochastic_both_ways,
    quantize_weight_rows,
    round_to_bfloat16,
)
from lptune.kernels.ternary import quantize_ternary, unpack_ternary
from lptune.kernels.weight_only import int4_weight_mm, weight_only_mm

__all__ = [
    "GEMMS",
    "GRAD_INPUT",
    "GRAD_WEIGHT",
    "HEADER_BYTES",
    "KEY",
    "LIVE",
    "MICRO_BATCH",
    "PART",
    "NUMBER",
    "OUTPUT",
    "OPERANDS",
    "Packed",
    "Quantized",
    "RECOMPUTED",
    "WEIGHT",
    "AmaxSource",
    "Executed",
    "LayerAmaxes",
    "backend_text",
    "block_amaxes",
    "block_scaled_mm",
    "cast",
    "choose_backend",
    "dequantize_rotated",
    "expect_gather",
    "gathered_bytes",
    "grouped_mm",
    "grouped_outer",
    "in_runs",
    "k_major",
    "emulated_bfloat16",
    "handle_of_part",
    "int4_weight_mm",
    "layer_handle",
    "not_recorded",
    "note_gather",
    "nvfp4_mm",
    "pack_rows",
    "quantize_blocks",
    "quantize_by_amax",
    "quantize_columns",
    "quantize_columns_stochastic",
    "quantize_delayed",
    "quantize_delayed_both_ways",
    "quantize_grouped_columns",
    "quantize_grouped_rows",
    "quantize_nvfp4",
    "quantize_packed_rows",
    "quantize_row_and_column_blocks",
    "quantize_rows",
    "quantize_rows_stochastic",
    "quantize_rows_and_columns",
    "quantize_tensor",
    "quantize_tensor_both_ways",
    "quantize_tensor_stochastic",
    "quantize_tensor_stochastic_both_ways",
    "quantize_ternary",
    "quantize_weight_rows",
    "round_to_bfloat16",
    "record_gemms",
    "requested_backend",
    "rotate",
    "scaled_mm",
    "transposed_copy",
    "type_of",
    "unpack_rows",
    "unpack_ternary",
    "weight_only_mm",
]
