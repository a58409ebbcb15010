"""What the launchers of several machines tell each other before a rank starts, so that all run the same.

A command that differs on one machine would train a mixture (another learning rate), hang (another number of
steps) or end in a C++ abort (another kind of precision). So every key of the config is compared, with the
recipe's text and the versions. Two things are not: paths that may be local to a machine, whose content the
ranks compare (checkpoint/resume.py), and how many ranks a machine has.

A key is told by a digest of its value and by what the config has in its place: `${…}` stays as it is written,
so that no value of an environment variable leaves its machine.
"""

import hashlib
import sys
from collections.abc import Mapping
from typing import Any

from lptune import __version__
from lptune.config import as_written, key_paths

Told = dict[str, list[str]]
"""Name -> [digest, what a message shows]."""
LOCAL = frozenset({
    "model.path", "teacher.path", "logits.folder", "data.source", "data.cache",
    "data.chat_template", "prompts.source", "prompts.chat_template", "harness.task_folder",
})  # fmt: skip
"""Keys whose values are paths that may differ."""


def tell(cfg: Any, **others: object) -> Told:
    """What this machine is about to run. cfg: a config dataclass. others: what else must be the same."""
    import torch

    version = ".".join(map(str, sys.version_info[:2]))
    values = {"lptune": __version__, "torch": torch.__version__, "Python": version, **others}
    told = {name: [_digest(value), f"{value!s:.80}"] for name, value in values.items()}
    written = as_written(cfg)
    for key in key_paths(type(cfg)):
        if key not in LOCAL:
            told[key] = [_digest(_leaf(cfg, key)), f"{_leaf(written, key)!s:.80}"]
    return told


def difference(here: Mapping[str, list[str]], there: Mapping[str, list[str]]) -> tuple[str, str, str] | None:
    """The first name whose values differ, with what `here` and `there` have; None: all are the same."""
    for key in {**here, **there}:
        mine, other = here.get(key, ["", "nothing"]), there.get(key, ["", "nothing"])
        if mine[0] != other[0]:
            return key, mine[1], other[1] if other[1] != mine[1] else f"another {other[1]}"
    return None


def _leaf(holder: Any, key: str) -> Any:
    for name in key.split("."):
        holder = holder[name] if isinstance(holder, dict) else getattr(holder, name)
    return holder


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode(errors="surrogatepass")).hexdigest()[:16]
