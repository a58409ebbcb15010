"""The live state of layers is in one registry, and is gone with them."""

import copy
import gc

import pytest
import torch
from torch import nn

from lptune import distributed, kernels, linear
from lptune.config import PrecisionConfig
from lptune.kernels import LIVE
from lptune.linear import KINDS, Kind


def _trained(kind: Kind) -> tuple[nn.Module, linear.LowPrecision]:
    """A model that FSDP holds, with everything live that its kind has."""
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
    plan = linear.convert(model, PrecisionConfig(kind=kind.name, emulate=kind.fmt != "int8", verify=False))
    linear.gather_in_8_bits(model, torch.float32)
    torch.distributed.fsdp.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    low = linear.LowPrecision(model, plan, optimizer, verify=False)
    with low.step(0, num_passes=1):
        model(torch.ones(16, 32)).sum().backward()
    return model, low


# With nothing, an amax source, a history, a stored weight: all that a kind may keep alive.
@pytest.mark.parametrize("name", ["int8_rowcol", "int8_tensorwise", "float8_delayed", "int8_weight_only"])
def test_convert_enters_layers_low_precision_fills_them_in_and_they_leave_when_they_die(name: str) -> None:
    kind = KINDS[name]
    gc.collect()
    before = len(LIVE)
    with distributed.session("cpu"):
        model, low = _trained(kind)
        layers = [each for each in model.modules() if isinstance(each, linear.LowPrecisionLinear)]
        assert len(LIVE) == before + 2
        gathers = kind.keys.can_gather_low and not kind.keys.stores_low
        for layer in layers:
            state = LIVE[layer.number]
            assert (state.amaxes is not None) == kind.has_history
            assert (state.amax_source is not None) == (gathers and not kind.row_scales)
            assert bool(state.gathered_bytes) == gathers
        del model, low, layers, layer, state
        gc.collect()
    assert len(LIVE) == before


def test_a_copy_has_a_state_of_its_own_and_a_shallow_one_shares_it() -> None:
    model = nn.Sequential(nn.Linear(32, 64))
    linear.convert(model, "int8_rowcol")
    layer = model[0]
    assert isinstance(layer, linear.LowPrecisionLinear)
    number, deep, shallow = layer.number, copy.deepcopy(layer), copy.copy(layer)
    assert deep.number != number
    assert LIVE[deep.number] is not LIVE[number]
    assert shallow.number == number
    del model, layer
    gc.collect()
    assert LIVE.get(number) is not None
    del shallow
    gc.collect()
    assert LIVE.get(number) is None
    assert LIVE.get(deep.number) is not None


def test_unconverted_layers_leave() -> None:
    model = nn.Sequential(nn.Linear(32, 64))
    plan = linear.convert(model, "int8_rowcol")
    number = plan.converted[0].number
    assert number is not None
    linear.unconvert(model)
    assert LIVE.get(number) is None
    assert kernels.gathered_bytes(number) is None
