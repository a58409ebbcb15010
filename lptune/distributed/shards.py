"""What of a sharded tensor is on this rank."""

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lptune.linear import plain_rows


def local_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """This rank's part of `tensor` (itself when it is not sharded) and the number of its first row."""
    tensor = plain_rows(tensor)
    if not isinstance(tensor, DTensor):
        return tensor.detach(), 0
    local = tensor.to_local().detach()
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    assert all(o == 0 for o in offset[1:]), "only rows are sharded"
    return local, offset[0] if local.numel() else 0
