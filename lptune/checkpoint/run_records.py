"""What a run tells about itself beside its metrics: run.json and samples.jsonl.

    run.json         id: names the run in trackers, 8 hex digits; data_digest: of the training rows;
                     launches: time, first step, ranks, device and versions of each start
    samples.jsonl    answers to held-out prompts: step, when, prompt, answer, reference

Nothing is trained from them. A file that cannot be read, because somebody changed it, is written anew.
"""

import json
import platform
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import lptune
from lptune.checkpoint.files import read_json, write_json, write_text
from lptune.config import MEBI, UserError, read_text
from lptune.distributed import World

_MAX_LAUNCHES = 1000


def write_launch(path: Path, data_digest: str, step: int, num_steps: int, world: World) -> None:
    """Adds this launch to run.json at `path`, or makes the file with a new id.

    step, num_steps: where the launch begins and where the run ends.
    """
    before: Any = {}
    with suppress(UserError):
        before = read_json(path)
    held = before if isinstance(before, dict) else {}
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
            "data_digest": data_digest,
            "launches": [*(launches if isinstance(launches, list) else []), launch][-_MAX_LAUNCHES:],
        },
    )


def write_samples(path: Path, samples: Sequence[Mapping[str, object]]) -> None:
    """Writes `samples` to samples.jsonl at `path`, in place of earlier ones with the same `when`."""
    text = ""
    with suppress(OSError, ValueError):
        text = read_text(path, 64 * MEBI)
    replaced = {sample["when"] for sample in samples}
    kept = [line for line in text.splitlines() if _when(line) not in (None, *replaced)]
    write_text(path, "\n".join([*kept, *map(json.dumps, samples)]) + "\n")


def _when(line: str) -> str | None:
    """When a sample was made; None: no run wrote the line."""
    try:
        sample = json.loads(line)
    except (ValueError, RecursionError):
        return None
    when = sample.get("when") if isinstance(sample, dict) else None
    return when if isinstance(when, str) else None
