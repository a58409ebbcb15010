"""GEMMs on 8-bit operands behind custom ops `lptune::*`, with a plain-torch reference beside each.

A custom op is opaque to torch.compile: what it does at run time really happened. That is why the count of
executed GEMMs (`record_gemms`) is kept inside the ops and nowhere else.
"""

from lptune.kernels.backend import choose_backend, requested_backend
from lptune.kernels.int8 import cast, int8_scaled_mm
from lptune.kernels.record import GEMMS, Executed, layer_handle, record_gemms

__all__ = [
    "GEMMS",
    "Executed",
    "cast",
    "choose_backend",
    "int8_scaled_mm",
    "layer_handle",
    "record_gemms",
    "requested_backend",
]
