"""state.json: describes the run that wrote a checkpoint, so that the run can be continued or exported.

    step, num_skipped, num_skipped_in_a_row, eval_loss        the state of the run
    last_grad_norm                                            by which a step clips that updates in backward
    fingerprint                                               digests and settings that must not change
    decides_rows                                              the settings and files that decide the rows
    config                                                    all keys that decide the result
    started_on                                                the day that chat templates print
    parts                                                     precision and versions of all steps (card.py)
    frozen                                                    parameters that were frozen in all steps
    fell_back                                                 layers that a shadow check switched to high
stop_tokens                                               text and id of the tokens that end learned answers
    about                                                     path of the base checkpoint, export settings

A `RunState` is the content of this file, read or to be written. Each block is checked when it is used,
because a checkpoint of an older version may lack it.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, get_type_hints

import torch

import lptune
from lptune.base.errors import UserError
from lptune.base.files import read_json
from lptune.checkpoint.files import sha256
from lptune.checkpoint.hf import weights_digest
from lptune.checkpoint.manifest import Manifest
from lptune.config import RunConfig, source_names


@dataclass(frozen=True)
class About:
    """The block `about` of state.json: what an export needs to know about the run."""

    model: str
    """Absolute path of the base checkpoint."""
    data: str
    """Names of the data sources for training."""
    precision: str
    """`precision.kind` of the last steps. `parts` has the precision of all steps (card.py)."""
    chat_template: str | None
    """Text of the chat template, if the run did not use the tokenizer's template; else None."""
    dtype: str
    max_shard_gib: float
    """`export.dtype` and `export.max_shard_gib`."""
    lptune: str
    torch: str
    """Versions of lptune and torch."""
    average_checkpoints: int = 1
    ema: bool = True
    quantized: str = "none"
    rounding: str = "nearest"
    """Keys of `export`, of which a checkpoint of an older version has no values."""


def about_run(cfg: RunConfig, chat_template: str | None) -> dict[str, Any]:
    """The block `about` of state.json. chat_template: the tokenizer's template, as the run uses it."""
    about = About(
        model=str(Path(cfg.model.path).expanduser().absolute()),
        data=source_names(cfg.data.sources),
        precision=cfg.precision.kind,
        chat_template=chat_template if cfg.data.chat_template else None,
        dtype=cfg.export.dtype,
        max_shard_gib=float(cfg.export.max_shard_gib),
        lptune=lptune.__version__,
        torch=str(torch.__version__),
        average_checkpoints=cfg.export.average_checkpoints,
        ema=cfg.export.ema,
        quantized=cfg.export.quantized,
        rounding=cfg.export.rounding,
    )
    return asdict(about)


@dataclass(frozen=True)
class RunState:
    """The content of state.json. Each property raises UserError if lptune cannot have written its block."""

    content: Mapping[str, Any]
    """The blocks by name."""
    step: int = 0
    """The step of the checkpoint; 0 if the state was not read from a checkpoint."""
    folder: Path = Path()
    """The folder of the checkpoint."""

    @property
    def path(self) -> Path:
        """The path of the checkpoint's state.json."""
        return self.folder / "state.json"

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        """Digests and settings that must be equal in all parts of a run, and in the base checkpoint of its
        export.
        """
        fingerprint = self.content.get("fingerprint")
        if not isinstance(fingerprint, dict):
            raise UserError(f"{self.path}: has no fingerprint; lptune did not write it")
        return fingerprint

    @property
    def started_on(self) -> date:
        """The day on which the run began."""
        day = self.content.get("started_on", "")
        try:
            return date.fromisoformat(day)
        except (TypeError, ValueError):
            raise UserError(f"{self.path}: started_on: expected a date, found {day!r:.60}") from None

    @property
    def cuts_text(self) -> bool:
        """Whether the run began with a version that knows `data.cut_text`."""
        return "data.cut_text" in (self.content.get("decides_rows") or {})

    @property
    def skipped(self) -> dict[str, int]:
        """The counts of skipped steps (`training.Update.counts`) when the checkpoint was saved."""
        found, most = dict[str, int](), self.step
        # num_skipped is at most the step, num_skipped_in_a_row at most num_skipped.
        for key in ("num_skipped", "num_skipped_in_a_row"):
            count = self.content.get(key, 0)
            if type(count) is not int or not 0 <= count <= most:
                raise UserError(f"{self.path}: {key}: expected 0 to {most}, found {count!r:.60}")
            found[key] = most = count
        return found

    @property
    def counts(self) -> dict[str, float]:
        """`skipped`, and with optimizer.in_backward the gradient norm by which the next step clips, as
        `last_grad_norm`.
        """
        norm = self.content.get("last_grad_norm")
        if norm is None:
            return dict(self.skipped)
        if type(norm) is not float or not 0 <= norm < math.inf:
            raise UserError(
                f"{self.path}: last_grad_norm: expected a number of at least 0, found {norm!r:.60}"
            )
        return {**self.skipped, "last_grad_norm": norm}

    @property
    def fell_back(self) -> dict[str, int]:
        """The layers that a shadow check switched to high precision, by name, with the number of steps before
        that.
        """
        found = self.content.get("fell_back", {})  # most runs and older versions have none
        if not isinstance(found, dict) or not all(
            isinstance(name, str) and type(step) is int and 0 <= step <= self.step
            for name, step in found.items()
        ):
            raise UserError(f"{self.path}: fell_back: expected steps by layer, found {found!r:.60}")
        return dict(found)

    def with_fallen_back(self, layers: Mapping[str, int]) -> "RunState":
        """This state with `layers` as `fell_back`; without the block if there are none."""
        return replace(self, content={**self.content, "fell_back": dict(layers)}) if layers else self

    @property
    def num_updates(self) -> int:
        """How often the optimizer had stepped: a step that was not finite made no update."""
        return self.step - self.skipped["num_skipped"]

    @property
    def frozen(self) -> frozenset[str]:
        """Names of the parameters that were frozen in all steps, so that they have the values of the base."""
        names = self.content.get("frozen", [])  # an older version freezes nothing
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UserError(f"{self.path}: frozen: expected names of parameters, found {names!r:.60}")
        return frozenset(names)

    @property
    def stop_tokens(self) -> dict[str, int] | None:
        """The tokens that end the answers of the training rows: text -> id. None if the recipe, or an older
        version, did not say.
        """
        found = self.content.get("stop_tokens")
        if found is None:
            return None
        if not isinstance(found, dict) or any(type(each) is not int or each < 0 for each in found.values()):
            raise UserError(f"{self.path}: stop_tokens: expected ids by text, found {found!r:.60}")
        return dict(found)

    @property
    def about(self) -> About:
        """The block `about`, which an export needs."""
        try:
            about = About(**self.content["about"])
        except (LookupError, TypeError):
            raise UserError(
                f"{self.path}: does not say what it is a checkpoint of; another version of lptune wrote it: "
                "export it with that version"
            ) from None
        for key, type_ in get_type_hints(About).items():
            if not isinstance(value := getattr(about, key), type_):
                raise UserError(f"{self.path}: about.{key}: cannot be {value!r}")
        return about


def read_state(manifest: Manifest) -> RunState:
    """Reads state.json of a verified checkpoint. Raises UserError if its step is not the manifest's, or if
    lptune did not write it.
    """
    path = manifest.folder / "state.json"
    content = read_json(path)
    if not isinstance(content, dict) or content.get("step") != manifest.step:
        raise UserError(
            f"{path}: is not of step {manifest.step}, as the manifest is; lptune did not write it"
        )
    return RunState(content, manifest.step, manifest.folder)


def base_digests(folder: Path) -> dict[str, str]:
    """The digests that identify a base checkpoint, by name; a part of a run's fingerprint."""
    return {
        "config.json": sha256(folder / "config.json")[:16],
        "weights": weights_digest(folder)[:16],
        "tokenizer.json": sha256(folder / "tokenizer.json")[:16],
    }


def check_base(state: RunState, folder: Path) -> None:
    """Raises UserError if `folder` is not the base checkpoint of the run that wrote `state`."""
    saved = state.fingerprint
    for key, found in base_digests(folder).items():
        wanted = saved.get(key)
        if found != wanted:
            raise UserError(
                f"{folder}: is not the model that {state.folder} was trained from: the digest of {key} is "
                f"{found}, the checkpoint says {wanted}; give the folder it was trained from"
            )
