"""The loop of a training recipe: everything but the forward, the loss and the evaluation, the recipe's own.

    steps = training.plan_steps(run, plan, rows, tokenizer)
    ...                                        the model and its training.State; run.load
    steps.start(state)                         prints the plan, makes the folder
    for step in steps:
        for batch in step.shadow_batches():    none, unless precision.shadow_every makes it due
            loss = ...
            step.add(loss)
            (loss * step.loss_factor).backward()
        for batch in step.batches():
            ...                                the same three lines
        step.update()
        if step.eval_due:
            step.record(eval_loss=...)

Facts come out of the library, one object a step; the code of the recipe runs between them. When the recipe
asks for the next step, the last one is written to metrics.jsonl, the run is saved if a checkpoint is due (and
all ranks multiply alike), and ends if it diverged, if a signal came or if evaluations say so
(`early_stop_after`).
"""

from collections.abc import Callable, Iterator, Mapping
from signal import Signals
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lptune.base.errors import UserError
from lptune.checkpoint import Run
from lptune.config import EvaluatedConfig
from lptune.data import Batch, Loader, Prepared, Tokenizer, learned_stops
from lptune.distributed import check_products
from lptune.linear import Plan
from lptune.training.first_loss import check_first_loss
from lptune.training.metrics import MetricsWriter
from lptune.training.record import StepMeter
from lptune.training.samples import show_samples
from lptune.training.schedule import is_due
from lptune.training.settings import describe_run
from lptune.training.shadow import ShadowCheck
from lptune.training.state import State


class _Unit(NamedTuple):
    """What a loss is the mean of, counted."""

    in_step: Callable[[Loader, int], int]
    """Over all ranks."""
    in_batch: Callable[[Batch], int]
    documents: int
    """Number of documents of the data that one of it takes."""


def _documents(batch: Batch) -> int:
    return int((batch.numbers_D >= 0).sum())


_UNITS = {
    "target": _Unit(Loader.num_targets, lambda batch: batch.num_targets, 1),
    "answer": _Unit(Loader.num_documents, _documents, 1),
    "preference": _Unit(Loader.num_preferences, lambda batch: _documents(batch) // 2, 2),
}


def plan_steps(
    run: Run,
    plan: Plan,
    rows: Prepared,
    tokenizer: Tokenizer,
    *,
    loss_per: str = "target",
    others: Mapping[str, str] = MappingProxyType({}),
) -> "Steps":
    """The steps that are left of the run; falsy if nothing is left to train or to export. A collective.
    Raises UserError if ranks differ, or the run differs from the checkpoint that it continues, in data, model
    or seed.

    plan: the precision of the steps to come. loss_per: the loss is a mean over each `target` (a token to
    learn), `answer` or `preference`. others: digests of what else the recipe trains on, by a name for
    messages.
    """
    steps = Steps(run, plan, rows, tokenizer, loss_per)
    held_out = rows.evaluation
    run.check_continues(
        plan,
        steps.num_steps,
        rows.train.digest,
        tokenizer.chat_template,
        held_out=held_out.digest if held_out is not None and run.world.size > 1 else "",
        others=others,
        stops=learned_stops(rows.train, tokenizer),
    )
    steps.plan_end()
    return steps


class Steps:
    """The steps of a run on this rank: an iterator of `Step`. All ranks make one and use it alike."""

    def __init__(self, run: Run, plan: Plan, rows: Prepared, tokenizer: Tokenizer, loss_per: str) -> None:
        """Arguments: those of `plan_steps`, which makes it."""
        cfg, world = run.cfg, run.world
        self._run, self._plan, self._rows, self._tokenizer = run, plan, rows, tokenizer
        self.loader = Loader.for_run(rows.train, cfg, rank=world.data_rank, num_ranks=world.data_size)
        self.unit = _UNITS[loss_per]
        self.num_steps = cfg.given_num_steps or self.loader.num_steps(cfg.num_epochs)
        """The step after which the run ends; an evaluation may lower it."""
        self.num_done = run.step
        """Number of finished steps."""
        self.eval_due = False
        """After `start`: whether the held-out rows are to be evaluated before the next step: before training,
        or because a signal left the evaluation out."""
        self._is_finished = False
        evaluated = cfg if isinstance(cfg, EvaluatedConfig) else None
        self._eval_every = evaluated.eval_every_steps if evaluated and rows.evaluation is not None else 0
        self._stop_after = evaluated.early_stop_after if evaluated else 0
        self._num_samples = evaluated.num_samples if evaluated else 0

    def __bool__(self) -> bool:
        return not self._is_finished

    def plan_end(self) -> None:
        """Finds whether evaluations until now end the run, and whether it is finished. A collective."""
        self._end_early()
        self._is_finished = self._run.is_finished(self.num_steps)

    def start(self, state: State) -> None:
        """Makes the folder of the run, after `run.load`; prints the plan, and what 8 bits cost before the
        first step, if it is much. A collective. Raises UserError if the schedule does not fit the steps.
        """
        run, cfg, world, done = self._run, self._run.cfg, self._run.world, self.num_done
        self.state, model = state, state.model
        train = self._rows.train
        lines = describe_run(model, self._plan, cfg, world, done, self.num_steps, train.one_document_per_row)
        run.begin(self._plan, [*self._rows.report, *lines])
        self.meter = StepMeter(cfg, self._plan, model.facts, world, self.loader.steps_per_epoch)
        self.shadow = ShadowCheck(model, state.low, self.loader, cfg, world, run)
        check_first_loss(model, state.low, self.loader, cfg, world, done)
        if done == 0:
            self.show_samples()
        run.open_writer(state)
        is_main = world.is_main
        self._metrics = run.keep_open(MetricsWriter(run.metrics, cfg.logging, is_main, done, self.num_steps))
        is_evaluation_step = is_due(done, self._eval_every, done == self.num_steps)
        self.eval_due = is_evaluation_step and not run.folder.has_evaluation(done)

    def show_samples(self) -> None:
        """Answers `num_samples` held-out prompts, prints and stores the answers; `start` does it before
        training. A collective.
        """
        found = show_samples(
            self.state.model,
            self._tokenizer,
            self._rows.evaluation,
            self._num_samples,
            self._run.world,
            self.num_done,
            every=self.unit.documents,
        )
        self._run.keep_samples(found)

    def record(self, **values: float) -> None:
        """Writes the evaluation before the next step (`eval_due`); `eval_loss` may end the run. A
        collective.
        """
        self._write({"step": self.num_done, **values})

    def __iter__(self) -> "Iterator[Step]":
        run, world, cfg, update = self._run, self._run.world, self._run.cfg, self.state.update
        if stopped := world.stop_requested():  # later signals let the step end, and its state is saved
            raise run.stopped(stopped)
        is_save_due, checked = False, self.num_done
        while self.num_done < self.num_steps:
            step = Step(self, self.num_done)
            yield step
            if step.values is None:
                raise RuntimeError("the loop over the steps is to call step.update() once in each")
            self._write(step.values)
            number = self.num_done
            if update.num_skipped_in_a_row >= cfg.diverged_after_steps:
                raise update.diverged(number, run.newest(), run.path)
            run.writer.check()
            # A skipped step has nothing new, and would drive out a good checkpoint: the next is saved.
            is_save_due |= step.is_overdue or is_due(number, cfg.checkpoint.every_steps)
            at_end = bool(step.stopped) or (number == self.num_steps and cfg.checkpoint.at_end)
            if at_end or (is_save_due and not update.num_skipped_in_a_row):
                check_products(world, f"; what was trained after step {checked} is not saved")
                checked = number
                run.save(number, eval_loss=step.values.get("eval_loss"), wait=at_end)
                is_save_due = False
            if step.stopped:
                raise run.stopped(step.stopped)
        run.close()

    def ended(self) -> tuple[Signals | None, bool, bool]:
        """Counts the step that was just updated. Returns the signal that stops the run, whether a save by
        time is due, and whether an evaluation is. A collective.
        """
        self.num_done += 1
        stopped, is_overdue = self._run.world.at_boundary(self._run.writer.is_overdue())
        is_last = self.num_done == self.num_steps
        return stopped, is_overdue, not stopped and is_due(self.num_done, self._eval_every, is_last)

    def _write(self, values: dict[str, Any]) -> None:
        self._metrics.write(values)
        if "eval_loss" in values:
            self._end_early()

    def _end_early(self) -> None:
        self.num_steps = self._run.last_step(self.num_done, self.num_steps, self._stop_after)


class Step:
    """One step of the optimizer, between its rows and its record. `Steps` makes it."""

    def __init__(self, steps: Steps, done: int) -> None:
        """done: number of finished steps."""
        self._steps, self._done = steps, done
        self._run = steps._run
        loader, world = steps.loader, self._run.world
        self.count = max(1, steps.unit.in_step(loader, done))
        """Number of targets (or answers, or preferences) over all ranks, of which the loss is the mean."""
        self.loss_factor = world.data_size / self.count
        """By which to multiply a summed loss before `backward()`: FSDP averages gradients over ranks."""
        self._loss_sum: Tensor | None = None
        self.eval_due = False
        """After `update`: whether the held-out rows are to be evaluated."""
        self.values: dict[str, Any] | None = None
        """After `update`: the line of metrics.jsonl."""
        self.stopped: Signals | None = None
        self.is_overdue = False
        self._can_shadow = self._is_shadow = self._has_run = False
        self._shadowed = dict[str, float]()
        self._seed()
        steps.meter.start()

    def _seed(self) -> None:
        # So that dropout, added to a copy of a recipe, resumes exactly.
        self._run.world.seed(self._run.cfg.seed, self._done)

    def shadow_batches(self) -> Iterator[Batch]:
        """If a shadow check is due (`precision.shadow_every`), this rank's first micro-batch twice: for a
        pass in the precision of training, and for one in high precision. `backward()` computes no gradients
        of parameters then, and the training does not notice. A collective.
        """
        self._can_shadow = True
        if not self._steps.shadow.is_due(self._done):
            return
        with self._steps.meter.left_out():
            self._is_shadow = True
            try:
                yield from self._steps.shadow.batches(self._done, self._steps.unit.in_batch)
            finally:
                self._is_shadow = False
        self._shadowed = self._steps.shadow.found
        self._seed()  # what the passes drew is no part of the step

    def batches(self) -> Iterator[Batch]:
        """This rank's micro-batches, for forward and backward. Gradients add up, and are reduced over ranks
        after the last one. In the first step of a launch, what ran is then compared with the precision plan.
        A collective. Raises UserError if the recipe has no loop for the shadow check that the config asks
        for.
        """
        if self._run.cfg.precision.checks_shadow and not self._can_shadow:
            raise UserError(
                "precision.shadow_every: this recipe makes no shadow check; add the loop over "
                "step.shadow_batches() as in full_finetune, or set it to 0"
            )
        steps = self._steps
        batches = steps.loader.micro_batches(self._done)
        yield from steps.state.passes(self._done, steps.num_steps, batches)
        self._has_run = True

    def mismatched_batches(self) -> list[Batch]:
        """`batches` with the answers of other prompts (`Rows.mismatched`), for a forward alone."""
        return self._steps.loader.mismatched(self._done)

    def num_targets_by_source(self) -> list[int]:
        """Number of targets of each data source, over all ranks."""
        return self._steps.loader.num_targets_by_source(self._done)

    def add(self, loss: Tensor) -> None:
        """Adds the loss of a micro-batch, summed over its targets, before `loss_factor`: a float32 scalar on
        the device, or a vector of its parts. It is reported, and a step whose loss is not finite updates
        nothing: with optimizer.in_backward `add` comes before `backward()`, and is a collective.
        """
        if self._is_shadow:
            self._steps.shadow.add(loss)
            return
        if self._loss_sum is None:
            self._loss_sum = torch.zeros(loss.shape, device=loss.device)
        self._steps.state.update.before_backward(loss)
        self._loss_sum += loss.detach()

    @property
    def loss_sum(self) -> Tensor:
        """What `add` was given, added up over the micro-batches of this rank."""
        if self._loss_sum is None:
            raise RuntimeError("step.update() comes after step.add(loss) of each micro-batch")
        return self._loss_sum

    def update(self) -> None:
        """Clips and updates, and clears the gradients; if the loss or a gradient is not finite on any rank,
        only clears. Then asks all ranks whether the run is to stop after this step. A collective.

        Raises RuntimeError if the loop over `batches` was left before its end, where what ran is compared
        with the plan and scales are kept.
        """
        if not self._has_run:
            raise RuntimeError(
                "the loop over step.batches() is to run to its end: leave out zip, next and break"
            )
        steps, loader = self._steps, self._steps.loader
        updated, rate = steps.state.step(self._done, steps.num_steps, self.loss_sum.sum(), self.count)
        steps.meter.stop()
        is_of_targets = steps.unit is _UNITS["target"]
        num_targets = self.count if is_of_targets else loader.num_targets(self._done)
        lengths = loader.document_lengths(self._done)
        state, number = steps.state, self._done + 1
        values = steps.meter.record(number, updated, num_targets, rate, lengths, state.update, state.low)
        self.values = values | self._shadowed
        self.stopped, self.is_overdue, self.eval_due = steps.ended()

    def record(self, **values: float) -> None:
        """Adds values to the line of metrics.jsonl, after `update`. `eval_loss` may end the run, and decides
        which checkpoint is the best.
        """
        assert self.values is not None, "update comes first"
        self.values |= values
