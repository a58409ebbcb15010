"""Run: the files of one run, for its recipe: folder, checkpoint to continue, saves and export.

`open_run` opens it, `read_base` finds the base checkpoint and the one to continue, `load` fills the model and
the state of its training, `export` comes last. What lies between is asked by training/loop.py.

A Run does not train: no method of it takes a batch, a loss or a callable.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import date
from pathlib import Path
from signal import Signals
from types import MappingProxyType
from typing import Protocol, TypeVar

import torch
from torch import nn

from lptune.base.errors import UnavailableError
from lptune.base.files import TEMPORARY
from lptune.base.progress import is_verbose
from lptune.base.step_folders import step_folder_name, step_of
from lptune.checkpoint.export import check_form, export_hf
from lptune.checkpoint.hf import Base, load_hf, num_elements_here, read_base
from lptune.checkpoint.hosts import check_same
from lptune.checkpoint.load import load_state
from lptune.checkpoint.manifest import Manifest, verify
from lptune.checkpoint.reference import ReferenceFile
from lptune.checkpoint.resume import (
    change_of_optimizer,
    changed_keys,
    check_fingerprint,
    check_num_averaged,
    check_unchanged,
    find_checkpoint,
    has_no_effect,
    state_after_fallback,
    state_of_run,
    still_fallen_back,
)
from lptune.checkpoint.retention import best_checkpoint, evaluations, patience
from lptune.checkpoint.run_copy import RunCopy
from lptune.checkpoint.run_folder import (
    RunFolder,
    keep_checks_until,
    open_run_folder,
    write_launch,
    write_samples,
)
from lptune.checkpoint.save import CheckpointWriter
from lptune.checkpoint.state import RunState, read_state
from lptune.config import RunConfig, to_dict
from lptune.distributed import World, reshard, side_group
from lptune.linear import LowPrecision, Plan

_T = TypeVar("_T")


class TrainingState(Protocol):
    """The part of `training.State` that a checkpoint stores."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def optimizer(self) -> torch.optim.Optimizer: ...
    @property
    def low(self) -> LowPrecision: ...

    def counts(self) -> dict[str, float]:
        """The numbers of skipped steps, and perhaps a gradient norm, by their name in state.json."""

    def restore_counts(self, saved: Mapping[str, float]) -> None:
        """Goes on from the `counts` of a checkpoint."""


class Run:
    """One run, on this rank. Every rank makes a Run, and all call its methods in the same order."""

    def __init__(self, cfg: RunConfig, world: World, folder: RunFolder, opened: ExitStack) -> None:
        """opened: what it holds is closed when the run ends, in whatever way."""
        self.cfg, self.world, self.folder = cfg, world, folder
        self.path, self.metrics = folder.path, folder.metrics
        self._opened = opened
        self.step = 0
        """The step of the newest checkpoint, from which the run continued or which it saved; 0: none."""
        self.started_on = date.today()
        """The date that chat templates print. A resumed run keeps it."""
        self.cuts_text = True
        """Whether a `data.cut_text` that is not set may mean true: not in a run older than the key."""
        self._continues: Manifest | None = None
        self._saved: RunState | None = None
        self._newest: Path | None = None
        self._has_saved = False
        self._state: RunState | None = None
        self._num_steps, self._data_digest = 0, ""
        self._has_metrics = False  # metrics.jsonl may be of another run, which `begin` sets aside
        self._stops_early = self._has_base = False
        self._fell_back: dict[str, int] = {}
        self._counts: dict[str, float] = {}
        self._reference: ReferenceFile | None = None
        address = cfg.checkpoint.copy_to
        self._copy = RunCopy(address, folder, cfg, world) if address else None

    def read_base(self) -> Base:
        """The base checkpoint in model.path: its headers, no weights. Also finds and verifies the checkpoint
        to continue (the key `resume`), and sets `step`, `started_on` and `cuts_text` from it. A collective.
        Raises UserError as `hf.read_base`, `resume.find_checkpoint` and `RunCopy.find` do.
        """
        base = read_base(self.cfg.model.path, self.world.print, backend=self.cfg.model.backend)
        self._index = base.index
        if self._copy is not None:
            found = self._copy.find(self.cfg.resume)
        else:
            found = find_checkpoint(self.folder.checkpoints, self.cfg.resume, self.world, self.world.print)
        if found is not None:
            self._continues, self._saved = found, read_state(found)
            self.step, self._newest = found.step, found.folder
            self._has_metrics = found.folder.resolve().parent == self.folder.steps.resolve()
            self.started_on, self._counts = self._saved.started_on, self._saved.counts
            self.cuts_text = self._saved.cuts_text
            self._fell_back = still_fallen_back(self.cfg, self._saved, self.world.print)
        return base

    def check_continues(
        self,
        plan: Plan,
        num_steps: int,
        data_digest: str,
        chat_template: str | None,
        *,
        held_out: str = "",
        others: Mapping[str, str] = MappingProxyType({}),
        stops: Mapping[str, int] | None = None,
    ) -> None:
        """Raises UserError if ranks differ, or the run differs from the checkpoint that it continues, in
        data, model or seed. (A resumed run may have other held-out rows, but all ranks have the same.) Also
        prepares state.json for the checkpoints of this run. A collective.

        plan: the precision of the steps to come. num_steps: the step after which the run ends. data_digest:
        of the training rows. chat_template: the tokenizer's template, as the run uses it. held_out: digest of
        the held-out rows. others: digests of what else a recipe trains on, by a name for messages. stops:
        `data.learned_stops`, for the export.
        """
        check_num_averaged(self.cfg, num_steps)
        if self.cfg.export.quantized != "none":
            check_form(self._index, self.cfg.export, plan, self.cfg.precision.kind)
        self._num_steps, self._data_digest = num_steps, data_digest
        plan, day = plan.with_high(self._fell_back), self.started_on
        self._state = state_of_run(
            self.cfg, plan, self._saved, num_steps, data_digest, day, chat_template, others, stops
        ).with_fallen_back(self._fell_back)
        check_fingerprint(self._saved, self._state, self.world)
        self._optimizer_note = change_of_optimizer(self._saved, self.cfg)
        check_same("data.eval_source" if self.cfg.data.eval_source else "data.source", held_out, self.world)

    def last_step(self, step: int, num_steps: int, after: int) -> int:
        """The step after which the run ends: `step` if the last `after` evaluations until there found no new
        lowest eval_loss, else `num_steps`. after=0: always `num_steps`. Prints a line if the run ends early.
        A collective.

        Every evaluation is read from metrics.jsonl, so a resumed run ends where an uninterrupted one does.
        """
        if not after or not self._has_metrics or step >= num_steps:
            return num_steps

        def ends() -> bool:
            losses = {at: loss for at, loss in evaluations(self.metrics).items() if at <= step}
            best, num_since = patience(losses)
            if num_since >= after:
                line = f"{num_since} evaluations without a lower eval_loss than that of step {best}"
                self.world.print(f"stopped early after step {step} of {num_steps}: {line}")
            return num_since >= after

        self._stops_early = bool(self.folder.on_main(ends))
        return step if self._stops_early else num_steps

    def is_finished(self, num_steps: int) -> bool:
        """Whether nothing is left to train or to export; prints a line then. Raises UserError if nothing is
        left to train but the config has changed, or the export exists with other `export.*` settings. Where
        steps are left, a line names the keys that have changed.
        """
        if self._continues is None or self._saved is None:
            return False
        assert self._state is not None, "check_continues comes first"
        if self.step < num_steps:
            if changed := changed_keys(self._saved, self._state, self.world.print, type(self.cfg)):
                self.world.print(f"note: step {self.step} was trained with {', '.join(changed)}")
            if self._optimizer_note:
                self.world.print(self._optimizer_note)
            return False
        check_unchanged(self._saved, self._state, self.world.print, type(self.cfg))
        exports = self.cfg.export.enabled
        place = self._own or self.folder
        if exports and not place.is_exported(step_of(self._to_export()), self.cfg.export):
            return False
        if self._has_metrics:
            if self._copy is not None:
                self._copy.begin(self._continues)
            self.folder.write_done(self.step, self.cfg)
        and_exported = " and exported" if exports else ""
        kind = self.cfg.precision.kind
        done = f"{self._place_of(self._continues.folder)} is step {self.step}{and_exported}, precision {kind}"
        key = "early_stop_after" if self._stops_early else "num_steps"
        self.world.print(f"already finished: {done};\n  for more raise {key} or change output_dir")
        return True

    def load(self, base: Base, state: TrainingState) -> None:
        """Fills all of `state` from the checkpoint that the run continues, or only the model from `base` in a
        new run. A collective.
        """
        if self._continues is None:
            if not self._has_base:
                self._load_weights(base, state.model)
            return
        reshard(state.model)  # the base's weights may have been used (load_base)
        with self.world.phase(f"loading {self._continues.folder.name}"):
            load_state(self._continues, state.model, state.optimizer, state.low.state())
            state.low.loaded()
            if self._fell_back:
                state.low.switch_to_high(self._fell_back)
        state.restore_counts(self._counts)

    def load_base(self, base: Base, model: nn.Module) -> None:
        """Fills `model` from `base`, also in a run that continues a checkpoint: to compute with the weights
        before training. `load` comes after it; until then nothing may change the weights. A collective.
        """
        self._load_weights(base, model)
        self._has_base = True

    def _load_weights(self, base: Base, model: nn.Module) -> None:
        with self.world.phase("loading weights", total=num_elements_here(model)) as advance:
            load_hf(model, base.index, self.world, advance=advance)

    def reference(self, held_out: str, **others: str) -> ReferenceFile:
        """The file for what a loss needs of the model before training (reference.py). What it is given to
        keep is written by `begin`.

        held_out: digest of the held-out rows; empty if there are none. others: digests of what else the
        numbers depend on, by name.
        """
        assert self._state is not None, "check_continues comes first: it says what the run depends on"
        precision = {
            k: v for k, v in to_dict(self.cfg)["precision"].items() if not has_no_effect(f"precision.{k}")
        }
        made_with = {
            **self._state.fingerprint,
            **{name: digest[:16] for name, digest in {"held_out": held_out, **others}.items()},
            "compute_dtype": self.cfg.compute_dtype,
            "precision": json.dumps(precision),
        }
        self._reference = ReferenceFile(self.folder, self.world, made_with)
        return self._reference

    def begin(self, plan: Plan, report: Sequence[str]) -> None:
        """Makes the run's folder, or prepares an existing one; writes config.yaml, precision_plan.json and
        run.json; prints the plan (with -v all layers) and `report`. A collective.
        """
        plan = plan.with_high(self._fell_back)
        self.folder.create(self._continues, self.world.print)
        if self._copy is not None:
            self._copy.begin(self._continues if self._has_metrics else None)
        self._has_metrics = True

        def write() -> None:
            self.folder.write_config(self.cfg)
            self.folder.write_plan(plan.to_json())
            step, world = self.step, self.world
            write_launch(self.path / "run.json", self._data_digest, step, self._num_steps, world)
            keep_checks_until(self.path / "shadow.jsonl", step)

        self.folder.on_main(write)
        if self.folder.own_disks:
            self.folder.name_run()
        if self._reference is not None:
            self._reference.write()
        self.world.print("\n".join([plan.table() if is_verbose() else plan.summary(), *report]))
        if self._continues is not None:
            self.world.print(f"continuing {self._place_of(self._continues.folder)}")

    def keep_samples(self, samples: Sequence[Mapping[str, object]]) -> None:
        """Writes answers of the model to samples.jsonl, in place of earlier ones of the same `when`; none:
        does nothing. A collective.
        """
        if samples:
            self.folder.on_main(lambda: write_samples(self.path / "samples.jsonl", samples))

    def plan_changed(self, plan: Plan, step: int, names: Sequence[str]) -> None:
        """Records that the layers `names` run in high precision after `step` steps: in precision_plan.json
        and in later checkpoints. plan: with these layers. A collective.
        """
        assert self._state is not None, "check_continues comes first: it says what checkpoints record"
        self._state = state_after_fallback(self.cfg, plan, self._state, step, names)
        self.folder.on_main(lambda: self.folder.write_plan(plan.to_json()))

    def open_writer(self, state: TrainingState) -> None:
        """Makes `writer`, for saves of `state`. `close` waits until the last save is published and closes it,
        and so does the error that ends the run. A collective. Raises UserError if the run's folder has
        disappeared since `begin`.
        """
        self.folder.on_main(self.folder.check_held)
        self._trained = state
        self.writer = self.keep_open(
            CheckpointWriter(
                self.folder.steps,
                state.model,
                state.optimizer,
                self.world,
                self.cfg.checkpoint,
                metrics=self.metrics,
                send=self._copy.send if self._copy is not None else None,
                own_disks=self.folder.own_disks,
            )
        )

    def save(self, step: int, *, eval_loss: float | None = None, wait: bool = False) -> None:
        """Saves the state after `step` as checkpoints/step-N: tensors of the model, the optimizer and low
        precision, and state.json; in the background if checkpoint.async_save. A collective.

        eval_loss, wait: as of `CheckpointWriter.save`.
        """
        assert self._state is not None, "check_continues comes first: it says what checkpoints record"
        content, low = {**self._state.content, **self._trained.counts()}, self._trained.low.state()
        self._newest = self.writer.save(step, content, low, eval_loss=eval_loss, wait=wait)
        self.step, self._has_saved = step, True

    def newest(self) -> Path | None:
        """The newest checkpoint of this run, or else the one that it continues. Waits for a running save, and
        raises as `CheckpointWriter.check` does.
        """
        return self.writer.wait() or self._newest

    def keep_open(self, opened: AbstractContextManager[_T]) -> _T:
        """Enters `opened`; `close` leaves it, or the error that ends the run."""
        return self._opened.enter_context(opened)

    def close(self) -> None:
        """Closes what is open, after the last step: waits until the last save is published."""
        self._opened.close()

    def stopped(self, by: Signals) -> SystemExit:
        """The exception to raise when the signal `by` stopped the run between two steps: exit code 143.
        Prints a line.
        """
        again = "run again" if self.cfg.resume == "auto" else "run again with resume=auto"
        what = (
            f" after step {self.step}, saved; {again} to continue"
            if self._has_saved
            else ": nothing new to save"
        )
        if lost := self._lost():
            what = f": {lost}"
        self.world.print(f"stopped by {by.name}{what}")
        return SystemExit(143)

    def export(self, base: Base) -> None:
        """Exports the newest checkpoint as a Hugging Face folder, if `export.enabled`; of a run that stopped
        early, the best checkpoint that `checkpoint.keep_best` kept. Prints the path of the result. A
        collective. Raises UserError as `export_hf` does.
        """
        self.close()
        if not self.cfg.export.enabled:
            if lost := self._lost():
                raise UnavailableError(lost)
            newest = "there is no checkpoint"
            if self._newest is not None:
                newest = f"the newest checkpoint is {self._place_of(self._newest)}"
            self.world.print(f"no export (export.enabled: false); {newest}")
            self.folder.write_done(self.step, self.cfg)
            return
        checkpoint, count = self._to_export(), self.cfg.export.average_checkpoints
        folder, manifests, publish = self.folder.export, list[Manifest](), None
        whole = str(folder)
        if self._own is not None:
            publish, whole = self._own.publish_export, self._own.place(folder.name)
            manifests = self._own.to_export(step_of(checkpoint), count)
            folder = self.folder.parts / f"{TEMPORARY}{folder.name}"
        elif checkpoint != self._newest:  # the newest was verified, or has just been written
            with self.world.phase(f"verifying {checkpoint.name}"), side_group(self.world) as group:
                verify(checkpoint, group)
        with self.world.phase("exporting and reading back"):
            cfg, world = self.cfg.export, self.world
            export_hf(checkpoint, base.index, folder, cfg, world, manifests=manifests, publish=publish)
        self.folder.on_main(lambda: self.folder.write_exported(step_of(checkpoint), self.cfg.export))
        if self._copy is not None:
            self._copy.send_export()
        self.folder.write_done(self.step, self.cfg)
        averages = "the moving averages in " * bool(self.cfg.optimizer.ema_decay and self.cfg.export.ema)
        what = f"{averages}{checkpoint.name}" if count == 1 else f"the mean of the last {count} checkpoints"
        high = ""
        if self.cfg.export.quantized != "none":
            where = self._place_of(checkpoint)
            high = f"; in {self.cfg.export.quantized}, {where} has the weights in float32"
        self.world.print(f"export: {whole} (read back and compared with {what}{high})")

    def _place_of(self, checkpoint: Path) -> str:
        """Where a checkpoint is whole."""
        return str(checkpoint) if self._own is None else self._own.place(f"checkpoints/{checkpoint.name}")

    def _lost(self) -> str:
        """What a run on machines with a disk each may have lost, since the last step could not be copied;
        empty: nothing.
        """
        if self._own is None or not self._has_saved or self._own.step == self.step:
            return ""
        newest = f"the newest checkpoint is of step {self._own.step}" if self._own.step else "there is none"
        todo = "run again on these machines, whose disks have it"
        return f"checkpoint.copy_to: step {self.step} is not copied (see above), and {newest}; {todo}"

    @property
    def _own(self) -> RunCopy | None:
        """The copy, where machines have a disk each, so that it alone is whole."""
        return self._copy if self.folder.own_disks else None

    def _to_export(self) -> Path:
        """The checkpoint that `export` exports. A collective."""
        assert self._newest is not None  # the config ensures it: an export needs checkpoint.at_end
        if not (self._stops_early and self.cfg.checkpoint.keep_best):
            return self._newest
        folder = self.folder.steps
        if self._own is not None:
            return folder / step_folder_name(self._own.best())
        best = self.folder.on_main(lambda: step_of(best_checkpoint(folder, self.metrics)))
        return folder / step_folder_name(best)


@contextmanager
def open_run(cfg: RunConfig, world: World) -> Iterator[Run]:
    """Opens the run of `cfg`: checks its folder, and locks it if it is a run's already. A collective.

    Raises UserError if the folder cannot be used for a run, and, in place of an OSError in the context, if
    that names a path in the folder (run_folder.py).
    """
    with open_run_folder(cfg, world) as folder, ExitStack() as opened:
        yield Run(cfg, world, folder, opened)
