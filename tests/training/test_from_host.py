"""Updates of what is in host memory: the bits of an update in place, whatever is there and whoever waits."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lptune import checkpoint, distributed
from lptune.config import OptimizerConfig, ParallelConfig
from lptune.training import chunked_adamw, from_host, optimizer
from lptune.training.from_host import FromHost, Streams, visits
from lptune.training.state import State
from tests.helpers import tiny_run
from tests.helpers.pinning import pinned_addresses
from tests.helpers.ranks import Ranks
from tests.helpers.saving import save
from tests.helpers.tiny_run import TinyRun
from tests.training.test_in_backward import Loop, Settings
from tests.training.test_update import differing

CPU = torch.device("cpu")
KINDS: dict[str, Settings] = {
    "adamw": ("int8_rowcol", {}, {}),
    "no master": ("int8_rowcol", {"kind": "adamw_8bit", "master": "none"}, {"compute_dtype": "bfloat16"}),
    "bf16": ("float8_tensorwise", {"kind": "adamw_bf16"}, {}),
    "stored in INT8": ("int8_weight_only", {"kind": "adamw_8bit"}, {}),
}


def _trained(world: distributed.World, kind: str, host: str, *, in_backward: bool) -> dict[str, Tensor]:
    """Weights, moments and losses after three steps. host: what is in host memory: nothing, moments, all."""
    offload = host == "all"
    parallel = ParallelConfig(cpu_offload=offload, reshard_after_forward=True, reduce_every_micro_batch=True)
    everything = mock.patch.object(optimizer, "kept_on_host", return_value=FromHost(CPU, weights=True))
    with pinned_addresses() as addresses, everything if offload else mock.MagicMock():
        loop = Loop(
            KINDS[kind], world, in_backward=in_backward, cpu_offload=host == "moments", parallel=parallel
        )
        losses = {}
        for step in range(3):
            losses[f"loss {step}"] = torch.tensor(loop.step(step).loss)
            # Of the last blocks that FSDP reduces, none is reduced after them.
            assert loop.num_left < len(list(loop.run.model.parameters())) or not in_backward
        assert bool(addresses) == offload
        # An optimizer of chunks counts its updates on the host.
        state = {name: each for name, each in loop.state().items() if not name.startswith("num_updates/")}
        return losses | state


def _differing(rank: int, num_ranks: int, kinds: list[str], hosts: list[str]) -> dict[str, list[str]]:
    found = {}
    with distributed.session("cpu") as world, mock.patch.object(chunked_adamw, "_VISITING", 200):
        for kind in kinds:
            expected = _trained(world, kind, "nothing", in_backward=False)
            for host in hosts:
                for in_backward in (False, True):
                    actual = _trained(world, kind, host, in_backward=in_backward)
                    found[f"{kind}, {host}, {in_backward}"] = differing(expected, actual)
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_updates_from_host_memory_have_the_bits_of_those_in_place(num_ranks: int, ranks: Ranks) -> None:
    kinds = (
        list(KINDS) if num_ranks == 1 else ["adamw", "no master"]
    )  # with a master that is cut, and without
    for found in ranks.run(_differing, num_ranks, kinds, ["moments", "all"]):
        for name, unlike in found.items():
            assert unlike == [], name


class _Stream:
    """A stand-in for a stream of CUDA: counts what it was given, and knows what of others comes before."""

    def __init__(self, name: str) -> None:
        self.name, self.seen = name, Counter[str]()

    def record_event(self) -> Counter[str]:
        return Counter(self.seen)

    def wait_event(self, event: Counter[str]) -> None:
        self.seen |= event


class _Ordered(TorchDispatchMode):
    """Raises where a tensor is read or written on a stream that does not come after its last write, or
    written on one that does not come after all reads. Parts of a tensor are told apart by their offset.
    """

    def __init__(self) -> None:
        super().__init__()
        self.streams = {name: _Stream(name) for name in ("update", "bring", "send")}
        self.current = self.streams["update"]
        self.last: dict[tuple[int, int], dict[str, list[tuple[str, int]]]] = {}
        self.written = Counter[str]()  # numbers of writes of each stream

    @contextmanager
    def use(self, stream: _Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def access(self, tensor: Tensor, how: str) -> None:
        here, key = self.current, (tensor.untyped_storage()._cdata, tensor.storage_offset())
        known = self.last.setdefault(key, {"write": [], "read": []})
        earlier = known["write"] if how == "read" else known["write"] + known["read"]
        for name, number in earlier:
            assert name == here.name or here.seen[name] >= number, f"{how} on {here.name} beside {name}"
        here.seen[here.name] += 1
        mine = (here.name, here.seen[here.name])
        known[how] = [mine] if how == "write" else [*known["read"], mine]
        self.written[here.name] += how == "write"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            assert (kwargs or {}).get("non_blocking") or args[2:] == (True,)
            self.access(args[1], "read")
            self.access(args[0], "write")
        elif func is torch.ops.aten.add_.Tensor:
            self.access(args[0], "read")
            self.access(args[0], "write")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_rows", [4, 7, 40])
def test_on_a_gpu_no_copy_overtakes_what_it_needs_and_three_parts_are_there(num_rows: int) -> None:
    """By streams that only count: what they are given happens at once, on a CPU."""
    order = _Ordered()
    three = Streams(order.streams["bring"], order.streams["send"], lambda: order.streams["update"])
    host = [torch.zeros(num_rows, 3), torch.zeros(num_rows, 5, dtype=torch.uint8)]
    tensors = [*host, torch.zeros(num_rows, 2)]
    parts = [slice(i, min(i + 4, num_rows)) for i in range(0, num_rows, 4)]
    buffers = set[int]()
    with (
        mock.patch.object(from_host, "streams_of", return_value=three),
        mock.patch.object(torch.cuda, "stream", order.use),
        order,
    ):
        for tensor in tensors:
            for part in parts:
                order.access(tensor[part], "write")  # the update before
        for rows in visits(tensors, parts, CPU, [True, True, False], [False, True, True]):
            buffers.add(rows[0].untyped_storage()._cdata)
            for each in rows[1:]:
                each.add_(1)
        for tensor in tensors:
            for part in parts:
                order.access(tensor[part], "write")  # the update after
    assert len(buffers) == min(3, len(parts))
    assert order.written["bring"] == 2 * len(parts)
    assert order.written["send"] == len(parts)  # what was not changed is not sent back
    assert [bool((tensor == value).all()) for tensor, value in zip(tensors, (0, 1, 1), strict=True)] == [
        True
    ] * 3


def _state(built: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors that it keeps."""
    return [
        value for of in built.state.values() for _, value in sorted(of.items()) if isinstance(value, Tensor)
    ]


def _updated(model: nn.Module, built: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for number, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(100 * step + number)
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        built.step()


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
def test_a_checkpoint_goes_on_wherever_its_moments_are(kind: str, tmp_path: Path) -> None:
    """Also one of another kind, whose moments are converted."""

    def build(kind: str, *, cpu_offload: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(160, 64)
        return model, optimizer.build_optimizer(model, OptimizerConfig(kind=kind, cpu_offload=cpu_offload))

    with distributed.session("cpu") as world:
        for saved in (False, True):
            model, built = build("adamw", cpu_offload=saved)
            _updated(model, built, range(2))
            save(tmp_path / str(saved), 2, model, built, world)
        results = []
        for saved, loaded in ((False, False), (False, True), (True, False), (True, True)):
            model, built = build(kind, cpu_offload=loaded)
            manifest = checkpoint.verify(tmp_path / str(saved) / "step-00000002")
            checkpoint.load_state(manifest, model, built)
            _updated(model, built, range(2, 4))
            results.append([*model.parameters(), *_state(built)])
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


def _reduced(rank: int, num_ranks: int) -> str:
    cfg = tiny_run.config(
        "none",
        compute_dtype="bfloat16",
        parallel=ParallelConfig(cpu_offload=True, reduce_dtype="int8"),
    )
    with distributed.session("cpu") as world, pinned_addresses():
        run = TinyRun(cfg, world, tiny_run.decoder_config())
        state = State(run.model, run.low.plan, run.optimizer, cfg, world)
        batches = [tiny_run.micro_batch(0, world.data_rank, run.seed)]
        for batch in state.passes(0, 1, batches):
            tiny_run.batch_loss(run.model, batch, world).backward()
        return "every group reduced as planned"  # else PrecisionNotAppliedError


def test_with_weights_in_host_memory_every_group_reduces_as_planned(ranks: Ranks) -> None:
    assert ranks.run(_reduced, 2) == ["every group reduced as planned"] * 2
