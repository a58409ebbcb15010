"""What tools do to any parameter, done to the weights that hold parts."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from lptune import linear
from lptune.config import PrecisionConfig
from lptune.linear import MasterWeight
from lptune.linear.weights.row_tensor import RowTensor


def _weights(kind: str) -> tuple[nn.Sequential, list[RowTensor]]:
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)).bfloat16()
    linear.convert(model, PrecisionConfig(kind=kind, verify=False))
    linear.gather_in_8_bits(model, torch.bfloat16)
    weights = [module.weight for module in model]
    assert all(isinstance(weight, RowTensor) for weight in weights)
    return model, weights  # type: ignore[return-value]


def _float(model: nn.Module) -> None:
    model.float()


def _assign(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float32)


@pytest.mark.parametrize("convert_dtype", [_float, _assign])
def test_a_master_weight_in_another_dtype_has_rows_in_it(convert_dtype: object) -> None:
    model, weights = _weights("int8_rowcol")
    before = weights[0].clone()
    assert callable(convert_dtype)
    convert_dtype(model)
    for weight in model.parameters():
        assert isinstance(weight, MasterWeight)
        assert weight.dtype == weight.rows_NK.dtype == torch.float32
    assert torch.equal(model[0].weight, before.float())  # type: ignore[arg-type]


def test_data_that_would_be_rounded_is_refused() -> None:
    _, (weight, other) = _weights("int8_weight_only")
    with pytest.raises(RuntimeError, match="would have to be rounded to 8 bits"):
        weight.data = torch.zeros(32, 32)
    weight.data = other.data
    assert torch.equal(weight, other)


@pytest.mark.parametrize("kind", ["int8_rowcol", "int8_weight_only"])
def test_a_copy_of_a_layer_has_parts_of_its_own(kind: str) -> None:
    model, (weight, _) = _weights(kind)
    weight.grad = torch.ones(32, 32, dtype=torch.bfloat16)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    for copied in (copy.deepcopy(model), torch.load(stored, weights_only=False)):
        other = copied[0].weight
        assert type(other) is type(weight)
        assert isinstance(other, nn.Parameter)
        assert other.requires_grad
        assert torch.equal(other, weight)
        assert other.data_ptr() != weight.data_ptr()
        assert len({model[0].number, model[1].number, copied[0].number, copied[1].number}) == 4
        assert getattr(other, "number", copied[0].number) == copied[0].number
        assert copied[0].handle.tolist()[0] == copied[0].number
    shared = copy.copy(model[0])
    assert shared.weight is weight
    assert shared.number == model[0].number
    assert torch.equal(copy.deepcopy(weight).grad, weight.grad)


class _Traffic(TorchDispatchMode):
    """The operators that read or write, and the bytes of their tensors; views do neither."""

    def __init__(self) -> None:
        super().__init__()
        self.names, self.num_bytes = list[str](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.names.append(func._schema.name)
            # A result that is an argument is written to, and was not read.
            tensors = {
                id(each): each for each in tree_iter((args, kwargs, result)) if isinstance(each, Tensor)
            }
            self.num_bytes += sum(each.numel() * each.element_size() for each in tensors.values())
        return result


class _Mesh:
    """The axis of the first of three ranks."""

    def size(self) -> int:
        return 3

    def get_local_rank(self) -> int:
        return 0


@pytest.mark.parametrize("kind", ["int8_rowcol", "float8_rowwise"])
def test_a_gather_is_one_op_of_five_bytes_for_each_parameter(kind: str) -> None:
    n, k, num_rows = 64, 96, 22  # ceil(64 / 3)
    model = nn.Sequential(nn.Linear(k, n, bias=False))
    linear.convert(model, PrecisionConfig(kind=kind, verify=False, emulate=True))  # type: ignore[arg-type]
    linear.gather_in_8_bits(model, torch.bfloat16)
    local = model[0].weight.detach()[:num_rows]
    assert isinstance(local, MasterWeight)
    mesh: Any = _Mesh()
    with _Traffic() as traffic:
        (buffer,), scale = local.fsdp_pre_all_gather(mesh)
    assert buffer.shape == (num_rows, 16 + k)
    assert scale is None
    assert traffic.names == ["lptune::quantize_packed_rows"]
    assert traffic.num_bytes == num_rows * (4 * k + 16 + k)
    with _Traffic() as traffic:
        local.quantized_rows(mesh)
    assert traffic.names == ["lptune::quantize_rows"]
    assert traffic.num_bytes == num_rows * (4 * k + 4 + k)
