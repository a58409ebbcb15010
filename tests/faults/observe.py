"""A copy of a recipe that says what it reads and holds, and that asks itself to stop.

`write_recipe` puts three calls in the recipe; nothing else of it changes. What they write lies
in the run's folder: a digest of every row of every micro-batch, every tensor as it was just after loading.
"""

import hashlib
import json
import os
import re
import signal
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lptune import distributed, training
from lptune.checkpoint.stored import parameters_of, state_of
from lptune.launch import preemption
from lptune.linear import dequantized

ROOT = Path(__file__).parents[2]
STOP_AFTER, STOP_ON_RANK, STOP_BY = "STOP_AFTER_STEP", "STOP_ON_RANK", "STOP_BY"
# (line, whether ours comes after it, ours)
_INSERTED = (
    (r"from lptune import checkpoint, .*", True, "from tests.faults import observe"),
    (
        r"steps\.start\(state\)",
        True,
        "observe.loaded(run.path, run.step, model, optimizer, world)",
    ),
    (
        r"for step in steps:",
        True,
        "    observe.batches(run.path, steps, world)",
    ),
    (r"step\.update\(\).*", False, "observe.stop(steps.num_done + 1, world)"),
)


def write_recipe(path: Path, recipe: str) -> Path:
    """The copy of recipes/RECIPE.py, at `path`."""
    text = (ROOT / "recipes" / f"{recipe}.py").read_text(encoding="utf-8")
    for line, is_after, ours in _INSERTED:
        pattern = rf"^( *)({line})\n"
        text, count = re.subn(
            pattern, rf"\1\2\n\1{ours}\n" if is_after else rf"\1{ours}\n\1\2\n", text, flags=re.MULTILINE
        )
        assert count == 1, f"{count} lines of the recipe match {line}"
    path.write_text(text, encoding="utf-8")
    return path


def batches(folder: Path, steps: training.Steps, world: distributed.World) -> None:
    """Notes a digest of each row of this rank's micro-batches of the step that begins."""
    step, found = steps.num_done + 1, steps.loader.micro_batches(steps.num_done)
    said = [
        hashlib.sha256(tokens_S.numpy().tobytes() + labels_S.numpy().tobytes()).hexdigest()
        for batch in found
        for tokens_S, labels_S in zip(batch.tokens_BS, batch.labels_BS, strict=True)
    ]
    with (folder / f"batches-{world.rank}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, "num_ranks": world.size, "digests": said}) + "\n")


def read_batches(folder: Path) -> dict[int, list[str]]:
    """Step -> the digests of all its rows, in the order of the global batch.

    A step that a kill made a run repeat must have had the same batches each time, on any number of ranks.
    """
    times: dict[tuple[int, int], dict[int, list[list[str]]]] = {}
    for file in folder.glob("batches-*.jsonl"):
        rank = int(file.stem.partition("-")[2])
        for line in file.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            ranks = times.setdefault((record["step"], record["num_ranks"]), {})
            ranks.setdefault(rank, []).append(record["digests"])
    found: dict[int, list[str]] = {}
    for (step, num_ranks), ranks in times.items():
        if sorted(ranks) != list(range(num_ranks)):
            continue  # killed before the last rank had said what it read
        for digests in ranks.values():
            assert all(again == digests[0] for again in digests), (
                f"step {step} was repeated with other batches"
            )
        whole = [digest for rank in range(num_ranks) for digest in ranks[rank][0]]
        assert found.setdefault(step, whole) == whole, f"step {step} has other batches on {num_ranks} ranks"
    return found


def stop(step: int, world: distributed.World) -> None:
    """Sends this process a signal, SIGTERM if no other is named, after the step and on the rank that the
    environment names.
    """
    here = int(os.environ.get(STOP_ON_RANK, "0"))
    if step != int(os.environ.get(STOP_AFTER, "-1")) or world.rank != here:
        return
    os.kill(os.getpid(), signal.Signals[os.environ.get(STOP_BY, "SIGTERM")])
    while preemption.requested() is None:  # a thread takes it
        time.sleep(0.001)


def loaded(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: distributed.World,
) -> None:
    """Writes every weight and moment, whole, if the run goes on from a checkpoint. A collective."""
    if step == 0:
        return
    distributed.reshard(model)
    whole = dict[str, Tensor]()
    for each in parameters_of(model) + state_of(model, optimizer, step):
        full = distributed.full_tensor(dequantized(each.tensor), each.fused_rows)
        whole[each.name] = full.detach().cpu().contiguous().clone()
    if world.is_main:
        save_file(whole, folder / f"loaded-{step}.safetensors")
