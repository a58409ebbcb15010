"""A checkpoint stores what is listed: tensors of any dtype and any number of dimensions, of any optimizer.

Nothing in lptune/checkpoint knows the states of these optimizers, nor their names.
"""

import gc
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from lptune import checkpoint, distributed, training
from lptune.base.errors import UserError
from lptune.checkpoint.files import save_tensors
from lptune.checkpoint.stored import Stored, as_shards, named, parameters_of
from lptune.config import CheckpointConfig, ParallelConfig
from lptune.distributed import World, local_pieces, on_this_rank, whole_piece, zeros_by_rows
from lptune.distributed.tensor_parallel import cut
from tests.faults.state import stored_tensors
from tests.helpers.ranks import Ranks
from tests.helpers.saving import save, train

Make = Callable[[nn.Module], torch.optim.Optimizer]


class Odd(torch.optim.Optimizer):
    """A bf16 number for each row, a 3-D tensor of the last two gradients, an int8 momentum with a scale for
    each row, an average of the weights, and a count of all updates that is the same on every rank.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})
        self.num_updates = torch.zeros((), dtype=torch.int64)

    def _new(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        rest = tuple(parameter.shape[1:])
        return {
            "row_size": zeros_by_rows(parameter, (), torch.bfloat16),
            "last": zeros_by_rows(parameter, (2, *rest), torch.float32),
            "momentum": torch.zeros_like(parameter, dtype=torch.int8),
            "momentum_scale": zeros_by_rows(parameter, (1,) * len(rest), torch.float32),
            "average": torch.zeros_like(parameter),
        }

    def stored(self, names: Mapping[nn.Parameter, str], num_updates: int) -> dict[str, Tensor]:
        """All of it."""
        listed = {f"{key}/{name}": t for p, name in names.items() for key, t in self.state[p].items()}
        return listed | {"num_updates": self.num_updates}

    def restored(
        self, names: Mapping[nn.Parameter, str], saved: Collection[str], num_updates: int
    ) -> dict[str, Tensor]:
        """Likewise; it reads its count itself."""
        self.state.update((parameter, self._new(parameter)) for parameter in names)
        return self.stored(names, num_updates)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Arithmetic that sees no more than a row, of operations that round once, so that any number of ranks
        has the same bits. (torch's kernels for AdamW round otherwise in the last elements of a tensor.)
        """
        self.num_updates += 1
        for parameter in self.param_groups[0]["params"]:
            if not self.state[parameter]:
                self.state[parameter] = self._new(parameter)
            w, g = on_this_rank(parameter.detach()), on_this_rank(parameter.grad)
            at = {key: on_this_rank(tensor) for key, tensor in self.state[parameter].items()}
            rows = g.reshape(len(g), -1) if g.numel() else g.reshape(len(g), 1)
            at["row_size"].mul_(0.5).add_(rows.abs().amax(1))
            at["last"][:, 0] = at["last"][:, 1]
            at["last"][:, 1] = g
            scale = at["momentum_scale"]
            momentum = 0.9 * at["momentum"] * scale + at["last"].sum(1)
            sizes = momentum.abs().reshape(rows.shape).amax(1) / 127
            scale.copy_(sizes.reshape(scale.shape))
            at["momentum"].copy_((momentum / scale.clamp(min=1e-30)).round())
            size = at["row_size"].float().reshape(scale.shape)
            w -= 0.1 / float(self.num_updates) * at["momentum"] * scale / (size + 1e-3)
            at["average"].mul_(0.75).add_(0.25 * w)


class Momentum(training.ListsMoments, torch.optim.SGD):
    """One moment, and no count of updates."""

    MOMENTS, COUNT = ("momentum_buffer",), None


class HalfMoments(training.AdamW):
    """AdamW with moments in bf16, which are rounded after each step."""

    def new_moment(self, parameter: nn.Parameter, moment: str) -> Tensor:
        return super().new_moment(parameter, moment).to(torch.bfloat16)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for state in self.state.values():
            state |= {moment: state[moment].float() for moment in self.MOMENTS}
        super().step()
        for state in self.state.values():
            state |= {moment: state[moment].bfloat16() for moment in self.MOMENTS}


OPTIMIZERS: dict[str, Make] = {
    "odd": Odd,
    "momentum": lambda model: Momentum(model.parameters(), lr=0.1, momentum=0.9),
    "none": lambda model: Momentum(model.parameters(), lr=0.1),
    "half": lambda model: HalfMoments(model.parameters(), lr=0.01),
    "adamw": lambda model: training.AdamW(model.parameters(), lr=0.01, fused=True),
}


class Toy(nn.Module):
    """A stack of matrices, 3-D, beside a linear layer whose rows no two ranks have alike, and a gain."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.Parameter(torch.randn(3, 4, 6))
        self.head = nn.Linear(4, 5)

    def forward(self, x_TK: Tensor) -> Tensor:
        return self.head(torch.einsum("tk,enk->tn", x_TK, self.experts)).square().mean()  # type: ignore[no-any-return]


def _built(name: str, world: World) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Toy()
    if world.size > 1:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=world.mesh)
    return model, OPTIMIZERS[name](model)


def _train_and_save(rank: int, num_ranks: int, folder: str, name: str) -> None:
    """Steps 0 to 3, saved after 2 in the background and after 3."""
    with distributed.session("cpu") as world:
        model, optimizer = _built(name, world)
        train(model, optimizer, 0, 2)
        cfg = CheckpointConfig(keep_last=9)
        with checkpoint.CheckpointWriter(Path(folder), model, optimizer, world, cfg) as writer:
            writer.save(2, {"fingerprint": {}})
            train(model, optimizer, 2, 3)
            writer.save(3, {"fingerprint": {}}, wait=True)


def _resume_and_save(rank: int, num_ranks: int, source: str, folder: str, name: str) -> None:
    """Loads step 2, saves it again as it is, and makes step 3."""
    with distributed.session("cpu") as world:
        model, optimizer = _built(name, world)
        checkpoint.load_state(checkpoint.verify(Path(source) / "step-00000002"), model, optimizer)
        save(Path(folder), 2, model, optimizer, world)
        train(model, optimizer, 2, 3)
        save(Path(folder), 3, model, optimizer, world)


def _same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        assert tensor.dtype == theirs[key].dtype, key
        assert torch.equal(tensor, theirs[key]), key


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_of_any_dtype_and_shape_resume_bitwise_on_other_numbers_of_ranks(
    tmp_path: Path, ranks: Ranks, name: str
) -> None:
    ranks.run(_train_and_save, 2, str(tmp_path / "2"), name)
    loaded, trained = (stored_tensors(tmp_path / "2" / f"step-{step:08d}") for step in (2, 3))
    for num_ranks in (1, 2):
        folder = tmp_path / f"2-{num_ranks}"
        ranks.run(_resume_and_save, num_ranks, str(tmp_path / "2"), str(folder), name)
        _same(stored_tensors(folder / "step-00000002"), loaded)
        if name == "odd" or num_ranks == 2:
            _same(stored_tensors(folder / "step-00000003"), trained)
    changed = [key for key, tensor in trained.items() if not torch.equal(tensor, loaded[key])]
    assert len(changed) == len(trained)  # each of them is something that a resume could lose


def test_no_file_of_the_package_knows_a_state_by_its_name() -> None:
    names = "|".join([*training.ListsMoments.MOMENTS, "momentum", "int8_scale", "amax_history"])
    files = sorted(Path(checkpoint.__file__).parent.glob("*.py"))
    assert not [path.name for path in files if re.search(names, path.read_text(encoding="utf-8"))]


# ---- tensors that are cut in a third dimension


class Listed(training.ListsMoments, torch.optim.SGD):
    MOMENTS, COUNT = (), None


def _cut(rank: int, num_ranks: int, folder: str, mode: str) -> None:
    """Saves a stack that is cut by its last dimension, or loads it in another cut and saves it elsewhere."""
    with distributed.session("cpu") as world:
        model, values = nn.Module(), torch.arange(2 * 3 * 5.0).reshape(2, 3, 5)
        stack, gain = values if mode == "save" else torch.zeros_like(values), torch.ones(())
        if world.size > 1:
            stack = distribute_tensor(stack, world.mesh, [Shard(0 if mode == "rows" else 2)])
            gain = distribute_tensor(gain, world.mesh, [Replicate()])
        model.stack, model.gain = nn.Parameter(stack), nn.Parameter(gain)
        optimizer = Listed(model.parameters(), lr=0.1)
        if mode != "save":
            checkpoint.load_state(checkpoint.verify(Path(folder) / "step-00000001"), model, optimizer)
            for piece in local_pieces(model.stack):
                assert torch.equal(piece.values, values[piece.region])
            folder = f"{folder}-{mode}-{num_ranks}"
        save(Path(folder), 1, model, optimizer, world)


def test_a_stack_that_is_cut_in_a_third_dimension_resumes_in_any_cut(tmp_path: Path, ranks: Ranks) -> None:
    ranks.run(_cut, 2, str(tmp_path / "cut"), "save")
    manifest = checkpoint.verify(tmp_path / "cut" / "step-00000001")
    assert [part.box for part in manifest.shards["stack"]] == [
        ((0, 2), (0, 3), (0, 3)),
        ((0, 2), (0, 3), (3, 2)),
    ]
    for mode, num_ranks in (("last", 2), ("rows", 2), ("rows", 1)):
        ranks.run(_cut, num_ranks, str(tmp_path / "cut"), mode)
        again = checkpoint.verify(tmp_path / f"cut-{mode}-{num_ranks}" / "step-00000001")
        # What needs no box is written as ever, so that earlier versions read it.
        version = re.search(r'"version": (\d)', (again.folder / "manifest.json").read_text())
        assert version is not None
        assert version[1] == ("4" if mode == "last" else "3")


# ---- what a list may not be


def _session() -> Any:
    return distributed.session("cpu")


def test_an_optimizer_that_lists_nothing_is_refused_before_it_is_trained(tmp_path: Path) -> None:
    model = Toy()
    optimizer = torch.optim.AdamW(model.parameters())
    message = r"^torch\.optim\.adamw\.AdamW does not list its state .*; use lptune\.training\.AdamW"
    with _session() as world:
        with pytest.raises(ValueError, match=message):
            save(tmp_path, 1, model, optimizer, world)
        listing = training.AdamW(model.parameters())
        path = save(tmp_path, 1, model, listing, world)
    with pytest.raises(ValueError, match=message):
        checkpoint.load_state(checkpoint.verify(path), model, optimizer)
    with pytest.raises(ValueError, match="amsgrad=True keeps a third moment"):
        training.AdamW(model.parameters(), amsgrad=True)


def test_state_of_another_optimizer_is_refused_and_not_dropped(tmp_path: Path) -> None:
    with _session() as world:
        model, optimizer = _built("adamw", world)
        train(model, optimizer, 0, 1)
        path = save(tmp_path, 1, model, optimizer, world)
    for name, message in (
        ("momentum", r"holds 'exp_avg/experts', which Momentum does not keep"),
        ("half", r"holds 'exp_avg/experts' as float32 .*, where bfloat16 .* is needed"),
    ):
        with _session() as world:
            model, optimizer = _built(name, world)
            with pytest.raises(UserError, match=message):
                checkpoint.load_state(checkpoint.verify(path), model, optimizer)


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    with _session() as world:
        model, optimizer = _built("adamw", world)
        writer = checkpoint.CheckpointWriter(tmp_path, model, optimizer, world, CheckpointConfig())
        with pytest.raises(ValueError, match=r"two tensors of the run are called 'head\.bias'"):
            writer.save(1, {}, {"head.bias": torch.zeros(5)}, wait=True)


def test_a_tensor_without_elements_is_neither_saved_nor_missed(tmp_path: Path) -> None:
    with _session() as world:
        model = nn.Module()
        model.empty, model.full = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.ones(2))
        optimizer = Listed(model.parameters(), lr=0.1)
        path = save(tmp_path, 1, model, optimizer, world)
        checkpoint.load_state(checkpoint.verify(path), model, optimizer)


def _averages(rank: int, num_ranks: int, folder: str) -> None:
    """Saves a sharded average of the weights beside them, and reads it again."""
    with distributed.session("cpu") as world:
        model, optimizer = _built("adamw", world)
        averages = {f"average/{name}": p.detach() * 2 for name, p in model.named_parameters()}
        seen = {"num_rows": torch.tensor(7)}
        cfg = CheckpointConfig()
        if rank == 0 or num_ranks > 1:
            with checkpoint.CheckpointWriter(Path(folder), model, optimizer, world, cfg) as writer:
                path = writer.save(1, {"fingerprint": {}}, averages | seen)
                for average in averages.values():
                    average.zero_()  # it was copied
            kinds = {file.name.partition("-")[0] for file in path.glob("*.safetensors")}
            assert kinds == {"model", "replicated", *(["sharded"] if num_ranks > 1 else [])}
        wanted = {name: p.detach() * 2 for name, p in model.named_parameters()}
        seen["num_rows"] += 1
        checkpoint.load_state(checkpoint.verify(path), model, optimizer, averages | seen)
        assert seen["num_rows"] == 7
        for name, value in wanted.items():
            assert torch.equal(on_this_rank(averages[f"average/{name}"]), on_this_rank(value))


def _fused_average(rank: int, num_ranks: int) -> None:
    """Half of the query, key and value rows each are on each rank of the axis `tensor`."""
    with distributed.session("cpu", ParallelConfig(tensor=2)) as world:
        model = nn.ModuleDict({"qkv": nn.Linear(4, 12, bias=False)})
        assert world.tensor_mesh is not None
        cut(model, world.tensor_mesh, {"qkv": distributed.ColumnParallel((4, 4, 4))})
        (weight,) = parameters_of(model)
        (average,) = named(model, {"average/qkv.weight": weight.tensor.detach().clone()})
        boxes = [[shard.box[0] for shard in as_shards(each)] for each in (weight, average)]
        assert boxes[0] == boxes[1] == [(2 * rank + first, 2) for first in (0, 4, 8)]


def test_an_average_of_a_fused_weight_is_cut_as_the_weight_is(ranks: Ranks) -> None:
    ranks.run(_fused_average, 2)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_averages_of_weights_are_saved_with_a_run(tmp_path: Path, ranks: Ranks, num_ranks: int) -> None:
    ranks.run(_averages, num_ranks, str(tmp_path))


def _by_rows(rank: int, num_ranks: int) -> None:
    with distributed.session("cpu") as world:
        whole = torch.zeros(5, 4)
        by_rows = distribute_tensor(whole, world.mesh, [Shard(0)])
        state = zeros_by_rows(by_rows, (2,), torch.bfloat16)
        assert isinstance(state, DTensor)
        assert (state.shape, state.dtype) == ((5, 2), torch.bfloat16)
        assert [(piece.start, piece.values.shape) for piece in local_pieces(state)] == [
            ((0, 0), (3, 2)) if rank == 0 else ((3, 0), (2, 2))
        ]
        with pytest.raises(ValueError, match="not each is by rows"):
            zeros_by_rows(distribute_tensor(whole, world.mesh, [Shard(1)]), (), torch.bfloat16)
        unsummed = Stored("sum", DTensor.from_local(whole, world.mesh, [Partial()]))
        with pytest.raises(ValueError, match=r"'sum' cannot be stored: a tensor placed as Partial"):
            unsummed.pieces()


def test_state_for_each_row_is_sharded_as_the_rows(ranks: Ranks) -> None:
    ranks.run(_by_rows, 2)
    assert whole_piece(torch.zeros(2, 3)).region == (slice(0, 2), slice(0, 3))


def _beside_fused(rank: int, num_ranks: int) -> None:
    """State of a layer that stacks matrices of 4 and 2 rows, each cut over two ranks."""
    fused = (4, 2)
    with distributed.session("cpu", ParallelConfig(tensor=2)) as world:
        mesh = world.tensor_mesh

        def starts(tensor: Tensor, placement: Placement) -> list[tuple[int, ...]]:
            cut = distribute_tensor(tensor, mesh, [placement])
            return [piece.start for piece in Stored("state", cut, fused).pieces()]

        by_rows = [(2 * rank,), (4 + rank,)]
        assert starts(torch.zeros(6), Shard(0)) == by_rows
        assert starts(torch.zeros(6, 3, 5), Shard(0)) == [(*start, 0, 0) for start in by_rows]
        # What that axis does not cut by rows is in the checkpoint's order.
        assert starts(torch.zeros(6, 4), Replicate()) == [(0, 0)]
        assert starts(torch.zeros(6, 4), Shard(1)) == [(0, 2 * rank)]
        with pytest.raises(ValueError, match=r"'state' cannot be stored: a tensor of 3 rows, cut over"):
            starts(torch.zeros(3), Shard(0))


def test_state_beside_a_fused_parameter_is_stored_in_the_order_of_its_rows(ranks: Ranks) -> None:
    ranks.run(_beside_fused, 2)


# ---- parameters that were frozen for some of the steps


def _train_head_or_experts(
    model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int, trained: str
) -> None:
    """Trains the parameters whose names begin with `trained`."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(trained))
    train(model, optimizer, first, last)


def _freeze_and_resume(rank: int, num_ranks: int, folder: str, name: str, schedule: list[str]) -> None:
    """Two steps for each entry of `schedule`, saved after each; resumed before the last two steps as well."""
    with distributed.session("cpu") as world:
        model, optimizer = _built(name, world)
        for part, trained in enumerate(schedule):
            _train_head_or_experts(model, optimizer, 2 * part, 2 * part + 2, trained)
            save(Path(folder), 2 * part + 2, model, optimizer, world)
        again, optimizer = _built(name, world)
        last = 2 * len(schedule) - 2
        checkpoint.load_state(checkpoint.verify(Path(folder) / f"step-{last:08d}"), again, optimizer)
        _train_head_or_experts(again, optimizer, last, last + 2, schedule[-1])
        save(Path(folder) / "resumed", last + 2, again, optimizer, world)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    "schedule", [["head", "", ""], ["head", "experts", "head", ""]], ids=["unfrozen later", "in turns"]
)
def test_a_parameter_that_was_frozen_resumes_with_its_own_count_of_updates(
    tmp_path: Path, ranks: Ranks, num_ranks: int, schedule: list[str]
) -> None:
    ranks.run(_freeze_and_resume, num_ranks, str(tmp_path), "adamw", schedule)
    step = f"step-{2 * len(schedule):08d}"
    _same(stored_tensors(tmp_path / "resumed" / step), stored_tensors(tmp_path / step))
    counts = {key for key in stored_tensors(tmp_path / step) if key.startswith("step/")}
    assert counts >= {"step/experts"}


def test_counts_that_are_the_runs_are_in_no_file(tmp_path: Path) -> None:
    with _session() as world:
        model, optimizer = _built("adamw", world)
        train(model, optimizer, 0, 2)
        path = save(tmp_path, 2, model, optimizer, world)
        names = {name for name, _ in model.named_parameters()}
        assert stored_tensors(path).keys() == names | {
            f"{moment}/{name}" for moment in training.ListsMoments.MOMENTS for name in names
        }
        # One more step that was not finite: `step` is 3, and the optimizer has made 2 updates.
        with checkpoint.CheckpointWriter(tmp_path, model, optimizer, world, CheckpointConfig()) as writer:
            skipped = writer.save(3, {"num_skipped": 1, "num_skipped_in_a_row": 1}, wait=True)
        assert stored_tensors(skipped).keys() == stored_tensors(path).keys()


# ---- memory of further tensors


@pytest.mark.parametrize("wait", [False, True])
def test_further_tensors_have_one_copy_while_files_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    copies = list[int]()

    def count(path: Path, tensors: dict[str, Tensor]) -> None:
        alive = [each for each in gc.get_objects() if type(each) is Tensor and each.shape == (3, 77)]
        copies.append(len({each.data_ptr() for each in alive} - {average.data_ptr()}))
        save_tensors(path, tensors)

    average = torch.ones(3, 77)
    with _session() as world:
        model, optimizer = _built("adamw", world)
        monkeypatch.setattr("lptune.checkpoint.save.save_tensors", count)
        with checkpoint.CheckpointWriter(tmp_path, model, optimizer, world, CheckpointConfig()) as writer:
            path = writer.save(1, {}, {"average": average}, wait=wait)
            if not wait:
                average.zero_()
    assert max(copies) == (0 if wait else 1)  # in the background: the one in host memory
    assert torch.equal(stored_tensors(path)["average"], torch.ones(3, 77))
