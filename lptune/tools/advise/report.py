"""The advice as text, at most 80 columns wide."""

from collections.abc import Sequence
from dataclasses import dataclass

from lptune.base.text import duration_text, table, with_addresses, wrapped
from lptune.config import PRECISION_KINDS
from lptune.hardware.devices import Device
from lptune.plan.from_counts import predictable
from lptune.tools.advise.from_times import WORTH, Advice, parts_of
from lptune.tools.advise.measure import Group, Measured
from lptune.tools.advise.quality import PUBLISHED, Quality

_PER_TABLE = 4
"""Groups beside each other."""
_WORST_LAYERS = 8
"""Layers with large errors that are named."""
_NOT_HERE = "memory, and the exchange between ranks, which takes time beside this: lptune plan"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the advice is for."""

    config: str
    model: str
    device: str
    tokens: int
    """Of a micro-batch."""
    num_micro_batches: int
    """Per rank and step."""
    num_ranks: int
    quality: Quality = PUBLISHED


def timed_report(
    advice: Advice, measured: Measured, setting: Setting, emulated: Sequence[str], notes: Sequence[str]
) -> list[str]:
    """Lines for what was timed here. emulated: the kinds without native GEMMs here. notes: come last."""
    lines = _heading(setting)
    spent = f"timed here in {duration_text(measured.duration_s)}"
    if measured.timed_tokens < measured.tokens:
        spent += f", with {measured.timed_tokens:,} tokens, scaled up to {measured.tokens:,}"
    lines += _wrapped(spent)
    lines += ["", *_ranking(advice, setting, "step"), ""]
    shares = parts_of(measured, setting.num_micro_batches, setting.num_ranks)
    each = ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares.items())
    lines += [*_wrapped(f"a step of none: {each}", 2), ""]
    for first in range(0, len(measured.groups), _PER_TABLE):
        lines += [*_by_group(advice, measured, measured.groups[first : first + _PER_TABLE]), ""]
    left = {group.label for group in measured.groups} - {group.label for group, _ in measured.pairs}
    if left:
        lines += _wrapped(
            f"not timed in the given time: {', '.join(sorted(left))}; taken to gain as much as the other "
            "layers. The same command again finds compiled code in a cache and times more; or raise --seconds"
        )
    lines += _quality(advice, setting)
    if emulated:
        lines += _wrapped(
            f"not advised, this device has no GEMMs for them and would only emulate them: "
            f"{', '.join(emulated)}",
            2,
        )
    lines += [*_wrapped(_NOT_HERE), "", *_verdict(advice, setting)]
    return [*lines, *(line for note in notes for line in _wrapped(f"note: {note}", 2))]


def predicted_report(
    advice: Advice, ranges: dict[str, tuple[float, float]], setting: Setting, device: Device
) -> list[str]:
    """Lines for a GPU that is not here. ranges: kind -> (cautious, hopeful) speed-up over `none`."""
    lines = _heading(setting)
    lines += _wrapped(
        "predicted, not measured: bytes and FLOPs of a step, without recomputation, at rates of a 3B step on "
        "one H100 (docs/gpu.md), without time in which the GPU waits. Unknown error on other GPUs"
    )
    lines += ["", *_ranking(advice, setting, "predicted"), ""]
    for kind, (cautious, hopeful) in ranges.items():
        if f"{cautious:.2f}" != f"{hopeful:.2f}":
            lines += _wrapped(f"{kind}: {cautious:.2f}x to {hopeful:.2f}x, by the GEMM (docs/gpu.md)", 2)
    known = predictable(device)
    left = [kind for kind in PRECISION_KINDS if kind not in known]
    lines += _wrapped(f"no prediction for {', '.join(left)}", 2)
    lines += _quality(advice, setting)
    return [*lines, *_wrapped(_NOT_HERE), "", *_verdict(advice, setting)]


def _heading(setting: Setting) -> list[str]:
    ranks = "" if setting.num_ranks == 1 else f" of each of {setting.num_ranks} ranks"
    number = f"{setting.num_micro_batches} micro-batches"
    steps = f"a step{ranks} is {number if setting.num_micro_batches > 1 else 'one micro-batch'}"
    return [
        *_wrapped(f"advice for {setting.config} ({setting.model}) on {setting.device}"),
        *_wrapped(f"{steps} of {setting.tokens:,} tokens"),
    ]


def _ranking(advice: Advice, setting: Setting, what: str) -> list[str]:
    rows = [("kind", what, "speed", "linear", "loss at step 0")]
    for each in advice.candidates:
        found = setting.quality.differences.get(each.kind)
        rows.append(
            (
                each.kind,
                _seconds(each.step_s),
                f"{each.speedup:.2f}x",
                f"{each.linear_speedup:.2f}x" if each.linear_speedup else "",
                "reference" if found is None else str(found),
            )
        )
    return table(rows, "<>", rule=True)


def _by_group(advice: Advice, measured: Measured, groups: Sequence[Group]) -> list[str]:
    none_ms = {
        group: 1e3 * min(pair.none.pass_s for (each, _), pair in measured.pairs.items() if each == group)
        for group in {group for group, _ in measured.pairs}
    }
    rows = [
        ("linear layers", *(group.label for group in groups)),
        ("in", *(f"{group.shapes[0].in_features}" for group in groups)),
        ("out", *(group.out_text for group in groups)),
        ("none, ms", *(f"{none_ms[group]:.1f}" if group in none_ms else "-" for group in groups)),
    ]
    for each in advice.candidates:
        if each.by_group is not None:
            cells = (each.by_group.get(group.label) for group in groups)
            rows.append((each.kind, *("-" if cell is None else f"{cell:.2f}x" for cell in cells)))
    return table(rows, "<>", rule=True)


def _quality(advice: Advice, setting: Setting) -> list[str]:
    """Where the differences come from, and the layers that lose most in the chosen kind; if that is `none`,
    in the kind that is nearest to it.
    """
    quality = setting.quality
    lines = _wrapped(f"loss at step 0: the difference from none, {quality.source}", 2)
    if not quality.errors:
        return lines
    nearest = min(quality.errors, key=lambda kind: abs(quality.differences[kind].difference))
    kind = advice.chosen.kind if advice.chosen.kind in quality.errors else nearest
    least_db = quality.least_db[kind]
    worst = sorted(quality.errors[kind].items(), key=lambda each: each[1].worst_sqnr_db)
    bad = [(name, errors) for name, errors in worst if errors.worst_sqnr_db < least_db]
    if not bad:
        name, errors = worst[0]
        lowest = f"the lowest is {errors.worst_sqnr_db:.1f} dB, {errors.worst_gemm} of {name}"
        return [*lines, *_wrapped(f"{kind}: no GEMM is below {least_db:g} dB; {lowest}", 2)]
    gemms = sorted({errors.worst_gemm for _, errors in bad})
    only_backward = "" if "output" in gemms else f", or precision.{gemms[0]}=high that GEMM of all layers"
    lines += _wrapped(
        f"{kind}: {len(bad)} of {len(worst)} layers have a GEMM below {least_db:g} dB; precision.skip leaves "
        f"them in high precision{only_backward}:",
        2,
    )
    for name, errors in bad[:_WORST_LAYERS]:
        lines.append(f"    {errors.worst_sqnr_db:6.1f} dB  {errors.worst_gemm:11}  {name}")
    return [*lines, *([f"    and {len(bad) - _WORST_LAYERS} more"] if bad[_WORST_LAYERS:] else [])]


def _verdict(advice: Advice, setting: Setting) -> list[str]:
    chosen = advice.chosen
    if not advice.pays:
        lines = _wrapped(f"advice: precision.kind=none: {advice.reason} ({_pays(setting)})")
    else:
        lines = _wrapped(f"advice: precision.kind={chosen.kind}, {advice.reason}")
    return lines


def _pays(setting: Setting) -> str:
    limit = f", up to {100 * setting.quality.limit:g} %" if setting.quality.is_measured else ""
    return f"it pays from {WORTH:.2f}x on{limit}"


def _wrapped(text: str, hang: int = 0) -> list[str]:
    return wrapped(with_addresses(text), hang=hang)


def _seconds(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
