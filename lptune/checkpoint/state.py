"""state.json: what a checkpoint says of the run that wrote it, enough to continue or export it.

    step, num_skipped, num_skipped_in_a_row, eval_loss        where the run stood
    fingerprint                                               digests and settings that must not change
    decides_rows                                              what the digest of the rows follows from
    config                                                    every key that decides the result
    started_on                                                the day that chat templates see
    parts                                                     precision and versions of all steps (card.py)
    about                                                     where the imported model is, how to export

`RunState` is this file, whether it was read or will be written. A block is checked when it is asked for,
since a checkpoint of an older version may lack it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, get_type_hints

import torch

import lptune
from lptune.checkpoint.files import read_json, sha256
from lptune.checkpoint.hf import weights_digest
from lptune.checkpoint.manifest import Manifest
from lptune.config import RunConfig, SourceConfig, UserError, as_written, source_names


@dataclass(frozen=True)
class About:
    """A run, as its checkpoints describe it."""

    model: str
    """Absolute path of the imported folder."""
    data: str
    """Names of the training data's sources."""
    precision: str
    """`precision.kind` of its last steps; of all of them: card.py."""
    chat_template: str | None
    """Text of the template, where the run used another than the tokenizer's own."""
    dtype: str
    max_shard_gib: float
    """`export.*`."""
    lptune: str
    torch: str
    """Versions."""


def about_run(cfg: RunConfig, chat_template: str | None) -> dict[str, Any]:
    """The block `about` of state.json. chat_template: the tokenizer's, as the run sees it."""
    about = About(
        model=str(Path(cfg.model.path).expanduser().absolute()),
        data=source_names(_sources_as_written(cfg)),
        precision=cfg.precision.kind,
        chat_template=chat_template if cfg.data.chat_template else None,
        dtype=cfg.export.dtype,
        max_shard_gib=float(cfg.export.max_shard_gib),
        lptune=lptune.__version__,
        torch=str(torch.__version__),
    )
    return asdict(about)


def _sources_as_written(cfg: RunConfig) -> tuple[SourceConfig, ...]:
    """As the config names them: no value of the environment goes into a model card."""
    written = as_written(cfg)["data"]["source"]
    if isinstance(written, str):
        return (SourceConfig(source=written),)
    names = [item if isinstance(item, str) else str(item["source"]) for item in written]
    return tuple(replace(entry, source=name) for entry, name in zip(cfg.data.sources, names, strict=True))


@dataclass(frozen=True)
class RunState:
    """The content of state.json. Each property raises UserError where its block is not what lptune writes."""

    content: Mapping[str, Any]
    """Blocks by name."""
    step: int = 0
    """Of the checkpoint; 0: not of one."""
    folder: Path = Path()
    """The checkpoint's."""

    @property
    def path(self) -> Path:
        """The path of the checkpoint's state.json."""
        return self.folder / "state.json"

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        """What the parts of one run, and the model of its export, must agree in."""
        fingerprint = self.content.get("fingerprint")
        if not isinstance(fingerprint, dict):
            raise UserError(f"{self.path}: has no fingerprint; lptune did not write it")
        return fingerprint

    @property
    def started_on(self) -> date:
        """The day the run began."""
        day = self.content.get("started_on", "")
        try:
            return date.fromisoformat(day)
        except (TypeError, ValueError):
            raise UserError(f"{self.path}: started_on: expected a date, found {day!r:.60}") from None

    @property
    def skipped(self) -> dict[str, int]:
        """What `training.Update.counts` said when the checkpoint was saved."""
        found, most = dict[str, int](), self.step
        # No more in a row than in all, and no more in all than steps.
        for key in ("num_skipped", "num_skipped_in_a_row"):
            count = self.content.get(key, 0)
            if type(count) is not int or not 0 <= count <= most:
                raise UserError(f"{self.path}: {key}: expected 0 to {most}, found {count!r:.60}")
            found[key] = most = count
        return found

    @property
    def num_updates(self) -> int:
        """How often the optimizer had stepped: a step that was not finite made no update."""
        return self.step - self.skipped["num_skipped"]

    @property
    def about(self) -> About:
        """What an export needs to know."""
        block, types = self.content.get("about"), get_type_hints(About)
        if not isinstance(block, dict) or block.keys() != types.keys():
            raise UserError(
                f"{self.path}: does not say what it is a checkpoint of; another version of lptune wrote it: "
                "export with that one"
            )
        for key, type_ in types.items():
            if not isinstance(block[key], type_):
                raise UserError(f"{self.path}: about.{key}: cannot be {block[key]!r}")
        return About(**block)


def read_state(manifest: Manifest) -> RunState:
    """state.json of a verified checkpoint. Raises UserError where it is of another step, or nothing of
    lptune's.
    """
    path = manifest.folder / "state.json"
    content = read_json(path)
    if not isinstance(content, dict) or content.get("step") != manifest.step:
        raise UserError(
            f"{path}: is not of step {manifest.step}, as the manifest is; lptune did not write it"
        )
    return RunState(content, manifest.step, manifest.folder)


def base_digests(folder: Path) -> dict[str, str]:
    """By which an imported folder is recognised; part of a run's fingerprint."""
    return {
        "config.json": sha256(folder / "config.json")[:16],
        "weights": weights_digest(folder)[:16],
        "tokenizer.json": sha256(folder / "tokenizer.json")[:16],
    }


def check_base(state: RunState, folder: Path) -> None:
    """Raises UserError for a folder that is not the model which the run of a checkpoint started from."""
    saved = state.fingerprint
    for key, found in base_digests(folder).items():
        wanted = saved.get(key)
        if found != wanted:
            raise UserError(
                f"{folder}: is not the model that {state.folder} was trained from: the digest of {key} is "
                f"{found}, the checkpoint says {wanted}; give the folder it was trained from"
            )
