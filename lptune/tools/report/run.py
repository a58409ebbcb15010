"""A run's folder as a report sees it: what the run is, how far it came, and what it wrote.

Nothing but the files is asked, so that a run on another machine can be read through a shared disk. Whether
it goes on is known from the lock on OUTPUT_DIR/.lock, which a living run holds.

The files may be anybody's, and a report must come out of whatever is there: a run that is being written, one
that was killed, a folder that somebody sent. So a file that cannot be used is no error here but a line of
text that says why, among the notes of the page. No link in a run's folder is followed, or a stranger's
folder could show a private file on a page that is meant to be passed on. A pipe is not waited for, and
nothing is read beyond a limit.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from lptune.base import files
from lptune.base.errors import UserError
from lptune.base.files import MAX_BYTES, Lock, kind_of, object_of, read_bytes
from lptune.base.step_folders import list_checkpoints
from lptune.base.text import group_name, number_of, without_number
from lptune.tools.report.rows import LARGEST, MAX_STEP, Rows, read_rows

_T = TypeVar("_T")


def _read(path: Path, read: Callable[[Path], _T], notes: list[str]) -> _T | None:
    """`read(path)`; None without such a file, and, with a note that says why, where it cannot be used."""
    if not kind_of(path):
        return None
    try:
        return read(path)
    except UserError as error:
        why = str(error).removeprefix(f"{path}: ").partition(";")[0]
    except OSError as error:
        why = error.strerror or str(error)
    notes.append(f"{path.name}: {why}")
    return None


def _object(path: Path) -> dict[str, Any]:
    return files.read_object(path, follow=False)


def _objects(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The JSON objects in `path`, one a line; other lines are counted in a note."""
    content = _read(path, lambda path: read_bytes(path, MAX_BYTES, follow=False), notes) or b""
    found = list[dict[str, Any]]()
    num_bad = 0
    for line in content.splitlines(keepends=True):
        if (row := object_of(line)) is not None:
            found.append(row)
        elif line.endswith(b"\n"):  # else it is being written, or was when the run was killed
            num_bad += bool(line.strip())
    if num_bad:
        notes.append(f"{path.name}: lines that were left out, being no JSON objects: {num_bad:,}")
    return found


COLUMNS = ("layer", "out × in", "output", "grad_input", "grad_weight", "all-gather", "note")
"""The columns of the table of a plan."""
_GEMMS = ("output", "grad_input", "grad_weight", "all_gather")


class Plan(NamedTuple):
    """The precision of every linear layer of a run."""

    kind: str = ""
    layers: tuple[tuple[str, ...], ...] = ()
    """For each layer, in module order, the cells of COLUMNS."""
    num_converted: int = 0

    def rows(self) -> list[tuple[str, ...]]:
        """The cells of COLUMNS; layers that differ in one number of their names alone share a row."""
        groups = dict[tuple[str, ...], list[str]]()
        for name, *cells in self.layers:
            groups.setdefault((without_number(name), *cells), []).append(name)
        return [(group_name(names), *key[1:]) for key, names in groups.items()]


def _plan(path: Path) -> Plan:
    """The plan in precision_plan.json."""
    content = _object(path)
    layers = content.get("layers")
    if not isinstance(layers, list):
        raise UserError(f"{path}: has no list of layers")
    rows = [row for row in layers if isinstance(row, dict)]
    num_converted = sum(bool(row.get("spec")) for row in rows)
    return Plan(str(content.get("kind", ""))[:80], tuple(map(_cells, rows)), num_converted)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    shape = row.get("shape")
    sizes = [str(size)[:20] for size in shape[:2]] if isinstance(shape, list) else []
    gemms = [str(row.get(name, ""))[:80] for name in _GEMMS]
    reason = row.get("reason") or ("emulated" if _is_emulated(row) else "")
    return (str(row.get("name", ""))[:200], " × ".join(sizes), *gemms, str(reason)[:200])


def _is_emulated(row: dict[str, Any]) -> bool:
    spec = row.get("spec")
    return isinstance(spec, dict) and spec.get("emulate") is True


MEASURES = {
    "gradient_sqnr_db": "gradient SQNR (dB)",
    "gradient_cosine": "gradient cosine",
    "output_sqnr_db": "output SQNR (dB)",
    "saturated": "saturated",
    "underflowed": "underflowed",
}
"""Key of a layer -> heading. Of the first three a small value is bad, of the others a large one."""
LARGE_IS_BAD = ("saturated", "underflowed")


class Check(NamedTuple):
    """One check, after the step `step`."""

    step: int
    loss: float | None
    shadow_loss: float | None
    layers: Mapping[str, Mapping[str, float]]
    """Name of a layer -> measure -> value."""


class Group(NamedTuple):
    """The layers that differ in the number of their block alone."""

    name: str
    """With `#` for the number."""
    worst: Mapping[str, tuple[float, str]]
    """Measure -> the worst value, and the number of its block."""
    sqnr_by_block: tuple[tuple[str, float], ...]
    """Number of the block, gradient_sqnr_db; in the order of the numbers."""


class Shadow(NamedTuple):
    """All checks of a run."""

    checks: tuple[Check, ...] = ()
    switched: tuple[tuple[int, str], ...] = ()
    """Step, name of a layer that was switched to high precision there."""

    def groups(self) -> list[Group]:
        """The last check, in groups of layers, the worst gradient first."""
        if not self.checks:
            return []
        members = dict[str, dict[str, Mapping[str, float]]]()
        for name, measured in self.checks[-1].layers.items():
            members.setdefault(without_number(name), {})[name] = measured
        groups = [_group(name, layers) for name, layers in members.items()]
        return sorted(groups, key=lambda group: group.worst.get("gradient_sqnr_db", (math.inf, ""))[0])


def _group(name: str, layers: Mapping[str, Mapping[str, float]]) -> Group:
    blocks = {each: str(number) if (number := number_of(each)) is not None else "" for each in layers}
    worst = dict[str, tuple[float, str]]()
    for measure in MEASURES:
        found = [
            (measured[measure], blocks[each]) for each, measured in layers.items() if measure in measured
        ]
        if found:
            choose = max if measure in LARGE_IS_BAD else min
            worst[measure] = choose(found)
    sqnr = {each: layers[each]["gradient_sqnr_db"] for each in layers if "gradient_sqnr_db" in layers[each]}
    ordered = sorted(sqnr, key=lambda each: number_of(each) or 0)
    return Group(name, worst, tuple((blocks[each], sqnr[each]) for each in ordered))


def _shadow(rows: Iterable[Mapping[str, Any]]) -> Shadow:
    """The checks in the rows of shadow.jsonl."""
    checks, switched = list[Check](), list[tuple[int, str]]()
    for row in rows:
        step, layers = row.get("step"), row.get("layers")
        if type(step) is not int or not isinstance(layers, dict):
            continue
        measured = {
            str(name)[:200]: {
                key: number for key in MEASURES if (number := _number(found.get(key))) is not None
            }
            for name, found in layers.items()
            if isinstance(found, dict)
        }
        checks.append(Check(step, _number(row.get("loss")), _number(row.get("shadow_loss")), measured))
        names = row.get("switched_to_high")
        switched += [(step, str(name)[:200]) for name in names] if isinstance(names, list) else []
    checks.sort(key=lambda check: check.step)
    return Shadow(tuple(checks), tuple(switched))


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) < LARGEST else None


_MAX_TEXT = 4_000
_MAX_CONFIG_BYTES = 256 * 1024  # as of any config
_OF_A_RUN = ("metrics.jsonl", "config.yaml", "run.json", "precision_plan.json")


class Sample(NamedTuple):
    """A prompt, and what the model answered at one step."""

    step: int
    when: str
    prompt: str
    answer: str
    reference: str


class Facts(NamedTuple):
    """What the run says of itself, as text; empty where it does not say."""

    recipe: str = ""
    model: str = ""
    precision: str = ""
    device: str = ""
    num_ranks: str = ""
    versions: str = ""
    data: str = ""
    data_digest: str = ""
    run_id: str = ""
    num_launches: str = ""


class Status(NamedTuple):
    """How far a run came."""

    word: str
    """running | finished | stopped | diverged | not started."""
    num_steps: int
    """The step at which it ends; 0: not known."""


@dataclass(frozen=True)
class Run:
    """A run as its files describe it."""

    folder: Path
    rows: Rows
    config: Mapping[str, Any]
    """Dotted key -> value."""
    config_text: str
    plan: Plan
    samples: tuple[Sample, ...]
    shadow: Shadow
    facts: Facts
    status: Status
    notes: tuple[str, ...]
    """What could not be read, a sentence each."""

    def final(self, name: str) -> float | None:
        """The last finite value of a metric."""
        values_N = self.rows[name].finite.values_N
        return float(values_N[-1]) if len(values_N) else None


def read_run(folder: Path, *, is_over: bool = False) -> Run:
    """Reads the run in `folder`. is_over: the run has ended, whatever its lock says.

    Raises UserError if the folder is not a run's, or metrics.jsonl is not of one.
    """
    if not folder.is_dir():
        raise UserError(
            f"{folder}: {'is not a folder' if kind_of(folder) else 'no such folder'}; give a run's"
        )
    if not any(kind_of(folder / name) for name in _OF_A_RUN):
        raise UserError(f"{folder}: is not a run's folder, it has none of {', '.join(_OF_A_RUN)}")
    rows = read_rows(folder / "metrics.jsonl")
    notes = [f"metrics.jsonl: {note}" for note in rows.notes]
    text = _read(folder / "config.yaml", _text_of_config, notes) or ""
    config = (_read(folder / "config.yaml", _keys_of_config, notes) if text else None) or {}
    plan = _read(folder / "precision_plan.json", _plan, notes) or Plan()
    shadow = _shadow(_objects(folder / "shadow.jsonl", notes))
    samples = _samples(_objects(folder / "samples.jsonl", notes))
    about = _read(folder / "run.json", _object, notes) or {}
    exported = _read(folder / "export.json", _object, notes) or {}
    state = newest_state(folder)
    status = _status(folder, rows, config, about, exported, state, is_over)
    if rows.is_cut and status.word != "running":  # else the run is writing it
        notes.append("metrics.jsonl: the last line is incomplete, as a kill leaves it")
    facts = _facts(config, about, state, plan)
    return Run(folder, rows, config, text, plan, samples, shadow, facts, status, tuple(notes))


def _text_of_config(path: Path) -> str:
    """Bytes that are no UTF-8 appear as escapes."""
    return read_bytes(path, _MAX_CONFIG_BYTES, follow=False).decode("utf-8", errors="backslashreplace")


def _keys_of_config(path: Path) -> dict[str, Any]:
    """Dotted key -> value. A value of the environment stays a `${…}`, as the run has written it."""
    from omegaconf import OmegaConf  # slow to import

    from lptune.config.load import read_yaml

    return flat(cast("dict[str, Any]", OmegaConf.to_container(read_yaml(path), resolve=False)))


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, with dotted keys. Lists stay as they are."""
    found = dict[str, Any]()
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def newest_state(folder: Path) -> dict[str, Any]:
    """state.json of the newest checkpoint of a run; empty if there is none that can be read."""
    with suppress(OSError):
        for path in list_checkpoints(folder / "checkpoints"):
            if content := _read(path / "state.json", _object, []):
                return content
    return {}


def is_running(folder: Path) -> bool:
    """Whether a living run holds the lock of its folder. False where the file system has no locks.

    To find out, the lock is taken for some microseconds; a run that starts in them says that another run is
    writing there, and can be started again.
    """
    try:
        # Shared, so that two reports do not take each other for a run.
        Lock(folder / ".lock", os.O_RDONLY, shared=True).close()
    except BlockingIOError:
        return True
    except (OSError, UserError):
        pass
    return False


def _status(
    folder: Path,
    rows: Rows,
    config: Mapping[str, Any],
    about: Any,
    exported: Mapping[str, Any],
    state: Mapping[str, Any],
    is_over: bool,
) -> Status:
    num_steps = _num_steps(config, about, state)
    if not is_over and is_running(folder):
        return Status("running", num_steps)
    patience = config.get("diverged_after_steps")
    patience = patience if type(patience) is int and patience > 0 else 3
    for name in ("loss", "grad_norm"):
        last_N = rows[name].values_N[-patience:]
        if len(last_N) == patience and np.isnan(last_N).all():
            return Status("diverged", num_steps)
    if rows.last_step == 0:
        return Status("stopped" if rows.num_rows else "not started", num_steps)
    is_finished = rows.last_step >= num_steps > 0 or exported.get("step") == rows.last_step
    is_finished = is_finished or _ended_early(rows, config.get("early_stop_after"))
    return Status("finished" if is_finished else "stopped", num_steps)


def _ended_early(rows: Rows, after: object) -> bool:
    """Whether the last `after` evaluations, the last of them after the last step, found no new lowest
    eval_loss, so that the run had ended. Its export may be of an earlier step (checkpoint.keep_best).
    """
    steps_N, losses_N = rows["eval_loss"]
    if type(after) is not int or after <= 0 or len(steps_N) < after or steps_N[-1] != rows.last_step:
        return False
    ordered_N = np.where(np.isnan(losses_N), np.inf, losses_N)
    best = int(ordered_N.argmin())  # the first of equal ones
    num_since = len(losses_N) - 1 - best if np.isfinite(ordered_N[best]) else len(losses_N)
    return num_since >= after


def _num_steps(config: Mapping[str, Any], about: Any, state: Mapping[str, Any]) -> int:
    """The steps that the run wants to do. A run by epochs counts them only when it starts."""
    launches = about.get("launches")
    newest = launches[-1] if isinstance(launches, list) and launches else None
    decided = state.get("config")
    for holder in (newest, config, decided):
        count = holder.get("num_steps") if isinstance(holder, Mapping) else None
        if type(count) is int and 0 < count < MAX_STEP:
            return count
    return 0


def _facts(config: Mapping[str, Any], about: Any, state: Mapping[str, Any], plan: Plan) -> Facts:
    launches = about.get("launches")
    launches = [each for each in launches if isinstance(each, dict)] if isinstance(launches, list) else []
    newest = launches[-1] if launches else {}
    of_state = state.get("about")
    versions = newest.get("versions") or {
        key: of_state[key] for key in ("lptune", "torch") if isinstance(of_state, dict) and key in of_state
    }
    fingerprint = state.get("fingerprint")
    digest = about.get("data_digest") or (fingerprint.get("data") if isinstance(fingerprint, dict) else "")
    kind = config.get("precision.kind") or plan.kind
    emulated = " (emulated)" if config.get("precision.emulate") is True and kind != "none" else ""
    source = config.get("data.source", "")
    return Facts(
        recipe=_text(about.get("recipe")),
        model=_text(config.get("model.path")),
        precision=f"{_text(kind)}{emulated}",
        device=_text(newest.get("device") or config.get("device")),
        num_ranks=_text(newest.get("num_ranks")),
        versions=", ".join(f"{_text(k)} {_text(v)}" for k, v in list(versions.items())[:10])
        if isinstance(versions, dict)
        else "",
        data=_text(source),
        data_digest=_text(digest)[:16],
        run_id=_text(about.get("id")),
        num_launches=str(len(launches)) if launches else "",
    )


def _samples(rows: Iterable[Mapping[str, Any]]) -> tuple[Sample, ...]:
    found = []
    for row in rows:
        step = row.get("step")
        texts = [_text(row.get(key), _MAX_TEXT) for key in ("when", "prompt", "answer", "reference")]
        if type(step) is int:
            found.append(Sample(step, *texts))
    return tuple(found)


def _text(value: object, max_chars: int = 200) -> str:
    return "" if value is None else value_text(value, max_chars)


def value_text(value: object, max_chars: int = 200) -> str:
    """A value of a config as JSON in one line, but text as it is; cut after `max_chars`."""
    text = (
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str, skipkeys=True)
    )
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"
