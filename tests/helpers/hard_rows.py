"""Float32 rows that are hard to round to bfloat16 and to quantize."""

import torch
from torch import Tensor


def hard_to_round(k: int) -> Tensor:
    """264 rows, (264, k). The first 255 have each magnitude of float32, from subnormal to beyond bfloat16, in
    random bits; a third of the elements is halfway between two numbers of bfloat16. Other rows have inf, NaN
    in several codes, the largest float32, and zeros.
    """
    generator = torch.Generator().manual_seed(k)
    exponents = torch.arange(0, 255)[:, None] - torch.randint(0, 4, (255, k), generator=generator)
    significands = torch.randint(0, 2**23, (255, k), generator=generator)
    significands[:, ::3] = significands[:, ::3] & 0x7F0000 | 0x8000
    x = (exponents.clamp(min=0) << 23 | significands).to(torch.int32).view(torch.float32)
    x[:, ::2] *= -1
    codes = torch.tensor([0x7F800000, -0x800000, 0x7FC00000, 0x7FFFFFFF, -1, 0x7F800001, 0, 0x7F7FFFFF])
    special = torch.randn(len(codes), k, generator=generator)
    special[:, k // 2] = codes.to(torch.int32).view(torch.float32)
    return torch.cat([x, special, torch.zeros(1, k)])
