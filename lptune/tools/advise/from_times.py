"""From the times of parts to a step of each kind: the ranking, and which kind to take.

A step of `none` with M micro-batches is M passes through blocks and head, and one update. A kind changes the
linear layers of it, and nothing else:

    step(kind) = step(none) + sum over groups of  count * (M * (pass - pass_none) + update - update_none)

The work of the compute weights (a cast, or quantizing) is in the update, once in a step. Of several ranks
each updates its share. What they exchange is not in a prediction: it was not timed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lptune.tools.advise.measure import Group, Measured, Times
from lptune.tools.advise.quality import PUBLISHED, Quality

WORTH = 1.03
"""The least speed-up of a step for which a kind pays. Below it the noise of timing decides."""
SAME = 0.95
"""A kind that reaches this share of the best speed-up counts as fast, and quality decides."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """What is known about one kind, `none` included."""

    kind: str
    step_s: float
    speedup: float
    """Of a step, over `none`."""
    linear_speedup: float | None = None
    """Of all linear layers that the kind converts, with their update."""
    by_group: dict[str, float] | None = None
    """Label of a group -> speed-up of its forward and backward; the groups that were timed."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The candidates, the fastest first, and the one to take."""

    candidates: tuple[Candidate, ...]
    chosen: Candidate
    reason: str
    """Why `chosen`, as the end of a line."""

    @property
    def pays(self) -> bool:
        """Whether a kind of low precision is recommended."""
        return self.chosen.kind != "none"


def predict(measured: Measured, num_micro_batches: int, num_ranks: int = 1) -> list[Candidate]:
    """A candidate for `none` and for each kind that was timed, the fastest step first."""
    base = {group: _none(measured, group) for group in measured.groups}
    none_s = sum(_parts(measured, base, num_micro_batches, num_ranks).values())
    passes = num_micro_batches * measured.tokens / measured.timed_tokens

    def cost(group: Group, times: Times) -> float:
        return group.count * (passes * times.pass_s + times.update_s / num_ranks)

    linear_s = sum(cost(group, base[group]) for group in measured.groups)
    candidates = [Candidate(kind="none", step_s=none_s, speedup=1.0)]
    for kind in measured.kinds:
        if not any(each == kind for _, each in measured.pairs):
            continue
        low = {group: _low(measured, group, kind, base) for group in measured.groups}
        low_s = sum(cost(group, low[group]) for group in measured.groups)
        step_s = none_s - linear_s + low_s
        candidates.append(
            Candidate(
                kind=kind,
                step_s=step_s,
                speedup=none_s / step_s,
                linear_speedup=linear_s / low_s,
                by_group={
                    group.label: pair.none.pass_s / pair.low.pass_s
                    for group in measured.groups
                    if (pair := measured.pairs.get((group, kind))) is not None
                },
            )
        )
    return sorted(candidates, key=lambda each: each.step_s)


def parts_of(measured: Measured, num_micro_batches: int, num_ranks: int = 1) -> dict[str, float]:
    """The share of each part of a step of `none`; they add up to 1."""
    base = {group: _none(measured, group) for group in measured.groups}
    parts = _parts(measured, base, num_micro_batches, num_ranks)
    whole = sum(parts.values())
    return {name: seconds / whole for name, seconds in parts.items()}


def _parts(
    measured: Measured, base: dict[Group, Times], num_micro_batches: int, num_ranks: int
) -> dict[str, float]:
    """Seconds of each part of a step of `none`. base: the times of each group in `none`."""
    passes = num_micro_batches * measured.tokens / measured.timed_tokens
    linear_s = sum(group.count * base[group].pass_s for group in measured.groups)
    # Both are timed apart, with noise: what is left of the blocks may come out below zero.
    others_s = max(0.0, measured.blocks_s - linear_s)
    in_update = sum(base[group].update_s for group in measured.update_blocks)
    update_s = max(0.0, measured.update_s - in_update)
    update_s += sum(group.count * base[group].update_s for group in measured.groups)
    return {
        "linear layers": passes * linear_s,
        "the rest of the blocks": passes * others_s,
        "embedding, head and loss": passes * measured.head_s,
        "update": update_s / num_ranks,
    }


def advise(candidates: Iterable[Candidate], quality: Quality = PUBLISHED) -> Advice:
    """The kind to take: the fastest whose loss is within the limit of `quality`, or one that is as fast and
    has a smaller loss; `none` if none pays. If none within it pays, figures of another model refuse no kind
    that does.
    """
    ranked = sorted(candidates, key=lambda each: each.step_s)
    (none,) = [each for each in ranked if each.kind == "none"]
    low = sorted((each for each in ranked if each.kind != "none"), key=lambda each: -each.speedup)
    if not low:
        return Advice(candidates=tuple(ranked), chosen=none, reason="no other kind runs natively here")
    losses = quality.differences

    def about(each: Candidate) -> str:
        return f"{each.kind}, has {each.speedup:.2f}x of its speed and a loss of {losses[each.kind]}"

    fastest, within = low[0], [each for each in low if quality.allows(each.kind)]
    if not quality.is_measured and (not within or within[0].speedup < WORTH):
        within = low
    if fastest.speedup < WORTH or not within or within[0].speedup < WORTH:
        reason = f"the best other kind, {about(within[0] if within else fastest)}"
        return Advice(candidates=tuple(ranked), chosen=none, reason=reason)
    as_fast = [each for each in within if each.speedup >= max(WORTH, SAME * within[0].speedup)]
    chosen = min(as_fast, key=lambda each: (abs(losses[each.kind].difference), -each.speedup))
    reason = f"{chosen.speedup:.2f}x as fast as none"
    if not quality.allows(chosen.kind):
        reason += f", with a loss of {losses[chosen.kind]} on another model: --quality measures yours"
    if chosen is not fastest:
        reason += f"; the fastest, {about(fastest)}"
    return Advice(candidates=tuple(ranked), chosen=chosen, reason=reason)


def _none(measured: Measured, group: Group) -> Times:
    """The times of a group in `none`: measured, or by its number of weights from those that were."""
    found = [pair.none for (each, _), pair in measured.pairs.items() if each == group]
    if found:
        return Times(min(each.pass_s for each in found), min(each.update_s for each in found))
    known = {each for each, _ in measured.pairs}
    times = [(each.num_weights, _none(measured, each)) for each in known]
    share = group.num_weights / sum(weights for weights, _ in times)
    return Times(
        share * sum(each.pass_s for _, each in times), share * sum(each.update_s for _, each in times)
    )


def _low(measured: Measured, group: Group, kind: str, base: dict[Group, Times]) -> Times:
    """The times of a group in `kind`, by the ratios to `none` of the same rounds. Of a group that there was
    no time for: by the ratios of those that there was time for.
    """
    pair = measured.pairs.get((group, kind))
    pairs = [pair] if pair else [each for (_, name), each in measured.pairs.items() if name == kind]
    return Times(
        base[group].pass_s * _ratio(pairs, lambda times: times.pass_s),
        base[group].update_s * _ratio(pairs, lambda times: times.update_s),
    )


def _ratio(pairs: Sequence[tuple[Times, Times]], of: Callable[[Times], float]) -> float:
    return sum(of(low) for low, _ in pairs) / sum(of(none) for _, none in pairs)
