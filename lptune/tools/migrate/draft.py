"""What a migration collects, the walk that takes each key of a file to its rule, and what several tools
share.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lptune.base.errors import UserError, closest

NOT_NEEDED = "not needed here"
NOT_OFFERED = "not offered"
BY_DESIGN = "different by design"
OFF = "off or empty in the file"
UNKNOWN = "not known to this command"
REASONS = (NOT_NEEDED, BY_DESIGN, NOT_OFFERED, OFF, UNKNOWN)
"""Why a key has no equivalent, in the order of the report."""


@dataclass(frozen=True)
class Setting:
    """A key of ours with its value."""

    ours: str
    value: Any
    theirs: tuple[str, ...]
    """The keys it comes from; empty: a default of the other tool, which its file does not name."""
    note: str = ""
    """What differs. Empty: the meaning is the same."""


@dataclass(frozen=True)
class Dropped:
    """A key of theirs, or a section of them, without an equivalent."""

    theirs: str
    why: str
    text: str
    num_keys: int


@dataclass
class Draft:
    """The new config and the account of every old key.

    values: the old config as nested dicts of plain values, interpolations resolved. num_ranks: on which the
    old config ran. num_steps: optimizer steps of the old run, if the user knows them. command: of the tool,
    where the file is a command line.
    """

    tool: str
    file: Path
    values: dict[str, Any]
    num_ranks: int = 1
    num_steps: int | None = None
    command: str = ""
    recipe: str = "full_finetune"
    settings: list[Setting] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    to_fill: list[tuple[str, str]] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)

    # ---- what rules say

    def set(self, ours: str, value: Any, *theirs: str, note: str = "") -> None:
        """Key `ours` gets `value`, which comes from the keys `theirs`. The last call for a key holds."""
        known = next((each for each in self.settings if each.ours == ours), None)
        if known is not None:
            self.settings.remove(known)
            theirs = tuple(dict.fromkeys((*known.theirs, *theirs)))
        self.settings.append(Setting(ours, value, theirs, note))

    def drop(self, theirs: str, why: str, text: str = "") -> None:
        """Key or section `theirs` has no equivalent, because of `why`, one of `REASONS`."""
        self.dropped.append(Dropped(theirs, why, text, len(leaves(self.get(theirs), theirs)) or 1))

    def drop_given(self, why: str, text: str, *theirs: str) -> None:
        """`drop` for those of the keys that the old file has."""
        for key in self.given(*theirs):
            self.drop(key, why, text)

    def ask(self, ours: str, text: str) -> None:
        """The user must set `ours`."""
        if (ours, text) not in self.to_fill:
            self.to_fill.append((ours, text))

    def value_of(self, ours: str, default: Any = None) -> Any:
        """The value that `ours` has so far."""
        return next((each.value for each in self.settings if each.ours == ours), default)

    # ---- what the old file says

    def get(self, theirs: str, default: Any = None) -> Any:
        """The value of a dotted key of the old file; `default` if it is missing or null."""
        value: Any = self.values
        for name in theirs.split("."):
            if not isinstance(value, Mapping) or value.get(name) is None:
                return default
            value = value[name]
        return value

    def section(self, theirs: str) -> dict[str, Any]:
        """The keys below `theirs`; empty if there are none. Raises UserError for a single value."""
        value = self.get(theirs, {})
        if not isinstance(value, Mapping):
            raise self.error(theirs, f"must be a section of keys, found {value!r:.60}")
        return dict(value)

    def names(self, theirs: str) -> list[str]:
        """The list under `theirs`, or the parts of a text with commas."""
        value = self.get(theirs, [])
        if isinstance(value, str):
            return [part.strip() for part in value.split(",")]
        if not isinstance(value, list):
            raise self.error(theirs, f"must be a list of names, found {value!r:.60}")
        return [str(each) for each in value]

    def given(self, *theirs: str) -> list[str]:
        """Those of the keys that the old file has."""
        return [key for key in theirs if self.get(key) is not None]

    def integer(self, theirs: str, default: int, minimum: int = 1) -> int:
        """The integer under `theirs`. Raises UserError for any other value."""
        number = self.number(theirs, default)
        if number != int(number) or number < minimum:
            raise self.error(theirs, f"must be an integer of at least {minimum}, found {number}")
        return int(number)

    def number(self, theirs: str, default: float) -> float:
        """The number under `theirs`; text such as 2e-5, which YAML 1.1 does not take for one, included."""
        value = self.get(theirs, default)
        try:
            if isinstance(value, bool):
                raise ValueError
            number = float(value)
        except (TypeError, ValueError):
            raise self.error(theirs, f"must be a number, found {value!r:.60}") from None
        if not abs(number) < float("inf"):
            raise self.error(theirs, f"must be a finite number, found {value!r:.60}")
        return number

    def error(self, theirs: str, what: str) -> UserError:
        """One line that names the file and the key."""
        return UserError(f"{self.file}: {theirs}: {what}")


Rule = Callable[[Draft, str, Any], None]
Rules = Mapping[str, Rule]


def walk(draft: Draft, rules: Rules, means_something_empty: Sequence[str] = ()) -> None:
    """Takes each key of `draft.values` to its rule. A rule for a section takes all keys below.

    means_something_empty: keys for which null is a value.
    """
    _walk(draft, rules, frozenset(means_something_empty), draft.values, "")


def _walk(
    draft: Draft, rules: Rules, nullable: frozenset[str], section: Mapping[str, Any], prefix: str
) -> None:
    for name, value in section.items():
        key = f"{prefix}{name}"
        if value in (None, {}, []) and key not in nullable:
            draft.drop(key, OFF)
        elif key in rules:
            rules[key](draft, key, value)
        elif isinstance(value, Mapping):
            _walk(draft, rules, nullable, value, f"{key}.")
        else:
            draft.drop(key, UNKNOWN, closest(key, rules).strip(" ()"))


def leaves(value: Any, prefix: str = "") -> list[str]:
    """The dotted keys of all leaves below `value`; a list of mappings counts each of their keys."""
    if isinstance(value, Mapping) and value:
        return [key for name, each in value.items() for key in leaves(each, f"{prefix}.{name}".lstrip("."))]
    if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
        return [key for i, each in enumerate(value) for key in leaves(each, f"{prefix}[{i}]")]
    return [prefix] if prefix else []


# ---- rules that several tables use


def each(names: str, rule: Rule) -> dict[str, Rule]:
    """`rule` for each of the names, which spaces separate; `{a,b}`, once in a name, stands for a and b."""
    found: dict[str, Rule] = {}
    for name in names.split():
        before, brace, rest = name.partition("{")
        inner, _, after = rest.partition("}")
        assert "{" not in after, name
        found |= {f"{before}{part}{after}": rule for part in inner.split(",")} if brace else {name: rule}
    return found


def to(ours: str, note: str = "", read: Callable[[Draft, str], Any] = Draft.get) -> Rule:
    """The value under the key `ours`. read: gives it, or raises UserError for a wrong one."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        draft.set(ours, read(draft, key), key, note=note)

    return rule


def number_to(ours: str, note: str = "") -> Rule:
    """As `to`, for a number."""
    return to(ours, note, lambda draft, key: draft.number(key, 0.0))


def integer_to(ours: str, note: str = "", minimum: int = 1) -> Rule:
    """As `to`, for an integer."""
    return to(ours, note, lambda draft, key: draft.integer(key, 1, minimum))


def choice(ours: str, choices: Mapping[str, tuple[str, str]]) -> Rule:
    """A value of a table: theirs, in lower case -> (ours, what differs). Another value is to fill in."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        found = choices.get(str(value).lower())
        if found is not None:
            draft.set(ours, found[0], key, note=found[1])
        else:
            draft.drop(key, NOT_OFFERED, f"{value}")
            draft.ask(ours, f"{key}: {value} is not offered")

    return rule


def drop(why: str, text: str = "") -> Rule:
    """No equivalent, because of `why`, one of `REASONS`."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        draft.drop(key, why, text)

    return rule


def _is_off(value: Any) -> bool:
    return value in (False, 0, "", "none", "None", "disabled")


def if_on(why: str, text: str = "") -> Rule:
    """No equivalent; where it is switched off, it is listed as such."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        draft.drop(key, OFF if _is_off(value) else why, "" if _is_off(value) else text)

    return rule


def switch_on(ours: str, note: str = "") -> Rule:
    """Sets `ours` to true; where it is switched off, as by default, it is listed as such."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        if _is_off(value):
            draft.drop(key, OFF)
        else:
            draft.set(ours, True, key, note=note)

    return rule


def later(draft: Draft, key: str, value: Any) -> None:
    """Decided with other keys, when all have been seen."""


def int4_weights(draft: Draft, key: str, value: Any) -> None:
    """Quantization-aware training of weights in 4 bits."""
    note = "scales for 32 columns of a row; every layer from the first step on, but those of precision.skip"
    draft.set("precision.kind", "int4_weight", key, note=note)
    draft.set("export.quantized", "int4", key, note="and `lptune export --quantized none` in high precision")


def refuse(draft: Draft, what: str, instead: str) -> UserError:
    """The one line for a config of another kind of training."""
    return UserError(f"{draft.file}: {what}; lptune trains all weights of a text decoder{instead}")


ADAM = "Adam adds the decay to the gradient; AdamW does not"
DECAY = "here on matrices only, not on norms and biases"
MASTER = (
    "pure bf16 there; here weights, gradients and moments are float32 (16 bytes per parameter, not 8) and "
    "matmuls bf16, so that small updates are not lost (optimizer.master=none: bf16, rounded stochastically)"
)
PROMPTS = (
    "the text around a prompt is the tokenizer's chat template (or data.chat_template, "
    "data.prompt_template); look at rows with `lptune data`"
)
WARMUP = "the first step has lr / warmup_steps, and 0 there"
OTHER_BITS = "moments of 4 bits or float8 there; here codes of 8 bits with a scale for each 128 elements"
IN_BACKWARD = "a step is one micro-batch on each rank; max_grad_norm clips by the norm of the step before"
PAGED = "paged to host memory there; here moments stay on the GPU (optimizer.cpu_offload=true moves them)"


def set_accumulated(draft: Draft, micro: str, default: int, model_ranks: int = 1) -> None:
    """`set_batches` from gradient_accumulation_steps. micro: the key of rows per forward; without it they are
    `default`.
    """
    accumulated = "gradient_accumulation_steps"
    size, steps = draft.integer(micro, default), draft.integer(accumulated, 1)
    set_batches(
        draft, (size, draft.given(micro)), (None, draft.given(micro, accumulated)), model_ranks, steps
    )


def set_batches(
    draft: Draft,
    micro: tuple[int, list[str]],
    whole: tuple[int | None, list[str]],
    model_ranks: int,
    steps: int = 1,
) -> None:
    """micro_batch_size and global_batch_size, for `draft.num_ranks` ranks.

    micro: rows per forward, and the keys that say so. whole: rows per step, None where they follow from the
    number of ranks, and their keys. model_ranks: ranks that share a row (tensor, context and pipeline
    parallelism). steps: of accumulation.
    """
    size, keys = micro
    total, total_keys = whole
    if draft.num_ranks % model_ranks:
        raise UserError(
            f"{draft.file}: {draft.num_ranks} ranks (--world-size) do not divide among {model_ranks} that "
            "share a model; give the number of ranks that the config ran on"
        )
    if total is None:
        data_ranks = draft.num_ranks // model_ranks
        total = size * steps * data_ranks
        draft.assumed.append(
            f"{draft.num_ranks} rank{'s' * (draft.num_ranks > 1)} (--world-size)"
            f"{f', {model_ranks} for each row' * (model_ranks > 1)}: a step has {size} x {steps} x "
            f"{data_ranks} = {total} rows. Here global_batch_size does not change with the number of ranks."
        )
    if total % size:
        raise UserError(f"{draft.file}: {total} rows per step are no multiple of {size} rows per forward")
    draft.set("micro_batch_size", size, *keys)
    draft.set("global_batch_size", total, *total_keys)
    if all(draft.value_of(key, 1) > 1 for key in ("parallel.tensor", "parallel.context")):
        draft.ask("parallel.context", "lptune has it or parallel.tensor, not both: set one of the two to 1")


def set_defaults(draft: Draft, defaults: Mapping[str, object]) -> None:
    """Writes out what the other tool takes for keys that its file does not name, where ours differs."""
    for ours, value in defaults.items():
        if draft.value_of(ours) is None:
            draft.set(ours, value)
