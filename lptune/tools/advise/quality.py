"""What each kind costs in quality: measured once on a published model, or here, on this model and these data.

What decides are the outliers of a model's activations on its data, and a forward shows them. Each micro-batch
runs in `none` and in every kind, on the same weights, so the differences are paired: they vary far less than
the losses do. A kind's difference, as a share of the loss, and its standard error over B micro-batches are

    D / L      D = sum of (loss of the kind - loss of none) / number of targets,  L the loss of none
    s(D)**2 = B / (B - 1) * sum of (d - D * n)**2 / (sum of n)**2                 d, n: of one micro-batch

A loss is one number, and partly luck: W is rounded once, and moves along the gradient of the loss, up or
down. What each layer and backward suffer is in the errors of each layer's GEMMs (linear/steps/shadow.py), of
one micro-batch.
"""

import dataclasses
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from lptune import data, inference, linear, models
from lptune.base import progress
from lptune.config import PRECISION_KINDS, PrecisionConfig, RunConfig
from lptune.data import Batch
from lptune.distributed import World
from lptune.linear.steps.shadow import LayerErrors, ShadowPass
from lptune.tools.advise.measure import precision_of
from lptune.training.first_loss import LIMIT


class Difference(NamedTuple):
    """How much larger the loss of a kind is than that of `none`, as a share of the loss of `none`."""

    difference: float
    standard_error: float
    """nan where it is not known: of one micro-batch."""

    def __str__(self) -> str:
        if math.isinf(self.difference):
            return "unknown"
        error = "" if math.isnan(self.standard_error) else f" ± {100 * self.standard_error:.2f}"
        return f"{100 * self.difference:+.2f}{error} %"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quality:
    """What was measured of each kind before the first step."""

    source: str
    """On what, for a line of a report."""
    differences: Mapping[str, Difference]
    """By kind, without `none`."""
    errors: Mapping[str, dict[str, LayerErrors]] = dataclasses.field(default_factory=dict)
    """By kind and layer, of one micro-batch."""
    least_db: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """By kind, the SQNR below which a GEMM is named: `precision.shadow_min_sqnr_db`."""
    limit: float = LIMIT
    """A kind that moves the loss by more is not recommended, unless nothing else pays and the figures are of
    another model."""
    is_measured: bool = True
    """Whether it is of the user's model."""

    def allows(self, kind: str) -> bool:
        """Whether `kind` is within the limit, give or take two standard errors. A loss that is much smaller
        is luck with large errors, and as bad as one that is larger.
        """
        difference, error = self.differences[kind]
        if math.isnan(error):  # one row says too little
            return math.isfinite(difference)
        return abs(difference) <= self.limit + 2 * error and error <= self.limit


PUBLISHED = Quality(
    source="of Gemma 3 270M before any training (docs/benchmarks.md); --quality measures it for your model",
    differences={
        kind: Difference(*(keys.loss_change or (math.inf, math.nan)))
        for kind, keys in PRECISION_KINDS.items()
        if kind != "none"
    },
    is_measured=False,
)
"""By the record of each kind in the config."""
LEAST, MOST = 8, 128
"""Micro-batches that are measured: at least, for a standard error that means something, and at most."""


def measure(cfg: RunConfig, kinds: Sequence[str], seconds: float, world: World) -> Quality:
    """The quality of each of `kinds` for the model and the data of `cfg`, in micro-batches of one row, in the
    order of the run.

    A kind without native GEMMs here is emulated, which gives the same numbers slowly. world: of one rank.
    seconds: as in `differences`. Raises UserError as reading the model and the data does.
    """
    opened = inference.open_model(cfg.model.path, progress.print_line, cfg.data.chat_template)
    prepare = getattr(data, cfg.PREPARE)
    vocab_size, seq_len = opened.config.vocab_size, cfg.data.seq_len
    rows, _, _ = prepare(cfg.data, opened.tokenizer, seed=cfg.seed, vocab_size=vocab_size)
    none = PrecisionConfig(kind="none")
    model = opened.load(none, cfg.compute_dtype, world, num_tokens=seq_len, notes=False).model
    native = linear.native_kinds(world.device)
    precisions = {
        kind: dataclasses.replace(precision_of(cfg.precision, kind), emulate=kind not in native)
        for kind in kinds
    }
    batches = [rows.batch([rows.row_at(i, cfg.seed)]) for i in range(min(MOST, rows.num_rows))]
    found, loss, num_targets = differences(model, precisions, batches, seconds=seconds)
    source = f"measured here, {num_targets:,} targets of {cfg.model.path}, whose loss in none is {loss:.4f}"
    least_db = {kind: precision.min_sqnr_db for kind, precision in precisions.items()}
    quality = Quality(source=source, differences=found, least_db=least_db)
    # Only a kind that may be recommended is reported on; without one, the nearest.
    multiplying = [kind for kind in kinds if not PRECISION_KINDS[kind].stores_low]
    nearest = sorted(multiplying, key=lambda kind: abs(found[kind].difference))[:1]
    errors = {}
    for kind in [kind for kind in multiplying if quality.allows(kind)] or nearest:
        with progress.in_place(f"the errors of each layer in {kind} ..."):
            errors[kind] = errors_by_layer(model, precisions[kind], batches[0])
    return dataclasses.replace(quality, errors=errors)


@torch.no_grad()
def differences(
    model: models.Backbone,
    kinds: Mapping[str, PrecisionConfig],
    batches: Iterable[Batch],
    *,
    seconds: float = math.inf,
) -> tuple[dict[str, Difference], float, int]:
    """(the difference of each of `kinds`, the mean loss of `none`, the number of targets). Micro-batches and
    kinds take turns; after `seconds` no further micro-batch begins, but LEAST always run.

    model: whole on one device, its weights in compute dtype, not converted. The weights are not changed.
    kinds: by name; not `none`.
    """
    started = time.monotonic()
    # A kind that stores 8 bits leaves rounded weights behind.
    stores = any(PRECISION_KINDS[precision.kind].stores_low for precision in kinds.values())
    before = {name: each.clone() for name, each in model.named_parameters()} if stores else {}
    none, targets = list[float](), list[int]()
    sums = {name: list[float]() for name in kinds}
    for number, batch in enumerate(batches):
        if number >= LEAST and time.monotonic() - started > seconds:
            break
        none.append(_loss(model, batch))
        for name, precision in kinds.items():
            told = progress.in_place(f"the loss of micro-batch {number + 1} in {name} ...")
            with told, _converted(model, precision, batch):
                sums[name].append(_loss(model, batch))
            if PRECISION_KINDS[precision.kind].stores_low:
                for parameter_name, values in before.items():
                    model.get_parameter(parameter_name).copy_(values)
        targets.append(batch.num_targets)
    found = {name: _difference(of_kind, none, targets) for name, of_kind in sums.items()}
    return found, sum(none) / max(1, sum(targets)), sum(targets)


def errors_by_layer(
    model: models.Backbone, precision: PrecisionConfig, batch: Batch
) -> dict[str, LayerErrors]:
    """The errors of each layer's three GEMMs in one micro-batch, by its name. model: see `differences`."""
    model.requires_grad_(True)
    try:
        with _converted(model, precision, batch) as low:
            errors = ShadowPass(model, low.plan)
            with low.outside_of_steps(0, 0), errors.comparing():
                loss = _forward(model, batch)
                errors.backward(loss / max(1, batch.num_targets))
            return errors.by_layer()
    finally:
        model.requires_grad_(False)


@contextmanager
def _converted(
    model: models.Backbone, precision: PrecisionConfig, batch: Batch
) -> Iterator[linear.LowPrecision]:
    """Within it, the layers of `model` run in `precision`. int8_weight_only leaves rounded weights behind."""
    precision = dataclasses.replace(precision, verify=False)
    device = next(model.parameters()).device
    plan = linear.convert(model, precision, device=device, num_tokens=batch.tokens_BS.numel())
    try:
        yield linear.LowPrecision(model, plan, verify=False)
    finally:
        linear.unconvert(model)


def _loss(model: models.Backbone, batch: Batch) -> float:
    return _forward(model, batch).item()


def _forward(model: models.Backbone, batch: Batch) -> torch.Tensor:
    batch = batch.to(next(model.parameters()).device)
    return model.summed_loss(batch.tokens_BS, models.DocumentBounds.of(batch), batch.labels_BS)


def _difference(low: Sequence[float], none: Sequence[float], targets: Sequence[int]) -> Difference:
    """low, none, targets: the summed losses and the number of targets of each micro-batch."""
    total, count = max(1, sum(targets)), len(targets)
    mean_none = sum(none) / total
    more = [of_kind - of_none for of_kind, of_none in zip(low, none, strict=True)]
    mean = sum(more) / total
    rest = sum((d - mean * n) ** 2 for d, n in zip(more, targets, strict=True))
    error = math.sqrt(count / (count - 1) * rest) / total if count > 1 else math.nan
    if mean_none == 0:  # no targets, or nothing left to learn: no share of it says anything
        return Difference(0.0 if mean == 0 else math.inf, math.nan)
    return Difference(mean / mean_none, error / mean_none)
