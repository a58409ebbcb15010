"""Checkpoints of version 3 verify, resume and export like those of today, which still are of that version."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lptune import checkpoint, distributed, linear, training
from lptune.config import CheckpointConfig, OptimizerConfig, PrecisionConfig
from lptune.linear import Int8Weight
from tests.helpers.ranks import run_ranks
from tests.helpers.version_3 import Part, write

VERSIONS = {"lptune": "0.1.0", "torch": "2.13.0"}
STATE = {"fingerprint": {}, "num_skipped": 1}
N, K = 48, 32
SHAPES = {"0.weight": (N, K), "0.bias": (N,), "1.weight": (5, N)}
"""1.weight: of five rows, three are on the first of two ranks."""


def _values(name: str) -> Tensor:
    shape = SHAPES[name.rpartition("/")[2]]
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator)


def _int8() -> Int8Weight:
    return Int8Weight.from_float(_values("0.weight"))


def _written(folder: Path, num_ranks: int = 2) -> Path:
    """As `num_ranks` ranks of `int8_weight_only` left it after step 3, of which one was skipped."""
    whole = {name: _values(name) for name in SHAPES} | {"0.weight": _int8().dequantize()}
    scale = {"int8_scale/0.weight": _int8().scale_N1}
    moments = {
        f"{moment}/{name}": _values(f"{moment}/{name}")
        for name in SHAPES
        for moment in ("exp_avg", "exp_avg_sq")
    }
    ranks = []
    for rank in range(num_ranks):
        cut = {}
        for group, tensors in (("model", whole | scale), ("optimizer", moments)):
            cut[group] = {}
            for name, tensor in tensors.items():
                size = -(-len(tensor) // num_ranks)
                cut[group][name] = Part(tensor[rank * size : (rank + 1) * size].clone(), rank * size)
        if rank == 0:
            cut["replicated"] = {"amax_history/0": Part(torch.arange(6.0).reshape(2, 3))}
        ranks.append(cut)
    return write(folder, 3, ranks, STATE, VERSIONS)


def _model(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, N), nn.Linear(N, 5, bias=False))
    if kind != "none":
        linear.convert(model, PrecisionConfig(kind=kind, skip=("1",)))
    return model


def _check_loaded(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for name, parameter in model.named_parameters():
        weight = linear.int8_rows(parameter)
        whole = _values(name) if name != "0.weight" else _int8().dequantize()
        assert torch.equal(distributed.full_tensor(linear.dequantized(parameter)), whole), name
        if weight is not None:
            assert torch.equal(distributed.full_tensor(linear.row_scales(parameter)), _int8().scale_N1)
        state = optimizer.state[parameter]
        assert state["step"] == 2
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(distributed.full_tensor(state[moment]), _values(f"{moment}/{name}")), name


def _load(rank: int, num_ranks: int, path: str, kind: str) -> None:
    with distributed.session("cpu") as world:
        model = _model(kind)
        if num_ranks > 1:
            from torch.distributed.fsdp import fully_shard

            fully_shard(model, mesh=world.mesh)
        optimizer = training.build_optimizer(model, OptimizerConfig())
        history = {"amax_history/0": torch.zeros(2, 3), "amax_history/1": torch.ones(2, 3)}
        manifest = checkpoint.find_checkpoint(Path(path).parent, "auto", world, pytest.fail)
        assert manifest is not None
        checkpoint.load_state(manifest, model, optimizer, history)
        _check_loaded(model, optimizer)
        assert torch.equal(history["amax_history/0"], torch.arange(6.0).reshape(2, 3))
        assert torch.equal(history["amax_history/1"], torch.ones(2, 3))


@pytest.mark.parametrize("kind", ["none", "int8_weight_only"])
def test_a_checkpoint_of_version_3_resumes_bitwise(tmp_path: Path, kind: str) -> None:
    _load(0, 1, str(_written(tmp_path)), kind)


def test_a_checkpoint_of_version_3_resumes_bitwise_on_two_ranks(tmp_path: Path) -> None:
    run_ranks(2, _load, str(_written(tmp_path)), "none")


def test_what_this_version_saves_is_of_version_3(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    _written(theirs, 1)
    with distributed.session("cpu") as world:
        model = _model("int8_weight_only")
        optimizer = training.build_optimizer(model, OptimizerConfig())
        manifest = checkpoint.verify(theirs / "step-00000003")
        checkpoint.load_state(manifest, model, optimizer)
        with checkpoint.CheckpointWriter(ours, model, optimizer, world, CheckpointConfig()) as writer:
            writer.save(3, STATE, {"amax_history/0": torch.arange(6.0).reshape(2, 3)})
    by_hand = {path.name: path.read_bytes() for path in (theirs / "step-00000003").iterdir()}
    by_code = {path.name: path.read_bytes() for path in (ours / "step-00000003").iterdir()}
    assert by_code.keys() == by_hand.keys()
    for name in by_hand.keys() - {"manifest.json"}:
        assert by_code[name] == by_hand[name], name
    ours_read, theirs_read = (json.loads(files["manifest.json"]) for files in (by_code, by_hand))
    for read in (ours_read, theirs_read):
        del read["digest"], read["versions"]
    assert json.dumps(ours_read) == json.dumps(theirs_read)  # also in the order of keys
    # How an older version finds what the digest is of.
    body, _, last = by_code["manifest.json"].rpartition(b',\n  "digest": ')
    assert last == f'"{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()
