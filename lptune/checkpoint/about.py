"""What a checkpoint says of the run that wrote it, in state.json: enough to export it without that run.

about         where the imported model is, how to export, what the model card states
fingerprint   digests by which an imported model is recognised (and what else a resume compares)
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import torch

import lptune
from lptune.checkpoint.files import read_json, sha256
from lptune.checkpoint.hf import weights_digest
from lptune.checkpoint.manifest import Manifest
from lptune.config import RunConfig, SourceConfig, UserError, as_written, source_names

Facts = Mapping[str, Any]
"""What state.json says beside the step."""


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


def read_state(manifest: Manifest) -> Facts:
    """What state.json says. Raises UserError where it is of another step, or nothing of lptune's."""
    path = manifest.folder / "state.json"
    state = read_json(path)
    if not isinstance(state, dict) or state.get("step") != manifest.step:
        raise UserError(
            f"{path}: is not of step {manifest.step}, as the manifest is; lptune did not write it"
        )
    return state


def read_fingerprint(manifest: Manifest) -> Mapping[str, Any]:
    """What a resume, or the model of an export, must agree with."""
    fingerprint = read_state(manifest).get("fingerprint")
    if not isinstance(fingerprint, dict):
        raise UserError(f"{manifest.folder / 'state.json'}: has no fingerprint; lptune did not write it")
    return fingerprint


def read_about(manifest: Manifest) -> About:
    """Of a verified checkpoint. Raises UserError where it says nothing of its run."""
    block = read_state(manifest).get("about")
    types = get_type_hints(About)
    if not isinstance(block, dict) or block.keys() != types.keys():
        raise UserError(
            f"{manifest.folder / 'state.json'}: does not say what it is a checkpoint of; another version of "
            "lptune wrote it: export with that one"
        )
    for key, type_ in types.items():
        if not isinstance(block[key], type_):
            raise UserError(f"{manifest.folder / 'state.json'}: about.{key}: cannot be {block[key]!r}")
    return About(**block)


def base_digests(folder: Path) -> dict[str, str]:
    """By which an imported folder is recognised; part of a run's fingerprint."""
    return {
        "config.json": sha256(folder / "config.json")[:16],
        "weights": weights_digest(folder)[:16],
        "tokenizer.json": sha256(folder / "tokenizer.json")[:16],
    }


def check_base(manifest: Manifest, folder: Path) -> None:
    """Refuses a folder that is not the model which the run of this checkpoint started from."""
    saved = read_fingerprint(manifest)
    for key, found in base_digests(folder).items():
        wanted = saved.get(key)
        if found != wanted:
            raise UserError(
                f"{folder}: is not the model that {manifest.folder} was trained from: the digest of {key} is "
                f"{found}, the checkpoint says {wanted}; give the folder it was trained from"
            )
