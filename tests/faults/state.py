"""A training state of which every element is a function of the step, and a second reader of checkpoints.

A checkpoint can then be judged by itself: whatever happened to the process that wrote it, step-N must hold
the tensors of N, to the bit. The optimizer's step overwrites weights and moments in place, as a real one
does, so a copy that is taken too late holds the wrong step's numbers.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lptune import checkpoint, distributed
from lptune.checkpoint import save
from lptune.checkpoint.manifest import Manifest
from lptune.config import CheckpointConfig
from lptune.training import ListsMoments

MOMENTS = ListsMoments.MOMENTS
FACTS = {"fingerprint": {"seed": 0}, "started_on": "2026-01-01"}
# 5 and 1 rows: uneven over two ranks, and a rank without any.
_SHAPES = {"large": (96, 128), "uneven": (5, 33), "vector": (40,), "single": (1, 7)}
_REPLICATED = "amax_history"


def expected(step: int) -> dict[str, Tensor]:
    """Every tensor of the checkpoint of `step`, whole."""
    shapes = dict(_SHAPES)
    shapes |= {f"{moment}/{name}": shape for moment in MOMENTS for name, shape in _SHAPES.items()}
    shapes[_REPLICATED] = (3, 16)
    return {name: _values(step, number, shape) for number, (name, shape) in enumerate(shapes.items())}


def _values(step: int, number: int, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + number)
    return torch.rand(shape, generator=generator)


class Scripted(ListsMoments, torch.optim.Optimizer):
    """Its steps write `expected` of the next step into parameters and moments."""

    COUNT = None

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self.step_number = 0
        for parameter in self._names:
            self.state[parameter] = {moment: torch.zeros_like(parameter) for moment in MOMENTS}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Advances all by one step."""
        assert closure is None
        self.step_number += 1
        values = expected(self.step_number)
        for parameter, name in self._names.items():
            _fill(parameter, values[name])
            for moment in MOMENTS:
                _fill(self.state[parameter][moment], values[f"{moment}/{name}"])


def _fill(tensor: Tensor, whole: Tensor) -> None:
    for piece in distributed.local_pieces(tensor):
        piece.values.copy_(whole[piece.region])


class State:
    """Model, optimizer and a replicated tensor, sharded over the ranks of `world` if there are several."""

    def __init__(self, world: distributed.World | None = None) -> None:
        self.model = nn.Module()
        for name, shape in _SHAPES.items():
            self.model.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        if world is not None and world.size > 1:
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.model, mesh=world.mesh)
        self.optimizer = Scripted(self.model)

    @property
    def step(self) -> int:
        """How often the optimizer has stepped."""
        return self.optimizer.step_number

    def advance(self) -> int:
        """One step; returns its number."""
        self.optimizer.step()
        return self.step

    def replicated(self) -> dict[str, Tensor]:
        """What every rank holds alike."""
        return {_REPLICATED: expected(self.step)[_REPLICATED]}

    def load(self, manifest: Manifest) -> None:
        """Takes the checkpoint's tensors."""
        found = {_REPLICATED: torch.zeros(3, 16)}
        checkpoint.load_state(manifest, self.model, self.optimizer, found)
        self.optimizer.step_number = manifest.step
        values = expected(manifest.step)
        _assert_equal(found[_REPLICATED], values[_REPLICATED], f"{manifest.folder}: {_REPLICATED}")
        for name, parameter in self.model.named_parameters():
            tensors = {name: parameter} | {f"{m}/{name}": self.optimizer.state[parameter][m] for m in MOMENTS}
            for key, tensor in tensors.items():
                for piece in distributed.local_pieces(tensor):
                    _assert_equal(piece.values, values[key][piece.region], f"{manifest.folder}: {key}")

    def writer(self, folder: Path, world: distributed.World, **keys: Any) -> checkpoint.CheckpointWriter:
        """A CheckpointWriter of this state. keys: of CheckpointConfig."""
        cfg = CheckpointConfig(**({"keep_last": 2} | keys))
        return checkpoint.CheckpointWriter(folder, self.model, self.optimizer, world, cfg)

    def save(self, writer: checkpoint.CheckpointWriter, *, wait: bool) -> None:
        """Saves the current step."""
        writer.save(self.step, FACTS, self.replicated(), wait=wait)


def _assert_equal(found: Tensor, wanted: Tensor, what: str) -> None:
    if not torch.equal(found.detach(), wanted):
        raise AssertionError(f"{what} is not what that step had")


@contextmanager
def many_parts() -> Iterator[None]:
    """Within, a rank's tensors are spread over several files, as those of a large model are."""
    before = save._SMALLEST_PART
    save._SMALLEST_PART = 1
    try:
        yield
    finally:
        save._SMALLEST_PART = before


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole, put together from its files by what the manifest says.

    A second implementation, beside lptune.checkpoint.load, and of whole files: it reads with `load_file`.
    """
    shards = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["shards"]
    files = {file.name: load_file(file) for file in folder.glob("*.safetensors")}
    return {name: _assembled(name, parts, files) for name, parts in shards.items()}


def _assembled(name: str, parts: list[dict[str, Any]], files: dict[str, dict[str, Tensor]]) -> Tensor:
    first = files[parts[0]["file"]][name]
    dim = first.dim()
    if dim == 0:
        return first
    rows = max(part["start"] + part["rows"] for part in parts)
    columns = max(part["column"] + part["columns"] for part in parts)
    further = list(first.shape[2:])
    for place in range(len(parts[0].get("beyond", ()))):
        further[place] = max(sum(part["beyond"][place]) for part in parts)
    unfilled = torch.nan if first.is_floating_point() else 99
    whole = torch.full((rows, columns, *further)[:dim], unfilled, dtype=first.dtype)
    for part in parts:
        values = files[part["file"]][name][part["at"] : part["at"] + part["rows"]]
        target = whole[part["start"] : part["start"] + part["rows"]]
        if dim > 1:
            target = target[:, part["column"] : part["column"] + part["columns"]]
        for place, (begin, number) in enumerate(part.get("beyond", ()), start=2):
            target = target.narrow(place, begin, number)
        target.copy_(values)
    return whole


def digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    """sha256 of each tensor's bytes, by name."""
    return {
        name: hashlib.sha256(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in sorted(tensors.items())
    }


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Rows as a Markdown table."""
    lines = [list(head), ["---"] * len(list(head))] + [[str(cell) for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
