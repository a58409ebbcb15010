"""The answer to "which kind here?": timed on this device, or predicted for a GPU that is not here."""

import dataclasses
from collections.abc import Sequence

import torch

from lptune import distributed, linear, models
from lptune.base import progress
from lptune.base.errors import UserError
from lptune.config import PRECISION_KINDS, ParallelConfig, RunConfig
from lptune.distributed import World
from lptune.hardware.devices import Device
from lptune.kernels import emulated_bfloat16
from lptune.plan import from_counts
from lptune.tools.advise import from_times, measure, quality, report
from lptune.tools.advise.report import Setting
from lptune.training import PlannedStep

SECONDS = {"cpu": 60.0, "cuda": 180.0}
"""By type of device. A GPU's kernels are also tuned."""


def timed(
    cfg: RunConfig,
    step: PlannedStep,
    model_config: models.Facts,
    setting: Setting,
    kinds: tuple[str, ...],
    seconds: float | None,
    measures_quality: bool,
) -> list[str]:
    """The report of the advice, from times that are taken here.

    step: what the recipe plans; a frozen model in it is left out. kinds: those to compare with `none`; empty
    means all that run natively. seconds: after them nothing new is timed; None: SECONDS. measures_quality:
    reads the model and the data of `cfg`, for as many seconds again. Raises UserError for a kind that is not
    native here, and as `measure` does.
    """
    with distributed.session(cfg.device, ParallelConfig(), cfg.seed) as world:
        native = [kind for kind in linear.native_kinds(world.device) if kind != "none"]
        for kind in kinds:
            if kind not in native:
                raise UserError(
                    f"--kind: {setting.device} has no GEMMs for {kind} and would only emulate it; it runs "
                    f"{', '.join(native)}"
                )
        chosen = kinds or tuple(kind for kind in native if not PRECISION_KINDS[kind].for_servers)
        limit_s = seconds or SECONDS[world.device.type]
        if measures_quality:
            setting = _with_quality(cfg, setting, chosen, limit_s, world)
        progress.print_line(f"timing {_together(chosen)} beside none, for about {limit_s:.0f} s ...")
        try:
            measured = measure.measure(cfg, model_config, chosen, limit_s, world, step)
        except torch.OutOfMemoryError:
            raise UserError(
                f"advise: {setting.tokens:,} tokens in a micro-batch do not fit the memory here; lower "
                "micro_batch_size, or name the GPU of the run with --device for a prediction"
            ) from None
    candidates = from_times.predict(measured, setting.num_micro_batches, setting.num_ranks)
    advice = from_times.advise(candidates, setting.quality)
    emulated = [kind for kind in PRECISION_KINDS if kind != "none" and kind not in native]
    notes = emulated_bfloat16(cfg.compute_dtype, world.device)
    return report.timed_report(advice, measured, setting, emulated, notes)


def predicted_for(
    cfg: RunConfig,
    model_config: models.Facts,
    setting: Setting,
    device: Device,
    kinds: tuple[str, ...],
    seconds: float | None,
    measures_quality: bool,
) -> list[str]:
    """The report of the advice for a GPU that is not here: predicted, not measured. The quality does not
    depend on the GPU and can be measured here, as in `timed`. Raises UserError for a kind of which there is
    no prediction.
    """
    known = from_counts.predictable(device)
    for kind in kinds:
        if kind not in known:
            raise UserError(
                f"--kind: there is no prediction of {kind} for {device.name}; there is one for "
                f"{', '.join(known[1:])}"
            )
    if measures_quality:
        with distributed.session(cfg.device, ParallelConfig(), cfg.seed) as world:
            limit_s = seconds or SECONDS[world.device.type]
            setting = _with_quality(cfg, setting, kinds or tuple(known[1:]), limit_s, world)
    candidates, ranges = [], {}
    none, none_linear_ms = (0.0, 0.0), 0.0
    for kind in ["none", *(kinds or known[1:])]:
        with progress.in_place(f"predicting {kind} ..."):
            found = from_counts.parts(
                kind,
                model_config,
                setting.tokens,
                cfg.data.seq_len,
                device,
                num_micro_batches=setting.num_micro_batches,
                num_ranks=setting.num_ranks,
                optimizer=cfg.optimizer,
            )
        ms, linear_ms = from_counts.total(found), from_counts.linear_ms(found)
        if kind == "none":
            none, none_linear_ms = ms, linear_ms
        ranges[kind] = (none[0] / ms[0], none[1] / ms[1])
        candidates.append(
            from_times.Candidate(
                kind=kind,
                step_s=1e-3 * ms[0],
                speedup=none[0] / ms[0],
                linear_speedup=none_linear_ms / linear_ms if kind != "none" else None,
            )
        )
    advice = from_times.advise(candidates, setting.quality)
    return report.predicted_report(advice, ranges, setting, device)


def _together(kinds: Sequence[str]) -> str:
    return kinds[0] if len(kinds) == 1 else f"{len(kinds)} kinds"


def _with_quality(
    cfg: RunConfig, setting: Setting, kinds: Sequence[str], seconds: float, world: World
) -> Setting:
    """`setting` with the quality of `kinds` on the model and the data of `cfg`."""
    progress.print_line(f"measuring the loss in {_together(kinds)}, for about {seconds:.0f} s ...")
    try:
        return dataclasses.replace(setting, quality=quality.measure(cfg, kinds, seconds, world))
    except torch.OutOfMemoryError:
        raise UserError(
            "advise: --quality: the whole model and a row of data.seq_len tokens do not fit the memory here; "
            "lower data.seq_len, or measure on a machine with more"
        ) from None
