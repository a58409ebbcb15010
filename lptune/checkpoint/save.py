"""Saving: a checkpoint appears whole or not at all, and training hardly waits for it.

    step-00000100/  model-00000.safetensors  optimizer-00000.safetensors  …a pair per rank, or more
                    replicated-00000.safetensors, where a precision keeps state: amax histories
                    state.json  manifest.json

The position in the data is the step (the order of rows is a function of seed and epoch), and all random
numbers are functions of the seed and the step, so weights, moments, step and fingerprint are all that an
exact continuation needs. Tensors are plain and in high precision: a run may resume under another precision,
compile mode or number of ranks.

Publishing. All files are written and flushed in `.tmp-step-N`; ranks agree that theirs are; rank 0 adds the
manifest, flushes the folder, renames it and flushes its parent. A kill at any moment leaves the old
checkpoints and perhaps a `.tmp-…` behind. An error on any rank is an error on all, with one message, and
removes only what was being written.

In the background. Between two optimizer steps nobody writes to weights and moments. So the copy to host
memory runs beside the next forward and backward, and the optimizer's next step waits for its end, if it comes
that soon; files are written and hashed from the copy. That costs host memory, 12 bytes for each parameter on
this rank. A failure surfaces at the next `check`, which the loop calls every step.
"""

import math
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lptune.checkpoint.files import (
    WRITE_ERRORS,
    free_bytes,
    fresh_folder,
    num_threads,
    publish_folder,
    read_json,
    save_tensors,
    set_aside,
    why,
    write_json,
)
from lptune.checkpoint.manifest import (
    Shard,
    describe_file,
    list_checkpoints,
    step_folder_name,
    write_manifest,
)
from lptune.checkpoint.retention import remove_old
from lptune.checkpoint.stored import (
    as_shard,
    fused_rows_of,
    int8_scales,
    model_tensors,
    optimizer_tensors,
)
from lptune.config import TEMPORARY, CheckpointConfig, HeldFolder, UserError
from lptune.distributed import (
    Piece,
    SideGroup,
    World,
    fused_rows,
    is_first_holder,
    local_pieces,
    on_this_rank,
    reshard,
)
from lptune.distributed.collectives import size_text
from lptune.linear import dequantized, int8_rows, plain_rows

# A rank's files: several, so that they are written and hashed side by side, but not thousands in a folder.
_PARTS = 8
_SMALLEST_PART, _LARGEST_PART = 64 << 20, 1 << 30


class CheckpointWriter:
    """Publishes checkpoints of `model` and `optimizer` as `folder/step-N`, and removes old ones.

    All ranks make one and call its methods in the same order. As a context it waits at its end for what is
    being written. With cfg.async_save, `save` returns at once; until the next step of `optimizer` nobody may
    write to parameters or moments.
    """

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        cfg: CheckpointConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """clock: in seconds, for cfg.every_minutes; it starts now."""
        self._clock, self._last_save_s = clock, clock()
        self._folder, self._model, self._optimizer, self._cfg = folder, model, optimizer, cfg
        self._world = world
        if world.is_main and not folder.is_dir():
            folder.mkdir(parents=True)
        self._held = HeldFolder(folder) if world.is_main else None
        self._group = SideGroup(world)
        self._copies = dict[str, Tensor]()
        self._copied = threading.Event()
        self._copied.set()
        self._copied_on_device: torch.cuda.Event | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._hook = optimizer.register_step_pre_hook(lambda *_: self._wait_for_copy())

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hook.remove()
        if error is None:
            self.wait()
            self._group.close()
        elif self._thread is not None and self._world.size == 1:
            self._thread.join()  # with several ranks it may wait for one that is gone
        if self._thread is None or not self._thread.is_alive():
            self._copies.clear()
            if self._held is not None:
                self._held.close()

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        replicated: Mapping[str, Tensor] = MappingProxyType({}),
        *,
        eval_loss: float | None = None,
        wait: bool = False,
    ) -> Path:
        """Publishes the state after `step`; waits for an earlier save first, and raises what it failed with.
        Returns where the checkpoint is, or will be.

        state: what state.json says beside the step. replicated: further tensors, the same on every rank; the
        main rank writes them. eval_loss: of this step, for checkpoint.keep_best. wait: return when the
        checkpoint is published, whatever cfg.async_save says.
        Raises UserError when the disk is full or refuses; the checkpoints that were there stay.
        """
        self.wait()
        self._last_save_s = self._clock()
        reshard(self._model)
        state = {"step": step, **state}
        if eval_loss is not None and math.isfinite(eval_loss):
            state["eval_loss"] = eval_loss
        # They change within a step, not only at its end.
        replicated = {name: tensor.detach().clone() for name, tensor in replicated.items()}
        job = _Job(step, state, self._contents(replicated))
        final = self._folder / step_folder_name(step)
        if wait or not self._cfg.async_save:
            self._write(job, _on_host)
            return final
        on_cuda = self._world.device.type == "cuda"
        saved = torch.cuda.current_stream(self._world.device).record_event() if on_cuda else None
        self._copied.clear()
        self._thread = threading.Thread(
            target=self._write_in_background, args=(job, saved), name="lptune-checkpoint", daemon=True
        )
        self._thread.start()
        return final

    def is_overdue(self) -> bool:
        """Whether cfg.every_minutes have passed since the last save, by this rank's clock. Ranks' clocks
        differ: `World.at_boundary` makes the main rank's answer everybody's.
        """
        leaves_none = not (self._cfg.every_steps or self._cfg.at_end)
        is_writing = self._thread is not None and self._thread.is_alive()
        if not self._cfg.every_minutes or leaves_none or is_writing:
            return False
        return self._clock() - self._last_save_s >= 60 * self._cfg.every_minutes

    def check(self) -> None:
        """Raises what a save in the background failed with, if it has."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> Path | None:
        """Waits until nothing is being written; returns the newest checkpoint. Raises like `check`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return next(iter(list_checkpoints(self._folder)), None)

    # ---- what

    def _contents(self, replicated: Mapping[str, Tensor]) -> dict[str, list["_Stored"]]:
        """Name of file -> what this rank writes into it."""
        fused = fused_rows(self._model)
        files: dict[str, list[_Stored]] = {}
        for kind, tensors in (
            ("model", model_tensors(self._model) | int8_scales(self._model)),
            ("optimizer", optimizer_tensors(self._model, self._optimizer)),
            ("replicated", replicated if self._world.is_main else {}),
        ):
            # What several ranks hold is stored by the first of them, what a rank holds nothing of by others.
            mine = {key: tensor for key, tensor in tensors.items() if is_first_holder(tensor)}
            pieces = {key: local_pieces(tensor, fused_rows_of(fused, key)) for key, tensor in mine.items()}
            stored = [_Stored(key, _local(mine[key]), parts) for key, parts in pieces.items() if parts]
            name = f"{kind}-{self._world.rank:05d}"
            files |= {f"{name}{part}.safetensors": group for part, group in _in_parts(stored)}
        return files

    # ---- how

    def _write_in_background(self, job: "_Job", saved: "torch.cuda.Event | None") -> None:
        try:
            try:
                self._copy(job, saved)
            finally:
                self._copied.set()
            if self._copied_on_device is not None:
                self._copied_on_device.synchronize()
            self._write(job, lambda stored: self._copies[stored.key])
        except BaseException as error:
            self._failure = error

    @torch.no_grad()
    def _copy(self, job: "_Job", saved: "torch.cuda.Event | None") -> None:
        stored = [each for group in job.files.values() for each in group]
        if saved is None:
            for each in stored:
                self._copies[each.key] = _copied(each, self._copies.get(each.key))
            return
        # A new thread's device is the first GPU, on which leaving the stream would make a context of ours.
        torch.cuda.set_device(self._world.device)
        stream = torch.cuda.Stream(self._world.device)
        with torch.cuda.stream(stream):
            stream.wait_event(saved)
            for each in stored:
                self._copies[each.key] = _copied(each, self._copies.get(each.key), pinned=True)
            self._copied_on_device = stream.record_event()

    def _wait_for_copy(self) -> None:
        self._copied.wait()
        if self._copied_on_device is not None:  # the device waits, the host goes on launching
            torch.cuda.current_stream(self._world.device).wait_event(self._copied_on_device)

    def _write(self, job: "_Job", on_host: Callable[["_Stored"], Tensor]) -> None:
        partial = self._folder / f"{TEMPORARY}{step_folder_name(job.step)}"
        num_bytes = self._group.total(job.num_bytes)
        is_main = self._world.is_main
        try:
            with self._together(job):
                if self._held is not None:
                    self._held.check()
                    self._begin(partial, num_bytes)
            with self._together(job):
                self._write_files(partial, job, on_host)
            with self._together(job):
                if self._held is not None:
                    self._held.check()
                    self._publish(partial, job)
        except BaseException:
            if is_main:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        with self._together(job, "was written, but what it replaces could not be removed"):
            if is_main:
                remove_old(self._folder, job.step, self._cfg)

    def _together(self, job: "_Job", failed: str = "could not be written") -> AbstractContextManager[None]:
        def line_of(error: Exception) -> str:
            where = f"rank {self._world.rank}: " if self._world.size > 1 else ""
            newest = next((path.name for path in list_checkpoints(self._folder)), None)
            there = f"{newest} is intact" if newest else "there is no earlier one"
            return (
                f"{where}checkpoint of step {job.step} {failed}: {why(error)}; {there}; make room in "
                f"{self._folder} or mend it, and run again"
            )

        return self._group.together((*WRITE_ERRORS, UserError), line_of)

    def _begin(self, partial: Path, num_bytes: int) -> None:
        fresh_folder(partial)
        free = free_bytes(partial)
        if free < num_bytes:
            raise UserError(f"needs {size_text(num_bytes)}, {size_text(free)} are free")

    def _write_files(self, partial: Path, job: "_Job", on_host: Callable[["_Stored"], Tensor]) -> None:
        def write(name: str) -> tuple[str, dict[str, Any]]:
            save_tensors(partial / name, {stored.key: on_host(stored) for stored in job.files[name]})
            return name, describe_file(partial / name)

        # safetensors, hashlib and fsync let go of the GIL.
        with ThreadPoolExecutor(num_threads()) as pool:
            files = dict(pool.map(write, job.files))
        shards = {
            stored.key: [asdict(as_shard(name, piece)) for piece in stored.pieces]
            for name, group in job.files.items()
            for stored in group
        }
        write_json(partial / f"rank-{self._world.rank:05d}.json", {"files": files, "shards": shards})

    def _publish(self, partial: Path, job: "_Job") -> None:
        write_json(partial / "state.json", job.state)
        files, shards = _merge_ranks(partial, self._world.size)
        files["state.json"] = describe_file(partial / "state.json")
        write_manifest(partial, job.step, self._world.size, files, shards)
        final = self._folder / step_folder_name(job.step)
        if final.exists():  # published folders are never written into
            set_aside(final)
        publish_folder(partial, final)


class _Stored(NamedTuple):
    """What this rank writes of one tensor."""

    key: str
    local: Tensor
    """On its device; of a weight that is stored in INT8 the quantized tensor."""
    pieces: list[Piece]

    @property
    def num_bytes(self) -> int:
        size = 4 if int8_rows(self.local) is not None else self.local.element_size()
        return self.local.numel() * size


class _Job(NamedTuple):
    step: int
    state: dict[str, Any]
    files: dict[str, list[_Stored]]

    @property
    def num_bytes(self) -> int:
        return sum(stored.num_bytes for group in self.files.values() for stored in group)


def _local(tensor: Tensor) -> Tensor:
    weight = int8_rows(tensor)
    return (on_this_rank(plain_rows(tensor)) if weight is None else weight).detach()


def _high_precision(stored: _Stored) -> Tensor:
    return stored.local if int8_rows(stored.local) is None else dequantized(stored.local)


@torch.no_grad()
def _on_host(stored: _Stored) -> Tensor:
    return _high_precision(stored).cpu().contiguous()


def _copied(stored: _Stored, buffer: Tensor | None, pinned: bool = False) -> Tensor:
    """A copy in host memory, in `buffer` if that fits."""
    values = _high_precision(stored)
    if buffer is None or buffer.shape != values.shape or buffer.dtype != values.dtype:
        buffer = torch.empty(values.shape, dtype=values.dtype, pin_memory=pinned)
    return buffer.copy_(values, non_blocking=pinned)


def _in_parts(stored: list[_Stored]) -> Iterable[tuple[str, list[_Stored]]]:
    """(suffix of the file's name, what goes into it): parts of about equal size, one where all is small."""
    total = sum(each.num_bytes for each in stored)
    limit = min(max(total // _PARTS, _SMALLEST_PART), _LARGEST_PART)
    parts: list[list[_Stored]] = []
    room = 0
    for each in stored:
        if room <= 0:
            parts.append([])
            room = limit
        parts[-1].append(each)
        room -= each.num_bytes
    if len(parts) <= 1:
        return [("", part) for part in parts]
    return [(f"-{number:03d}", part) for number, part in enumerate(parts)]


def _merge_ranks(folder: Path, world_size: int) -> tuple[dict[str, dict[str, Any]], dict[str, list[Shard]]]:
    """What each rank said of its files and shards."""
    files: dict[str, dict[str, Any]] = {}
    shards: dict[str, list[Shard]] = {}
    for rank in range(world_size):
        path = folder / f"rank-{rank:05d}.json"
        said = read_json(path)
        files |= said["files"]
        for name, parts in said["shards"].items():
            shards.setdefault(name, []).extend(Shard(**part) for part in parts)
        path.unlink()
    return files, shards
