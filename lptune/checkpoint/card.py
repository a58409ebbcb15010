"""Writes README.md of an export: the model card, which says how the weights were trained.

A run may be resumed with another precision. state.json therefore has `parts`: a list with one entry for each
range of steps with the same precision and the same versions of lptune and torch, in order.

    {"from_step": 11, "precision": "int8_rowcol", "compute_dtype": "bfloat16", "emulated": false,
     "layers": [["model.layers.0-15.mlp.up_proj", "8192 x 2048", "int8 row", …], …], "lptune": …, "torch": …}

Checkpoints of older versions have no `parts`. They can be resumed and exported; the card then says that their
first steps were not recorded.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

import torch
import yaml  # type: ignore[import-untyped]

import lptune
from lptune.base.errors import UserError
from lptune.checkpoint.state import RunState
from lptune.config import RunConfig
from lptune.linear import PLAN_COLUMNS, Plan

_HUB_FOLDER = re.compile(r"models--([^/]+?)--([^/]+)")  # of huggingface_hub's cache
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


@dataclass(frozen=True)
class Part:
    """A range of steps of a run, with the same precision and the same versions."""

    from_step: int
    """The first step, counted from 1. The part ends before the next part begins."""
    precision: str
    """`precision.kind` of these steps."""
    compute_dtype: str
    """The dtype that the plan calls `high`; empty if the part was not recorded."""
    emulated: bool
    layers: tuple[tuple[str, ...], ...]
    """The rows of the plan table, with PLAN_COLUMNS."""
    lptune: str
    torch: str


def run_parts(cfg: RunConfig, plan: Plan, saved: RunState | None) -> list[dict[str, Any]]:
    """`parts` of state.json: the parts of `saved`, and the part that begins now if its settings differ.

    saved: the state of the checkpoint that the run continues; None for a new run.
    """
    before = [] if saved is None else read_parts(saved)
    now = Part(
        from_step=1 if saved is None else saved.step + 1,
        precision=cfg.precision.kind,
        compute_dtype=cfg.compute_dtype,
        emulated=any(layer.spec.emulate for layer in plan.converted if layer.spec),
        layers=tuple(plan.rows()),
        lptune=lptune.__version__,
        torch=str(torch.__version__),
    )
    if not before or replace(before[-1], from_step=now.from_step) != now:
        before.append(now)
    return [asdict(part) for part in before]


def read_parts(state: RunState) -> list[Part]:
    """The parts of a verified checkpoint. If an older version of lptune wrote it: one part without layers.

    Raises UserError if lptune cannot have written `parts`.
    """
    if "parts" not in state.content:
        about = state.about
        return [Part(1, about.precision, "", False, (), about.lptune, about.torch)]
    try:
        parts = [_part(entry) for entry in state.content["parts"]]
        steps = [part.from_step for part in parts]
        if steps[0] != 1 or any(a >= b for a, b in pairwise([*steps, state.step + 1])):
            raise ValueError(steps)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise UserError(
            f"{state.path}: parts: cannot be read ({error!r:.80}); lptune did not write it"
        ) from None
    return parts


def _part(entry: Mapping[str, Any]) -> Part:
    layers = tuple(tuple(row) for row in entry["layers"])
    if any(len(row) != len(PLAN_COLUMNS) or not all(type(cell) is str for cell in row) for row in layers):
        raise ValueError(entry["layers"])
    part = Part(**{**entry, "layers": layers})
    for key, type_ in get_type_hints(Part).items():
        if key != "layers" and type(getattr(part, key)) is not type_:
            raise TypeError(key)
    return part


def model_card(
    state: RunState, parts: Sequence[Part], weights: str | None = None, in_8_bits: str | None = None
) -> str:
    """The text of README.md for an export of a checkpoint. state, parts: of it. weights: which average of
    weights is exported; None: the weights of its step. in_8_bits: of an export in 8 bits, what it stores.
    """
    about, fingerprint, stops = state.about, state.fingerprint, state.stop_tokens
    base = Path(about.model)
    hub_id = next((f"{m[1]}/{m[2]}" for part in base.parts if (m := _HUB_FOLDER.fullmatch(part))), base.name)
    is_name = all(_HUB_NAME.fullmatch(part) for part in hub_id.split("/"))
    # Same format as huggingface_hub's ModelCardData, which is not imported: the import fails if an
    # environment variable of the hub is malformed (HF_HUB_DOWNLOAD_TIMEOUT), and the export would be lost.
    header: dict[str, Any] = {"base_model": hub_id} if is_name else {}
    header |= {"library_name": "transformers", "tags": ["lptune"]}
    ends = [part.from_step - 1 for part in parts[1:]] + [state.step]
    spans = [f"{part.from_step} to {end}" for part, end in zip(parts, ends, strict=True)]
    rows = {
        "base": hub_id,
        "base, digest of its weights": fingerprint.get("weights"),
        "data": about.data,
        "data, digest of its rows": fingerprint.get("data"),
        "precision in training": "; ".join(
            part.precision if len(parts) == 1 else f"{part.precision} (steps {span})"
            for part, span in zip(parts, spans, strict=True)
        ),
        "steps": state.step,
        "weights": weights,
        "stored in 8 bits": in_8_bits,
        "answers end with": ", ".join(f"{text} ({each})" for text, each in (stops or {}).items()) or None,
        "lptune": ", ".join(dict.fromkeys(part.lptune for part in parts)),
        "torch": ", ".join(dict.fromkeys(part.torch for part in parts)),
    }
    name = _cell(hub_id.rpartition("/")[2])
    lines = ["---", yaml.dump(header, sort_keys=False).strip(), "---", "", f"# {name}, fine-tuned", ""]
    lines += ["All weights were trained with lptune.", "", "| | |", "|---|---|"]
    lines += [f"| {key} | {_cell(value)} |" for key, value in rows.items() if value is not None]
    for part, span in zip(parts, spans, strict=True):
        lines += ["", *_section(part, span)]
    return "\n".join(lines) + "\n"


def _section(part: Part, span: str) -> list[str]:
    emulated = ", emulated in wider arithmetic" * part.emulated
    lines = [f"## Steps {span}: {_cell(part.precision)}{emulated}", ""]
    if not part.compute_dtype:
        lines.append(
            "The version of lptune that trained these steps did not record more. Some of the earlier steps "
            "may have run with another precision."
        )
        return lines
    lines += [
        f"lptune {_cell(part.lptune)}, torch {_cell(part.torch)}; `high` is {_cell(part.compute_dtype)}."
    ]
    lines += ["", _row(PLAN_COLUMNS), _row(["---"] * len(PLAN_COLUMNS))]
    return lines + [_row(row) for row in part.layers]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(_cell(cell) if cell != '---' else cell for cell in cells)} |"


def _cell(value: object) -> str:
    """`value` on one line, with an escape before each character that ends a cell or begins markup."""
    return re.sub(r"([\\|`*<\[\]])", r"\\\1", " ".join(str(value).split()))
