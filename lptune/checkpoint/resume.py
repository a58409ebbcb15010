"""Resuming: which checkpoint a run goes on from, and whether it may."""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import torch

from lptune.checkpoint.card import run_parts
from lptune.checkpoint.files import sha256
from lptune.checkpoint.manifest import Manifest, list_checkpoints, step_folder_name, step_of, verify
from lptune.checkpoint.state import RunState, about_run, base_digests
from lptune.config import (
    PRECISION_KINDS,
    FinetuneConfig,
    RunConfig,
    UserError,
    as_written,
    default,
    key_paths,
)
from lptune.distributed import SideGroup, World, side_group
from lptune.linear import Plan

_MEANING = {
    "weights": " (a digest of the safetensors in model.path)",
    "data": " (a digest of the training rows, which data.* decides and the files that it names)",
    "config.json": " (a digest of that file in model.path)",
    "tokenizer.json": " (a digest of that file in model.path)",
}
"""What the values in a fingerprint that say nothing by themselves are."""

_TEMPLATE = "the text of data.chat_template"

_WITHOUT_EFFECT = re.compile(
    r"(output_dir|resume|num_epochs|precision\.verify|model\.path|(checkpoint|export|logging)\.\w+"
    r"|data\.(?!eval_s)\w+)"
)
"""Keys that leave the weights and metrics of a run as they are, or are compared otherwise: the model and the
training rows by their digests, the export by export.json, num_epochs by the number of steps that it makes."""


def find_checkpoint(folder: Path, resume: str, world: World, warn: Callable[[str], None]) -> Manifest | None:
    """The checkpoint to continue from: the one at `resume`, or with `auto` the newest in `folder` that
    verifies.

    All ranks call it, and share the hashing. warn: called with a line for each damaged checkpoint that is
    passed over, and with one for checkpoints of this run under another precision's name. Damaged ones are
    never deleted. Raises UserError when there are checkpoints and all are damaged.
    """
    if resume == "none":
        return None
    with side_group(world) as group:
        if resume != "auto":
            return _given(Path(resume).expanduser(), folder, group)
        try:
            found = newest_verified(folder, warn, group)
        except UserError as error:
            raise UserError(f"{error}; start anew in another output_dir") from None
    others = _of_other_precisions(folder.parent) if found is None and world.is_main else {}
    if others:
        each = (f"{path} has step {step}; output_dir={path} continues it" for path, step in others.items())
        warn(f"note: {'; '.join(each)}")
    return found


def _of_other_precisions(run: Path) -> dict[Path, int]:
    """Folders beside `run` whose names differ from its name in the precision.kind at its end, or lack it, and
    the steps of their newest checkpoints, the latest first.

    A resume may change precision.kind, and with `output_dir: runs/x-${precision.kind}` it changes the folder.
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
    """`find_checkpoint` with `auto`. group: None is this process alone."""
    group = group or SideGroup()
    is_main = group.rank == 0
    steps = [step_of(path) for path in list_checkpoints(folder)] if is_main else []
    # As many as the main rank sees: the others' view of a network folder may be older.
    num_found = group.of_main(len(steps))
    for number in range(num_found):
        step = group.of_main(steps[number] if is_main else 0)
        try:
            return verify(folder / step_folder_name(step), group)
        except UserError as error:
            warn(f"warning: checkpoint passed over: {error}")
    if num_found:
        raise UserError(f"{folder}: none of its {num_found} checkpoints is intact")
    return None


def _given(path: Path, folder: Path, group: SideGroup) -> Manifest:
    if (path / "checkpoints").is_dir():
        raise UserError(f"resume: {path} is a run's folder; give one of its checkpoints/step-…")
    try:
        manifest = verify(path, group)
    except UserError as error:
        raise UserError(f"resume: {error}; give another checkpoint, auto or none") from None
    # Two pasts in one folder: retention and the next resume=auto would take one for the other.
    if path.resolve().parent != folder.resolve() and group.of_main(len(list_checkpoints(folder))):
        raise UserError(
            f"resume: {path} is of another run than the checkpoints in {folder}; go on from those with "
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
) -> RunState:
    """What the checkpoints of this part of a run say, beside their step.

    plan: the precision of the steps to come. saved: of the checkpoint that the run continues. num_steps: that
    `cfg` resolves to. data_digest: of the training rows. started_on: the day that chat templates see which
    write a date, in every part of the run. chat_template: the tokenizer's, as the run sees it.

    Precision, compilation, ranks and length may change between the parts of one run; what is in `fingerprint`
    may not.
    """
    fingerprint = {
        # What decides the data comes before the data, so that the cause is named and not its consequence.
        "seed": cfg.seed,
        "data.seq_len": cfg.data.seq_len,
        "global_batch_size": cfg.global_batch_size,
        **base_digests(Path(cfg.model.path).expanduser()),
        "data": data_digest[:16],
    }
    content = {
        "fingerprint": fingerprint,
        "config": {
            key: value
            for key, value in _leaves(as_written(cfg) | {"num_steps": num_steps})
            if not _WITHOUT_EFFECT.fullmatch(key)
        },
        "decides_rows": _decides_rows(cfg, chat_template),
        "started_on": started_on.isoformat(),
        "about": about_run(cfg, chat_template),
        "parts": run_parts(cfg, plan, saved),
    }
    return RunState(content)


def check_fingerprint(saved: RunState | None, now: RunState, world: World) -> None:
    """Raises UserError where ranks have different data, models or seeds, and where a run continues the
    checkpoint `saved` with others than that says; names both values. A collective.
    """
    fingerprint = now.fingerprint
    _check_same_on_all_ranks(fingerprint, world)
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


def _decides_rows(cfg: RunConfig, chat_template: str | None) -> dict[str, Any]:
    """What the training rows are made by, beside the files of data.source: value or digest by name."""
    values = as_written(cfg)["data"].items()
    found = {f"data.{key}": value for key, value in values if not key.startswith("eval_s") and key != "cache"}
    folder = Path(cfg.model.path).expanduser()
    for name in ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        if (folder / name).is_file():
            found[f"{name} in model.path"] = sha256(folder / name)[:16]
    text = repr(chat_template).encode(errors="surrogatepass")
    return found | {_TEMPLATE: hashlib.sha256(text).hexdigest()[:16]}


def _what_changed(saved: RunState, now: RunState) -> str:
    """Which of `_decides_rows`; empty where the checkpoint is older than these."""
    before, after = (state.content.get("decides_rows") for state in (saved, now))
    if not isinstance(before, dict) or not isinstance(after, dict):
        return ""
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    # It changes with data.chat_template or a file of the model, and by itself if the file was edited.
    causes = [name for name in changed if name != _TEMPLATE] or changed
    what = ", ".join(causes) or "none of data.* but the content of the files that data.source names"
    return f" (a digest of the training rows; changed: {what})"


def _check_same_on_all_ranks(fingerprint: Mapping[str, Any], world: World) -> None:
    """Each machine reads its own files, and each has its own command."""
    hashes = [hashlib.sha256(repr(value).encode()).digest() for value in fingerprint.values()]
    numbers = torch.tensor([int.from_bytes(digest[:7], "little") for digest in hashes], device=world.device)
    extremes = torch.stack([numbers, -numbers])
    world.max_(extremes)
    for key, largest, smallest in zip(fingerprint, *extremes.tolist(), strict=True):
        if largest != -smallest:
            raise UserError(
                f"{key}: is not the same on all ranks{_MEANING.get(key, '')}; give all machines the same "
                "files and the same command"
            )


def check_unchanged(
    saved: RunState, now: RunState, say: Callable[[str], None], cls: type[RunConfig] = FinetuneConfig
) -> None:
    """Refuses to call a run finished whose config has changed, naming every changed key and both values.

    saved: the checkpoint after which no step is left. A change has an effect only on steps that are still
    to come. say: called with one line where another version of lptune wrote a checkpoint that cannot be
    compared, or not in whole. cls: the config's class, whose default stands for a key that the checkpoint
    does not have.
    """
    config = saved.content.get("config")
    if not isinstance(config, dict):
        say(
            f"note: {saved.path} does not say which config the run had, so nothing was compared with this one"
        )
        return
    known = key_paths(cls)
    if removed := [key for key in config if key not in known]:
        say(f"note: {saved.path}: not compared, since this version has no such key: {', '.join(removed)}")
    before = {key: config.get(key, default(cls, key)) for key in now.content["config"]}
    changed = [
        f"{key} {before[key]!r:.200} (now {value!r:.200})"
        for key, value in now.content["config"].items()
        if before[key] != value
    ]
    if changed:
        raise UserError(
            f"{saved.folder}: no step is left to train, and it was trained with {', '.join(changed)}; "
            "choose another output_dir for another run, raise num_steps to go on with the change, or take it "
            "back (`lptune export` exports the checkpoint as it is)"
        )


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
