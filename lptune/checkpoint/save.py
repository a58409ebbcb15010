"""Saves checkpoints: a checkpoint appears completely or not at all, and training hardly waits for it.

    step-00000100/  model-00000.safetensors  optimizer-00000.safetensors  …one or more of each per rank
                    replicated-00000.safetensors, sharded-00000.safetensors  further tensors given to `save`:
                    amax histories, averages of weights
                    state.json  manifest.json

The step is also the position in the data, because the order of rows is a function of seed and epoch. All
random numbers are functions of seed and step. So an exact continuation needs only the weights, the state of
the optimizer, the step and the fingerprint. The objects that own such tensors list them (stored.py). Weights
are stored as float values, so a run can resume with another precision, compile mode or number of ranks.

Publishing. All ranks write and flush their files in `.tmp-step-N`, and tell rank 0 sizes and digests when all
have succeeded. Then rank 0 adds the manifest, flushes the folder, renames it and flushes its parent. After a
kill at any moment, the old checkpoints are intact, and a `.tmp-…` may be left. An error on one rank is raised
on all ranks with the same message, and only the incomplete checkpoint is removed. Where machines have a disk
each, no folder is whole, and a checkpoint is published at `checkpoint.copy_to` (parts.py).

In the background. Weights and optimizer state change only in the optimizer's step. So they are copied to host
memory during the next forward and backward, and the next step of the optimizer waits for the end of the copy.
Files are written and hashed from the copy. It costs host memory: with AdamW, 12 bytes for each parameter on
this rank. An error is raised by the next `check`, which the loop calls in every step.
"""

import math
import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from lptune.base.errors import UserError, remedy
from lptune.base.files import TEMPORARY, HeldFolder, write_json
from lptune.base.step_folders import list_checkpoints, step_folder_name
from lptune.base.text import size_text
from lptune.checkpoint.files import (
    WRITE_ERRORS,
    free_bytes,
    num_threads,
    publish_folder,
    remove_leftover,
    save_tensors,
    set_aside,
    why,
)
from lptune.checkpoint.hosts import rank_here
from lptune.checkpoint.manifest import Shard, describe_file, write_manifest
from lptune.checkpoint.retention import remove_old
from lptune.checkpoint.state import RunState
from lptune.checkpoint.stored import (
    as_shards,
    beside_parameters_of,
    check_names,
    listing,
    named,
    parameters_of,
    state_of,
)
from lptune.config import CheckpointConfig
from lptune.distributed import SideGroup, World, reshard
from lptune.linear import dequantized

# A rank writes several files, so that threads write and hash them in parallel, but not thousands of files.
_PARTS = 8
_SMALLEST_PART, _LARGEST_PART = 64 << 20, 1 << 30


_writers = weakref.WeakKeyDictionary[torch.optim.Optimizer, "weakref.ref[CheckpointWriter]"]()


def wait_for_copy(optimizer: torch.optim.Optimizer) -> None:
    """Waits, or makes the device wait, until a save in the background has copied what `optimizer` updates.
    Comes before a change of it that is not optimizer.step(), which waits by itself.
    """
    if (found := _writers.get(optimizer)) is not None and (writer := found()) is not None:
        writer._wait_for_copy()


class CheckpointWriter:
    """Publishes checkpoints of `model` and `optimizer` as `folder/step-N`, and removes old ones.

    Every rank makes a CheckpointWriter, and all call its methods in the same order. As a context manager it
    waits at its end for a running save. With cfg.async_save, `save` returns at once, and only `optimizer` may
    then write to parameters and optimizer state, in its next step.
    """

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        cfg: CheckpointConfig,
        clock: Callable[[], float] = time.monotonic,
        metrics: Path | None = None,
        send: Callable[[int, Path, Iterable[str], SideGroup], None] | None = None,
        own_disks: bool = False,
    ) -> None:
        """optimizer: must list its state (`stored.ListsState`), else ValueError is raised. clock: returns
        seconds, for cfg.every_minutes, which count from now on. metrics: see `retention.remove_old`. send:
        called on all ranks with step and folder of each published checkpoint and the names of this rank's
        files in it. own_disks: machines have a disk each, and the folder is this machine's part.
        """
        listing(optimizer)
        self._clock, self._last_save_s, self._metrics = clock, clock(), metrics
        self._folder, self._model, self._optimizer, self._cfg = folder, model, optimizer, cfg
        self._world, self._send, self._own_disks = world, send, own_disks
        self._prepares = rank_here()[0] == 0 if own_disks else world.is_main
        self._group = SideGroup(world)
        self._held: HeldFolder | None = None
        with self._group.together((*WRITE_ERRORS, UserError), lambda e: f"{why(e)}; mend it and run again"):
            if self._prepares:
                folder.mkdir(parents=True, exist_ok=True)
                self._held = HeldFolder(folder)
        self._copies = dict[str, Tensor]()
        self._copied = threading.Event()
        self._copied.set()
        self._copied_on_device: torch.cuda.Event | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._hook = optimizer.register_step_pre_hook(lambda *_: self._wait_for_copy())
        _writers[optimizer] = weakref.ref(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hook.remove()
        if error is None:
            self.wait()
            self._group.close()
        elif self._thread is not None and self._world.size == 1:
            self._thread.join()  # with several ranks, the thread may wait forever for a rank that has ended
        if self._thread is None or not self._thread.is_alive():
            self._copies.clear()
            if self._held is not None:
                self._held.close()

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        tensors: Mapping[str, Tensor] = MappingProxyType({}),
        *,
        eval_loss: float | None = None,
        wait: bool = False,
    ) -> Path:
        """Saves the state after `step`; returns the path of the checkpoint, which may still be in writing.
        First waits for an earlier save, and raises its error if it failed.

        state: the content of state.json without the step. tensors: further tensors by name: DTensors, or
        tensors that are equal on all ranks; they are copied to the host before this method returns.
        eval_loss: of this step, for checkpoint.keep_best. wait: return only when the checkpoint is published,
        even with cfg.async_save. Raises UserError if the disk cannot be written to; checkpoints stay.
        """
        self.wait()
        self._last_save_s = self._clock()
        reshard(self._model)
        content = {"step": step, **state}
        if eval_loss is not None and math.isfinite(eval_loss):
            content["eval_loss"] = eval_loss
        job = _Job(step, content, self._contents(tensors, RunState(content, step).num_updates))
        final = self._folder / step_folder_name(step)
        if wait or not self._cfg.async_save:
            with self._world.phase(f"saving {final.name}"):
                self._write(job, _on_host)
            self._send_files(job)
            return final
        on_cuda = self._world.device.type == "cuda"
        # They change within a step, not only at its end. The stream that will change them copies them first.
        self._copy((part for part in job.parts if part.name in tensors), pinned=on_cuda)
        later = [part for part in job.parts if part.name not in tensors]
        saved = torch.cuda.current_stream(self._world.device).record_event() if on_cuda else None
        self._copied.clear()
        self._thread = threading.Thread(
            target=self._write_in_background, args=(job, later, saved), name="lptune-checkpoint", daemon=True
        )
        self._thread.start()
        return final

    def is_overdue(self) -> bool:
        """Whether cfg.every_minutes have passed since the last save, by this rank's clock. Clocks of ranks
        differ; `World.at_boundary` gives all ranks the answer of the main rank.
        """
        leaves_none = not (self._cfg.every_steps or self._cfg.at_end)
        is_writing = self._thread is not None and self._thread.is_alive()
        if not self._cfg.every_minutes or leaves_none or is_writing:
            return False
        return self._clock() - self._last_save_s >= 60 * self._cfg.every_minutes

    def check(self) -> None:
        """Raises the error of a save in the background, if it has failed. Does not wait."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> Path | None:
        """Waits for a running save; returns the newest checkpoint, or None. Raises as `check` does."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return next(iter(list_checkpoints(self._folder)), None)

    # ---- what

    def _contents(self, tensors: Mapping[str, Tensor], num_updates: int) -> dict[str, list["_Part"]]:
        """By file name: the parts that this rank writes into the file."""
        beside = named(self._model, tensors)
        groups = {
            "model": parameters_of(self._model) + beside_parameters_of(self._model),
            "optimizer": state_of(self._model, self._optimizer, num_updates),
            "replicated": [each for each in beside if not each.is_sharded],
            "sharded": [each for each in beside if each.is_sharded],
        }
        check_names(stored for group in groups.values() for stored in group)
        files: dict[str, list[_Part]] = {}
        for kind, group in groups.items():
            # If several ranks have the same part, the first of them stores it. A rank without elements of a
            # tensor stores nothing.
            mine = [stored for stored in group if stored.is_written_by(self._world)]
            parts = [_Part(each.name, each.local(), as_shards(each)) for each in mine]
            name = f"{kind}-{self._world.rank:05d}"
            listed = _in_files([part for part in parts if part.shards])
            files |= {f"{name}{suffix}.safetensors": some for suffix, some in listed}
        return files

    # ---- how

    def _write_in_background(
        self, job: "_Job", later: Iterable["_Part"], saved: "torch.cuda.Event | None"
    ) -> None:
        try:
            try:
                self._copy_later(later, saved)
            finally:
                self._copied.set()
            if self._copied_on_device is not None:
                self._copied_on_device.synchronize()
            with self._world.phase(f"saved {step_folder_name(job.step)}", in_background=True):
                self._write(job, lambda part: self._copies[part.name])
            self._send_files(job)
        except BaseException as error:
            self._failure = error

    @torch.no_grad()
    def _copy(self, parts: Iterable["_Part"], pinned: bool = False) -> None:
        for part in parts:
            self._copies[part.name] = _copied(part, self._copies.get(part.name), pinned)

    def _copy_later(self, parts: Iterable["_Part"], saved: "torch.cuda.Event | None") -> None:
        if saved is None:
            self._copy(parts)
            return
        # A new thread starts on the first GPU, and leaving the stream would create a CUDA context there.
        torch.cuda.set_device(self._world.device)
        stream = torch.cuda.Stream(self._world.device)
        with torch.cuda.stream(stream):
            stream.wait_event(saved)
            self._copy(parts, pinned=True)
            self._copied_on_device = stream.record_event()

    def _wait_for_copy(self) -> None:
        self._copied.wait()
        if self._copied_on_device is not None:  # the device waits; the host continues to launch kernels
            torch.cuda.current_stream(self._world.device).wait_event(self._copied_on_device)

    def _write(self, job: "_Job", on_host: Callable[["_Part"], Tensor]) -> None:
        partial = self._partial(job)
        num_bytes = self._group.total(job.num_bytes)
        if self._own_disks:
            num_bytes = job.num_bytes * rank_here()[1]  # ranks have about the same
        try:
            with self._together(job):
                if self._held is not None:
                    self._held.check()
                    self._begin(partial, num_bytes)
            said: _Said = {}, {}
            with self._together(job):
                said = self._write_files(partial, job, on_host)
            all_said = self._group.gather(said)
            with self._together(job):
                if self._held is not None:
                    self._held.check()
                if self._world.is_main:
                    self._publish(partial, job, all_said)
        except BaseException:
            if self._prepares:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        with self._together(job, "was written, but what it replaces could not be removed"):
            if self._world.is_main and not self._own_disks:
                remove_old(self._folder, job.step, self._cfg, self._metrics)

    def _send_files(self, job: "_Job") -> None:
        if self._send is not None:
            names = [*job.files, *["state.json"] * self._world.is_main]
            final = self._folder / step_folder_name(job.step)
            self._send(job.step, self._partial(job) if self._own_disks else final, names, self._group)

    def _partial(self, job: "_Job") -> Path:
        return self._folder / f"{TEMPORARY}{step_folder_name(job.step)}"

    def _together(self, job: "_Job", failed: str = "could not be written") -> AbstractContextManager[None]:
        def line_of(error: Exception) -> str:
            where = f"rank {self._world.rank}: " if self._world.size > 1 else ""
            newest = next((path.name for path in list_checkpoints(self._folder)), None)
            there = f"{newest} is intact" if newest else "there is no earlier one"
            return (
                f"{where}checkpoint of step {job.step} {failed}: {why(error)}; {there}; "
                f"{remedy(error, f'make room in {self._folder} or mend it')}, and run again"
            )

        return self._group.together((*WRITE_ERRORS, UserError), line_of)

    def _begin(self, partial: Path, num_bytes: int) -> None:
        if self._own_disks:  # of which some machines may share one after all
            shutil.rmtree(partial, ignore_errors=True)
        else:
            remove_leftover(partial)
            partial.mkdir()
        free = free_bytes(self._folder)
        if free < num_bytes:
            raise UserError(f"needs {size_text(num_bytes)}, {size_text(free)} are free")

    def _write_files(self, partial: Path, job: "_Job", on_host: Callable[["_Part"], Tensor]) -> "_Said":
        if self._own_disks:
            partial.mkdir(exist_ok=True)

        def write(name: str) -> tuple[str, dict[str, Any]]:
            save_tensors(partial / name, {part.name: on_host(part) for part in job.files[name]})
            return name, describe_file(partial / name)

        # safetensors, hashlib and fsync release the GIL, so threads run in parallel.
        with ThreadPoolExecutor(num_threads()) as pool:
            files = dict(pool.map(write, job.files))
        shards = {
            part.name: [shard._replace(file=name).to_json() for shard in part.shards]
            for name, group in job.files.items()
            for part in group
        }
        return files, shards

    def _publish(self, partial: Path, job: "_Job", all_said: Iterable["_Said"]) -> None:
        write_json(partial / "state.json", job.state)
        files: dict[str, dict[str, Any]] = {}
        shards: dict[str, list[Shard]] = {}
        for some, parts_of in all_said:
            files |= some
            for name, parts in parts_of.items():
                shards.setdefault(name, []).extend(Shard.from_json(part) for part in parts)
        files["state.json"] = describe_file(partial / "state.json")
        write_manifest(partial, job.step, self._world.size, files, shards)
        if self._own_disks:
            return
        final = self._folder / step_folder_name(job.step)
        if os.path.lexists(final):  # a published checkpoint is never overwritten
            set_aside(final)
        publish_folder(partial, final)


_Said = tuple[dict[str, dict[str, Any]], dict[str, list[dict[str, Any]]]]
"""What the manifest needs of one rank: `describe_file` by file name, shards as JSON by tensor name."""


class _Part(NamedTuple):
    """This rank's part of one tensor."""

    name: str
    local: Tensor
    """The live tensor, on its device. It may be quantized; `dequantized` gives the values to store."""
    shards: list[Shard]
    """Its boxes in the whole tensor, without a file name yet."""

    @property
    def num_bytes(self) -> int:
        return self.local.numel() * self.local.dtype.itemsize


class _Job(NamedTuple):
    step: int
    state: dict[str, Any]
    """Content of state.json."""
    files: dict[str, list[_Part]]

    @property
    def parts(self) -> list[_Part]:
        return [part for group in self.files.values() for part in group]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


@torch.no_grad()
def _on_host(part: _Part) -> Tensor:
    return dequantized(part.local).cpu().contiguous()


def _copied(part: _Part, buffer: Tensor | None, pinned: bool = False) -> Tensor:
    """A copy of the values in host memory, in `buffer` if shape and dtype fit."""
    values = dequantized(part.local)
    if buffer is None or buffer.shape != values.shape or buffer.dtype != values.dtype:
        buffer = torch.empty(values.shape, dtype=values.dtype, pin_memory=pinned)
    return buffer.copy_(values, non_blocking=pinned)


def _in_files(parts: list[_Part]) -> Iterable[tuple[str, list[_Part]]]:
    """Divides the parts over files of about equal size; one file if all parts are small. Returns (suffix of
    the file name, its parts) for each file.
    """
    limit = min(max(sum(part.num_bytes for part in parts) // _PARTS, _SMALLEST_PART), _LARGEST_PART)
    files: list[list[_Part]] = []
    room = 0
    for part in parts:
        if room <= 0:
            files.append([])
            room = limit
        files[-1].append(part)
        room -= part.num_bytes
    if len(files) <= 1:
        return [("", some) for some in files]
    return [(f"-{number:03d}", some) for number, some in enumerate(files)]
