"""A checkpoint of version 3, written out by hand: what lptune 0.1 left on disks, whatever lptune writes now.

    step-00000002/  model-00000.safetensors, optimizer-00000.safetensors, …  a pair for each rank
                    replicated-00000.safetensors  what every rank had alike
                    state.json
                    manifest.json  version, step, world_size, versions, files, shards, and a digest of these

Nothing of lptune.checkpoint is used, so that a change of it cannot change what it is tested by.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import save_file
from torch import Tensor


class Part(NamedTuple):
    """What a rank holds of a tensor."""

    values: Tensor
    start: int = 0
    """Its first row in the whole."""
    column: int = 0


Files = Mapping[str, Mapping[str, Part]]
"""model, optimizer or replicated -> name of a tensor -> a rank's part."""


def write(folder: Path, step: int, ranks: Sequence[Files], state: dict[str, Any], versions: Any) -> Path:
    """Publishes `folder/step-N`; returns it. versions: of lptune and torch."""
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    files: dict[str, Any] = {}
    shards: dict[str, list[dict[str, Any]]] = {}
    for rank, groups in enumerate(ranks):
        for group, parts in groups.items():
            file = f"{group}-{rank:05d}.safetensors"
            save_file({name: part.values for name, part in parts.items()}, path / file, {"format": "pt"})
            files[file] = _entry(path / file)
            for name, (values, start, column) in parts.items():
                rows, columns = (*values.shape, 1, 1)[:2]
                shard = {"file": file, "start": start, "rows": rows, "column": column, "columns": columns}
                shards.setdefault(name, []).append(shard | {"at": 0})
    _write_text(path / "state.json", json.dumps({"step": step, **state}, indent=2) + "\n")
    files["state.json"] = _entry(path / "state.json")
    content = {
        "version": 3,
        "step": step,
        "world_size": len(ranks),
        "versions": versions,
        "files": files,
        "shards": shards,
    }
    body = json.dumps(content, indent=2)[: -len("\n}")]
    digest = hashlib.sha256(body.encode()).hexdigest()
    _write_text(path / "manifest.json", f'{body},\n  "digest": "{digest}"\n}}\n')
    return path


def _entry(file: Path) -> dict[str, Any]:
    content = file.read_bytes()
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
