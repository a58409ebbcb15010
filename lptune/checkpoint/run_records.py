"""What a run tells about itself beside its metrics: run.json and samples.jsonl.

    run.json         id: names the run in trackers, 8 hex digits; recipe: name and digest of its file;
                     data_digest: of the training rows; launches: time, first step, ranks, device and
                     versions of each start
    samples.jsonl    answers to held-out prompts: step, when, prompt, answer, reference

Nothing is trained from them. A file that cannot be read, because somebody changed it, is written anew.
"""

import hashlib
import json
import os
import platform
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch

import lptune
from lptune.base.errors import UserError
from lptune.base.files import MAX_BYTES, lines_of, object_of, read_object, write_bytes, write_json
from lptune.base.progress import RECIPE
from lptune.distributed import World

_MAX_LAUNCHES = 1000
_T = TypeVar("_T")


def write_launch(path: Path, data_digest: str, step: int, num_steps: int, world: World) -> None:
    """Adds this launch to run.json at `path`, or makes the file with a new id.

    step, num_steps: where the launch begins and where the run ends.
    """
    held: dict[str, Any] = {}
    with suppress(UserError):
        held = read_object(path)
    run_id, launches = held.get("id"), held.get("launches")
    # Trackers name a run by it, in an address or as a file, so no other text will do.
    is_id = isinstance(run_id, str) and re.fullmatch("[0-9a-f]{8}", run_id)
    launch = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "step": step,
        "num_steps": num_steps,
        "num_ranks": world.size,
        "device": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu",
        "versions": {
            "lptune": lptune.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
    }
    write_json(
        path,
        {
            "id": run_id if is_id else secrets.token_hex(4),
            **_recipe(),
            "data_digest": data_digest,
            "launches": [*(launches if isinstance(launches, list) else []), launch][-_MAX_LAUNCHES:],
        },
    )


def keep_checks_until(path: Path, step: int) -> None:
    """Removes the shadow checks after `step` from shadow.jsonl at `path`, and lines that no run wrote. A run
    that goes on from `step` makes them again, or makes none.
    """
    lines = _lines(path)
    kept = [line for line in lines if (at := _value(line, "step", int)) is not None and at <= step]
    if len(kept) < len(lines):
        write_bytes(path, b"".join(kept))


def _recipe() -> dict[str, str]:
    """Name and digest of the recipe's file; empty if `lptune run` did not start it."""
    if not (file := os.environ.get(RECIPE)):
        return {}
    found = {"recipe": Path(file).stem}
    with suppress(OSError):  # the file may be gone by now
        found["recipe_sha256"] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return found


def write_samples(path: Path, samples: Sequence[Mapping[str, object]]) -> None:
    """Writes `samples` to samples.jsonl at `path`, in place of earlier ones with the same `when`."""
    replaced = {sample["when"] for sample in samples}
    kept = [line for line in _lines(path) if _value(line, "when", str) not in (None, *replaced)]
    write_bytes(path, b"".join([*kept, *(f"{json.dumps(sample)}\n".encode() for sample in samples)]))


def _lines(path: Path) -> list[bytes]:
    """The lines of the file; none if it cannot be read."""
    with suppress(OSError, ValueError):
        return [line.rstrip(b"\r\n") + b"\n" for line in lines_of(path, MAX_BYTES)]
    return []


def _value(line: bytes, key: str, kind: type[_T]) -> _T | None:
    """The value of `key` in the JSON object of `line`; None: no run wrote the line."""
    value = (object_of(line) or {}).get(key)
    return value if type(value) is kind else None
