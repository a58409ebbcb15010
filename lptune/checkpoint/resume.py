"""Resuming: finds the checkpoint that a run continues, and checks that model, data and seed are the same."""

import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lptune.base.errors import UserError
from lptune.base.model_folder import read_stop_ids
from lptune.base.step_folders import list_checkpoints, step_folder_name, step_of
from lptune.checkpoint import parts
from lptune.checkpoint.card import run_parts
from lptune.checkpoint.files import sha256
from lptune.checkpoint.hosts import check_same
from lptune.checkpoint.manifest import Manifest, verify
from lptune.checkpoint.state import RunState, about_run, base_digests
from lptune.config import (
    OPTIMIZER_KINDS,
    PRECISION_KINDS,
    FinetuneConfig,
    RunConfig,
    default,
    key_paths,
    to_dict,
)
from lptune.distributed import SideGroup, World, side_group
from lptune.linear import Plan

_MEANING = {
    "weights": " (a digest of the safetensors in model.path)",
    "data": " (a digest of the training rows, which data.* decides and the files that it names)",
    "config.json": " (a digest of that file in model.path)",
    "tokenizer.json": " (a digest of that file in model.path)",
}
"""Explanations of values in a fingerprint, for messages."""

_TEMPLATE = "the text of data.chat_template"

_WITHOUT_EFFECT = re.compile(
    r"(output_dir|resume|num_epochs|num_tokens|precision\.(verify|shadow_\w+)|model\.path|(checkpoint|export|logging)\.\w+"
    r"|parallel\.reshard_after_forward|data\.(?!eval_s)\w+)"
)
"""Keys that do not change the weights and metrics of a run, and keys that are compared in another way: the
model and the training rows by digests, the export by export.json, num_epochs and num_tokens by the number of
steps."""


def find_checkpoint(folder: Path, resume: str, world: World, warn: Callable[[str], None]) -> Manifest | None:
    """Finds and verifies the checkpoint to continue from: the path `resume`, or with `auto` the newest intact
    checkpoint in `folder`. None: the run starts from the base checkpoint. A collective.

    Damaged checkpoints are never deleted. warn: gets a line for each damaged checkpoint that is skipped, and
    a line if a folder named after another precision.kind has checkpoints. Raises UserError if the checkpoint
    at `resume` is damaged, or if `folder` has checkpoints and all are damaged.
    """
    if resume == "none":
        return None
    with side_group(world) as group:
        if resume != "auto":
            return _given(Path(resume).expanduser(), folder, group)
        try:
            exists = bool(list_checkpoints(folder))
            with world.phase("verifying the newest checkpoint") if exists else nullcontext():
                found = newest_verified(folder, warn, group)
        except UserError as error:
            raise UserError(f"{error}; start anew in another output_dir") from None
    others = _of_other_precisions(folder.parent) if found is None and world.is_main else {}
    if others:
        each = (f"{path} has step {step}; output_dir={path} continues it" for path, step in others.items())
        warn(f"note: {'; '.join(each)}")
    return found


def _of_other_precisions(run: Path) -> dict[Path, int]:
    """Folders beside `run` whose names have another precision.kind at the end, or none, with the steps of
    their newest checkpoints; the latest step first.

    A user may resume with another precision.kind, and `output_dir: runs/x-${precision.kind}` then names
    another folder.
    """
    names: set[str] = set()
    for ending in (f"-{kind}" for kind in PRECISION_KINDS):
        if run.name.endswith(ending) and (stem := run.name.removesuffix(ending)):
            names |= {stem, *(f"{stem}-{kind}" for kind in PRECISION_KINDS)} - {run.name}
    found = {run.with_name(name): list_checkpoints(run.with_name(name) / "checkpoints") for name in names}
    steps = {path: step_of(checkpoints[0]) for path, checkpoints in found.items() if checkpoints}
    return dict(sorted(steps.items(), key=lambda item: (-item[1], item[0])))


def newest_verified(
    folder: Path, warn: Callable[[str], None], group: SideGroup | None = None
) -> Manifest | None:
    """The newest intact checkpoint in `folder`, as `find_checkpoint` with `auto`; None if there is none.
    group: all its ranks call this; None: this process alone.
    """
    group = group or SideGroup()
    steps = group.all_of_main([step_of(path) for path in list_checkpoints(folder)])
    for step in steps:
        try:
            return verify(folder / step_folder_name(step), group)
        except UserError as error:
            warn(f"warning: checkpoint passed over: {error}")
    if steps:
        raise UserError(f"{folder}: none of its {len(steps)} checkpoints is intact")
    return None


def newest_of_run(folder: Path, warn: Callable[[str], None]) -> Manifest | None:
    """`newest_verified` of a run's folder. Raises UserError if a newer one is whole at the address alone
    (parts.py).
    """
    here, of_machines = (list_checkpoints(folder / name) for name in ("checkpoints", "parts"))
    if of_machines and (not here or step_of(here[0]) < step_of(of_machines[0])):
        step = step_of(of_machines[0])
        where = "is whole at checkpoint.copy_to alone; fetch it from there"
        if parts.uncopied(folder / "parts") == step:
            where = "is not copied to checkpoint.copy_to yet; run again, which copies it"
        raise UserError(f"{folder}: its newest checkpoint, of step {step}, {where}")
    return newest_verified(folder / "checkpoints", warn)


def _given(path: Path, folder: Path, group: SideGroup) -> Manifest:
    if (path / "checkpoints").is_dir():
        raise UserError(f"resume: {path} is a run's folder; give one of its checkpoints/step-…")
    try:
        manifest = verify(path, group)
    except UserError as error:
        raise UserError(f"resume: {error}; give another checkpoint, auto or none") from None
    # The folder would have checkpoints of two runs, and retention and resume=auto would confuse them.
    if path.resolve().parent != folder.resolve() and group.of_main(len(list_checkpoints(folder))):
        raise UserError(
            f"resume: {path} is of another run than the checkpoints in {folder}; continue from these with "
            "resume=auto, or choose another output_dir"
        )
    return manifest


def state_of_run(
    cfg: RunConfig,
    plan: Plan,
    saved: RunState | None,
    num_steps: int,
    data_digest: str,
    started_on: date,
    chat_template: str | None,
    others: Mapping[str, str] = MappingProxyType({}),
    stops: Mapping[str, int] | None = None,
) -> RunState:
    """The state.json of the checkpoints that this run will write, without their step.

    plan: the precision of the steps to come. saved: the state of the checkpoint that the run continues; None
    for a new run. num_steps: the number of steps that `cfg` resolves to. data_digest: of the training rows.
    started_on: the day that chat templates print; the same after a resume. chat_template: the tokenizer's
    template, as the run uses it. others: further digests for the fingerprint, by name. stops: the tokens that
    end the answers of the rows. Raises UserError if the model's files name stop ids that cannot be read.

    Precision, compilation, ranks and number of steps may change when a run is resumed. The values in
    `fingerprint` may not.
    """
    if stops:
        read_stop_ids(Path(cfg.model.path).expanduser())  # the export adds to them
    fingerprint = {
        # Settings that change the data come before the data, so that an error names the cause.
        "seed": cfg.seed,
        "data.seq_len": cfg.data.seq_len,
        "global_batch_size": cfg.global_batch_size,
        **base_digests(Path(cfg.model.path).expanduser()),
        "data": data_digest[:16],
        **others,
    }
    rows = decides_rows(cfg, chat_template)
    if saved is not None and not saved.cuts_text and cfg.data.cut_text is None:
        del rows["data.cut_text"]  # so that the next part of the run knows it, too
    content = {
        "fingerprint": fingerprint,
        "config": {
            key: value
            for key, value in _leaves(to_dict(cfg) | {"num_steps": num_steps})
            if not has_no_effect(key)
        },
        "decides_rows": rows,
        "started_on": started_on.isoformat(),
        "about": about_run(cfg, chat_template),
        "parts": run_parts(cfg, plan, saved),
        # A parameter that an earlier part of the run trained is not the base's, frozen now or not.
        "frozen": [name for name in plan.frozen if saved is None or name in saved.frozen],
        "stop_tokens": None if stops is None else dict(stops),
    }
    return RunState(content)


def has_no_effect(key: str) -> bool:
    """Whether `key` does not decide the weights and metrics of a run, or is compared in another way."""
    return _WITHOUT_EFFECT.fullmatch(key) is not None


def still_fallen_back(cfg: RunConfig, saved: RunState, say: Callable[[str], None]) -> dict[str, int]:
    """The layers that fell back to high precision before `saved` and stay there, by name, with the number of
    steps before that. `say` gets a line if they do not stay in the run of `cfg`, which continues `saved`.
    """
    precision, layers = cfg.precision, saved.fell_back
    if not layers or (precision.falls_back and precision.kind == saved.about.precision):
        return layers
    say(
        f"note: layers that had fallen back to high precision run as precision.kind={precision.kind} again: "
        f"{', '.join(layers)}; precision.shadow_on_bad=fallback or precision.skip would keep them there"
    )
    return {}


def state_after_fallback(
    cfg: RunConfig, plan: Plan, state: RunState, step: int, names: Collection[str]
) -> RunState:
    """`state`, which a run's checkpoints have, after the layers `names` fell back. plan: with these layers in
    high precision. step: number of steps before.
    """
    parts = [part for part in state.content["parts"] if part["from_step"] <= step]
    before = RunState({**state.content, "parts": parts}, step)
    parts = run_parts(cfg, plan, before if parts else None)
    fell_back = before.fell_back | dict.fromkeys(names, step)
    return RunState({**state.content, "parts": parts}).with_fallen_back(fell_back)


def check_num_averaged(cfg: RunConfig, num_steps: int) -> None:
    """Raises UserError if `num_steps` steps leave fewer checkpoints than the export averages."""
    count, every = cfg.export.average_checkpoints, cfg.checkpoint.every_steps
    if cfg.export.enabled and count > 1 and -(-num_steps // every) < count:
        raise UserError(
            f"export.average_checkpoints: {count} checkpoints are needed, and a run of {num_steps} steps "
            f"with checkpoint.every_steps={every} saves {-(-num_steps // every)}; lower one of the two"
        )


def check_fingerprint(saved: RunState | None, now: RunState, world: World) -> None:
    """Raises UserError if ranks differ in data, model or seed, or if the run differs from `saved`, the
    checkpoint that it continues. The error gives both values. A collective.
    """
    fingerprint = now.fingerprint
    for key, value in fingerprint.items():  # each machine reads its own files, and was given its own command
        check_same(f"{key}{_MEANING.get(key, '')}", repr(value), world)
    if saved is None:
        return
    before = saved.fingerprint
    for key, value in fingerprint.items():
        if before.get(key) != value:
            meaning = _what_changed(saved, now) if key == "data" else ""
            raise UserError(
                f"{saved.folder}: was saved with {key} {before.get(key)!r}, this run has {value!r}"
                f"{meaning or _MEANING.get(key, '')}; restore it, or start anew in another output_dir"
            )


def change_of_optimizer(saved: RunState | None, cfg: RunConfig) -> str:
    """A line that says what becomes of the moments in `saved` if optimizer.kind has changed; else empty.
    Raises UserError if the optimizer of `cfg` cannot continue from them.
    """
    config = saved.content.get("config") if saved else None
    if saved is None or not isinstance(config, dict):
        return ""
    kind, before = cfg.optimizer.kind, config.get("optimizer.kind", "adamw")
    if kind == before:
        return ""
    now, then = OPTIMIZER_KINDS[kind], OPTIMIZER_KINDS.get(before)
    if then is None or now.moments != then.moments:
        raise UserError(
            f"{saved.folder}: was saved with optimizer.kind={before}, from whose state {kind} cannot go on; "
            "restore it, or export the checkpoint and start anew from that (model.path) in another output_dir"
        )
    # Moments in 8 bits have a float32 scale, so they are no numbers of bfloat16.
    how = "the same values" if now.stored == OPTIMIZER_KINDS["adamw"].stored else "rounded once"
    return f"note: moments that were {then.stored} are {now.stored} from here on, {how}"


def decides_rows(cfg: RunConfig, chat_template: str | None) -> dict[str, Any]:
    """By name, values and digests of what determines the training rows, except the files of data.source."""
    values = to_dict(cfg)["data"].items()
    found = {f"data.{key}": value for key, value in values if not key.startswith("eval_s") and key != "cache"}
    folder = Path(cfg.model.path).expanduser()
    for name in ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        if (folder / name).is_file():
            found[f"{name} in model.path"] = sha256(folder / name)[:16]
    text = repr(chat_template).encode(errors="surrogatepass")
    return found | {_TEMPLATE: hashlib.sha256(text).hexdigest()[:16]}


def _what_changed(saved: RunState, now: RunState) -> str:
    """A note on which values of `decides_rows` changed; empty if an older version wrote the checkpoint."""
    before, after = (state.content.get("decides_rows") for state in (saved, now))
    if not isinstance(before, dict) or not isinstance(after, dict):
        return ""
    return f" (a digest of the training rows; changed: {causes_of_change(before, after)})"


def causes_of_change(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Names the values of `decides_rows` that differ, for a message about rows that changed."""
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    # The template's text also changes with data.chat_template or with a file of the model. Then name only the
    # cause.
    causes = [name for name in changed if name != _TEMPLATE] or changed
    return ", ".join(causes) or "none of data.* but the content of the files that data.source names"


def check_unchanged(
    saved: RunState, now: RunState, say: Callable[[str], None], cls: type[RunConfig] = FinetuneConfig
) -> None:
    """Raises UserError if no step is left to train but the config has changed, since the change would have no
    effect. The error gives each changed key with both values. Arguments: as of `changed_keys`.
    """
    if changed := changed_keys(saved, now, say, cls):
        raise UserError(
            f"{saved.folder}: no step is left to train, and it was trained with {', '.join(changed)}; "
            "choose another output_dir for another run, raise num_steps to continue with the change, or undo "
            "it (`lptune export` exports the checkpoint as it is)"
        )


def changed_keys(
    saved: RunState, now: RunState, say: Callable[[str], None], cls: type[RunConfig] = FinetuneConfig
) -> list[str]:
    """Each key that decides the result and has changed, with both values.

    saved: the state of the last checkpoint. say: gets a line if the checkpoint cannot be compared completely,
    because another version of lptune wrote it. cls: the config class; its default is used for a key that the
    checkpoint lacks.
    """
    config = saved.content.get("config")
    if not isinstance(config, dict):
        say(
            f"note: {saved.path} does not say which config the run had, so nothing was compared with this one"
        )
        return []
    known = key_paths(cls)
    if removed := [key for key in config if key not in known]:
        say(f"note: {saved.path}: not compared, since this version has no such key: {', '.join(removed)}")
    before = {key: config.get(key, default(cls, key)) for key in now.content["config"]}
    return [
        f"{key} {before[key]!r:.200} (now {value!r:.200})"
        for key, value in now.content["config"].items()
        if before[key] != value
    ]


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
