"""Which kinds does a device run natively, and which would it only emulate?"""

import torch
from torch import nn

from lptune.base.errors import UserError
from lptune.config import PRECISION_KINDS, PrecisionConfig
from lptune.linear.convert import convert


def native_kinds(device: torch.device) -> list[str]:
    """`none` and the kinds whose GEMMs `device` runs without emulation, in the order of PRECISION_KINDS.

    `convert` decides, on a layer of 32 x 32: so this is what a run would do, LPTUNE_KERNELS included.
    """
    return [kind for kind in PRECISION_KINDS if _is_native(kind, device)]


def _is_native(kind: str, device: torch.device) -> bool:
    with torch.device("meta"):
        layer = nn.Sequential(nn.Linear(32, 32, bias=False))
    precision = PrecisionConfig(kind=kind, verify=False)
    try:
        return convert(layer, precision, device=device).backend(device.type) != "emulation"
    except UserError:  # the device has no such GEMM
        return False
