"""What tools do to any parameter, done to the weights that hold parts."""

import copy
import io

import pytest
import torch
from torch import nn

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


@pytest.mark.parametrize("kind", ["int8_rowcol", "int8_weight_only"])
def test_weights_are_told_apart_by_their_addresses(kind: str) -> None:
    _, weights = _weights(kind)
    assert len({weight.data_ptr() for weight in weights}) == 2
    assert all(weight.data_ptr() == weight.detach().data_ptr() != 0 for weight in weights)


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


def test_data_that_is_assigned_takes_the_place_of_the_rows() -> None:
    model, (weight, _) = _weights("int8_rowcol")
    weight.data = torch.full((32, 32), 0.5, dtype=torch.bfloat16)
    assert isinstance(weight, MasterWeight)
    assert model[0](torch.ones(1, 32, dtype=torch.bfloat16)).unique() == 16
    with pytest.raises(RuntimeError, match=r"shape \(32, 32\) got \.data of \(16, 32\)"):
        weight.data = torch.zeros(16, 32)


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
