"""The GEMMs of a grouped linear layer in compute dtype: where a GEMM is `high`, and to compare with.

Shapes: S rows, E groups, K in_features, N out_features of one group.
"""

import torch.nn.functional as F
from torch import Tensor


def multiply_groups(x_SC: Tensor, w_RK: Tensor, ends_E: Tensor, *, by_rows: bool) -> Tensor:
    """Each group's rows of x times its matrix of w (E * N, K), turned if `by_rows`."""
    w_ENK = w_RK.unflatten(0, (ends_E.shape[0], -1))
    return F.grouped_mm(x_SC, w_ENK.transpose(1, 2) if by_rows else w_ENK, offs=ends_E)


def grad_weight_of_groups(g_SN: Tensor, x_SK: Tensor, ends_E: Tensor) -> Tensor:
    """g.T @ x over each group's own rows, (E * N, K)."""
    return F.grouped_mm(g_SN.t(), x_SK, offs=ends_E).flatten(0, 1)
