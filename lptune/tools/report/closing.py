"""The end of a run: its report, and what came of it, for the summary that the run prints.

Both are made from the files of the run alone, so a run that was continued is summed up as a whole, and a
copied recipe has them, too.
"""

from contextlib import suppress
from datetime import datetime
from pathlib import Path

from lptune.base import progress
from lptune.base.text import duration_text
from lptune.config import PRECISION_KINDS
from lptune.tools.report.page import write_page
from lptune.tools.report.run import Run, read_run
from lptune.tools.report.summary import Summary, summary


def close(folder: Path, kind: str, started: datetime) -> dict[str, str]:
    """Writes report.html into the folder of a run that has ended. Returns what came of the run, a text for
    each subject; empty, and nothing written, if the run made no step. kind: its `precision.kind`. started:
    when its last launch was.
    """
    run = read_run(folder, is_over=True)
    if not len(run.rows["loss"].steps_N):
        return {}
    write_page(folder / "report.html", [run])
    found = summary(run)
    memory = f"{found.peak_memory_gib:.2f} GiB at most on rank 0" if found.peak_memory_gib else ""
    return {
        "done": _done(found, was_continued=_is_before(run.rows.first_time, started)),
        "held-out": _held_out(run, found),
        "precision": _share(kind, found),
        "shadow": _shadow(run),
        "memory": memory,
    }


def _is_before(time: str, started: datetime) -> bool:
    """Whether the `time` of a row is before `started`; False without one."""
    with suppress(ValueError, TypeError):  # a row may be anybody's
        return datetime.fromisoformat(time) < started
    return False


def _done(found: Summary, *, was_continued: bool) -> str:
    compile_s = found.compile_time_s or 0.0
    text = f"{found.last_step:,} step{'s' * (found.last_step > 1)}"
    if found.train_time_s is not None:
        text += f" in {duration_text(found.train_time_s + compile_s)}{' of all launches' * was_continued}"
    if compile_s >= progress.WORTH_A_LINE_S:
        text += f" ({duration_text(compile_s)} of it compiling)"
    return text + (f", {found.tokens_per_s:,.0f} tokens/s" if found.tokens_per_s else "")


def _held_out(run: Run, found: Summary) -> str:
    """The held-out loss before and after, and the lowest where it was once lower."""
    steps_N, losses_N = run.rows["eval_loss"].finite
    if found.eval_loss is None:
        return ""
    before = f"loss {losses_N[0]:.4f} before training, " if steps_N[0] == 0 and len(steps_N) > 1 else "loss "
    text = f"{before}{found.eval_loss:.4f} after step {steps_N[-1]}"
    best = int(losses_N.argmin())
    if losses_N[best] < found.eval_loss:
        text += f"; {losses_N[best]:.4f} at step {steps_N[best]}"
    return text


def _share(kind: str, found: Summary) -> str:
    if kind == "none" or found.low_fraction is None:
        return ""
    bits = 4 if kind in PRECISION_KINDS and "e2m1" in PRECISION_KINDS[kind].grad_formats else 8
    return f"{kind} ran {found.low_fraction:.0%} of the FLOPs of the linear layers in {bits} bits"


def _shadow(run: Run) -> str:
    """What the shadow checks found."""
    checks = run.shadow.checks
    if not checks:
        return ""
    text = f"{len(checks)} check{'s' * (len(checks) > 1)}"
    _, found = run.rows["shadow_worst_sqnr_db"].finite
    if len(found):
        text += f", lowest SQNR {found.min():.1f} dB"
    if switched := [name for _, name in run.shadow.switched]:
        text += f"; fell back to high precision: {', '.join(switched)}"
    return text
