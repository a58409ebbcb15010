"""Moments in 8 bits in checkpoints: exact on any number of ranks; converted where optimizer.kind changes."""

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lptune import checkpoint, distributed, training
from lptune.config import OptimizerConfig, ParallelConfig
from lptune.training.moments import BLOCK, MOMENTS, STORAGES, Storage
from tests.faults.state import stored_tensors
from tests.helpers.ranks import Ranks
from tests.helpers.saving import save, train

K = 2 * BLOCK + 32
"""Two blocks of a row and a shorter one; half of it ends within a block."""


class Toy(nn.Module):
    """Matrices whose rows no two ranks have alike, a vector, and a matrix that is too small for 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(K, 33), nn.Linear(33, 5))

    def forward(self, x_TK: Tensor) -> Tensor:
        return self.layers(x_TK).square().mean()  # type: ignore[no-any-return]


def _built(kind: str, world: distributed.World, cut: str = "rows") -> tuple[nn.Module, torch.optim.Optimizer]:
    """cut: how several ranks have it: by FSDP, or the first matrix by columns."""
    model = Toy()
    if world.size > 1 and cut == "columns":
        first = model.layers[0]
        first.weight = nn.Parameter(
            distribute_tensor(first.weight.detach(), world.mesh, [Replicate(), Shard(1)])
        )
    elif world.size > 1:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=world.mesh)
    cfg = OptimizerConfig(kind=kind, lr=1e-2, momentum=0.9 if kind == "sgd" else 0)
    return model, training.build_optimizer(model, cfg)


def _part(
    rank: int,
    num_ranks: int,
    source: str,
    folder: str,
    kind: str,
    steps: tuple[int, int, int],
    cut: str = "rows",
) -> None:
    """Loads steps[0], saves it again as it is; then trains to the steps after it, and saves each."""
    with distributed.session("cpu", ParallelConfig(tensor=num_ranks if cut == "columns" else 1)) as world:
        model, optimizer = _built(kind, world, cut)
        if source:
            path = Path(source) / f"step-{steps[0]:08}"
            checkpoint.load_state(checkpoint.verify(path), model, optimizer)
            save(Path(folder), steps[0], model, optimizer, world)
        for begin, end in itertools.pairwise(steps):
            if cut == "rows":
                train(model, optimizer, begin, end)
                save(Path(folder), end, model, optimizer, world)


def _stored(folder: Path, step: int) -> dict[str, Tensor]:
    return stored_tensors(folder / f"step-{step:08d}")


def _unlike(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    assert ours.keys() == theirs.keys()
    return [key for key, tensor in ours.items() if not torch.equal(tensor, theirs[key])]


def _moment(stored: dict[str, Tensor], number: int, name: str) -> Tensor:
    """Values of a moment of a parameter, however it is stored."""
    for kinds in STORAGES.values():
        storage: Storage = kinds[number]
        names = [f"{MOMENTS[number]}{suffix}/{name}" for suffix in storage.SUFFIXES]
        if all(each in stored for each in names):
            return storage.read(tuple(stored[each] for each in names))
    raise KeyError(name)


@pytest.mark.parametrize(
    ("kind", "suffixes"),
    [("adamw_8bit", ("_8bit", "_scale")), ("adamw_bf16", ("_bf16",)), ("sgd", ()), ("muon", ())],
)
def test_they_resume_bitwise_and_go_from_one_rank_to_two_and_back(
    kind: str, suffixes: tuple[str, ...], tmp_path: Path, ranks: Ranks
) -> None:
    one, two, back = (tmp_path / each for each in ("1", "1-2", "1-2-1"))
    ranks.run(_part, 1, "", str(one), kind, (0, 2, 3))
    of_the_matrix = {key for key in _stored(one, 2) if key.endswith("/layers.0.weight")}
    if suffixes:
        assert of_the_matrix == {f"{m}{each}/layers.0.weight" for m in MOMENTS for each in suffixes}
    ranks.run(_part, 1, str(one), str(tmp_path / "again"), kind, (2, 3))
    assert _unlike(_stored(tmp_path / "again", 3), _stored(one, 3)) == []
    ranks.run(_part, 2, str(one), str(two), kind, (2, 3))
    assert _unlike(_stored(two, 2), _stored(one, 2)) == []
    ranks.run(_part, 1, str(two), str(back), kind, (3,))
    assert _unlike(_stored(back, 3), _stored(two, 3)) == []
    # Rows are updated alike wherever they are.
    assert torch.equal(_stored(two, 3)["layers.0.weight"], _stored(one, 3)["layers.0.weight"])


@pytest.mark.parametrize(("low", "num_ranks"), [("adamw_8bit", 1), ("adamw_8bit", 2), ("adamw_bf16", 2)])
def test_another_kind_continues_from_values_that_are_rounded_once_at_most(
    low: str, num_ranks: int, tmp_path: Path, ranks: Ranks
) -> None:
    kinds = ("adamw", low, "adamw")
    folders = [tmp_path / str(number) for number in range(3)]
    ranks.run(_part, 2, "", str(folders[0]), kinds[0], (0, 2))
    for source, folder, kind in zip(folders, folders[1:], kinds[1:], strict=False):
        ranks.run(_part, num_ranks, str(source), str(folder), kind, (2,))
    float32, int8, again = (_stored(folder, 2) for folder in folders)
    name = "layers.0.weight"
    for number, storage in enumerate(STORAGES[low]):
        before, rounded, after = (_moment(each, number, name) for each in (float32, int8, again))
        parts = storage.new(before)
        storage.write(parts, before.clone())
        assert torch.equal(rounded, storage.read(parts))
        assert torch.equal(after, rounded)
    changed = {f"{moment}/{name}" for moment in MOMENTS}
    assert set(_unlike(again, float32)) == changed


def test_a_matrix_whose_rows_are_cut_within_a_block_keeps_float32_there(tmp_path: Path, ranks: Ranks) -> None:
    whole, cut, back = (tmp_path / each for each in ("whole", "cut", "back"))
    ranks.run(_part, 1, "", str(whole), "adamw_8bit", (0, 2))
    ranks.run(_part, 2, str(whole), str(cut), "adamw_8bit", (2,), "columns")
    ranks.run(_part, 1, str(cut), str(back), "adamw_8bit", (2,))
    assert "exp_avg/layers.0.weight" in _stored(cut, 2)
    for number in range(2):
        values = [_moment(_stored(folder, 2), number, "layers.0.weight") for folder in (whole, cut, back)]
        assert torch.equal(values[0], values[1])
        assert torch.equal(values[0], values[2])


@pytest.mark.parametrize("before", ["adamw", "adamw_8bit"])
def test_frozen_parameters_keep_their_moments_and_counts_come_along(before: str, tmp_path: Path) -> None:
    with distributed.session("cpu") as world:
        model, optimizer = _built(before, world)
        train(model, optimizer, 0, 2)
        path = save(tmp_path, 4, model, optimizer, world)  # of these steps two made no update
        model = Toy()
        model.layers[0].weight.requires_grad_(False)
        optimizer = training.build_optimizer(model, OptimizerConfig(kind="adamw_8bit"))
        checkpoint.load_state(checkpoint.verify(path), model, optimizer)
        save(tmp_path, 5, model, optimizer, world)
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}
    assert {f"exp_avg{each}/layers.0.weight" for each in ("_8bit", "_scale")} <= _stored(tmp_path, 5).keys()
