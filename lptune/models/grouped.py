"""GroupedLinear: E linear layers of one shape as one module, each for its own rows of the input.

The experts of a mixture are two of them. Their matrices are stacked into one, (E * N, K), so that an expert's
weight is sharded, stored and converted as that of any linear layer. `linear.convert` finds these layers by
`num_groups`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lptune.base.errors import UserError
from lptune.hardware.planned import planned_device_type


class GroupedLinear(nn.Linear):
    """E bias-free linear layers K -> N. The rows of the input are sorted by group."""

    def __init__(self, num_groups: int, in_features: int, out_features: int) -> None:
        """out_features: N, of one group. The weight has E * N rows."""
        super().__init__(in_features, num_groups * out_features, bias=False)
        self.num_groups = num_groups

    def forward(self, x: Tensor, ends: Tensor, most: int | None = None) -> Tensor:  # type: ignore[override]
        """(S, K) -> (S, N). ends: int32 (E,), where the rows of each group end; the last is S. most: no group
        has more rows, for the converted layer that takes this one's place.
        """
        if (planned_device_type() or x.device.type) == "cuda" and x.dtype != torch.bfloat16:
            raise UserError("compute_dtype: experts run in bfloat16 on GPUs; set it to bfloat16")
        w_ENK = self.weight.unflatten(0, (self.num_groups, -1))
        return F.grouped_mm(x, w_ENK.transpose(1, 2), offs=ends)


def ends_of_groups(sorted_groups_S: Tensor, num_groups: int) -> Tensor:
    """Where the rows of each group end, int32 (E,), for rows sorted by group."""
    numbers_E = torch.arange(num_groups, device=sorted_groups_S.device)
    return torch.searchsorted(sorted_groups_S, numbers_E, right=True).int()
