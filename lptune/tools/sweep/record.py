"""sweep.json in the folder of a sweep: its recipe, and which runs have ended, so that they are not started
again.

A run does not know its recipe, so one of another recipe with the same config would seem to be finished. So a
folder holds the sweeps of one recipe, by the name of its file.

A run counts as ended only as long as its config is the same: the record has a digest of it. Whether a run
that was interrupted can go on is decided by `lptune run`, as for any run.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from lptune.base.errors import UserError
from lptune.base.files import kind_of, read_object, write_errors, write_text

FILE = "sweep.json"
RESULTS = (0, 3)
"""Exit codes of a run that is a result: done, and diverged. Any other is started again."""


@dataclass(frozen=True)
class Ended:
    """How a run of the sweep ended."""

    config_digest: str
    exit_code: int
    time_s: float


class Record:
    """The record of the sweep in `folder`, of `recipe`. Raises UserError for a sweep.json that is not one, or
    is of another recipe.
    """

    def __init__(self, folder: Path, recipe: str) -> None:
        self.path, self._recipe = folder / FILE, recipe
        self.ended: dict[str, Ended] = {}
        if not kind_of(self.path):
            return
        content = read_object(self.path, todo="move it away")
        try:
            self.ended = {name: Ended(**each) for name, each in content["runs"].items()}
        except (TypeError, KeyError, AttributeError) as error:
            raise UserError(f"{self.path}: is not the record of a sweep ({error}); move it away") from None
        if (held := content.get("recipe", recipe)) != recipe:
            raise UserError(
                f"{folder}: holds a sweep of {held!r:.60}, not of {recipe!r:.60}; choose another --output-dir"
            )

    def has(self, name: str, config_digest: str) -> bool:
        """Whether this run has ended with a result, with this config, and its folder is still there."""
        ended = self.ended.get(name)
        return (
            ended is not None
            and ended.exit_code in RESULTS
            and ended.config_digest == config_digest
            and (self.path.parent / name / "metrics.jsonl").is_file()
        )

    def add(self, name: str, ended: Ended) -> None:
        """Adds an end and writes the file."""
        self.ended[name] = ended
        content = {"recipe": self._recipe, "runs": {each: asdict(how) for each, how in self.ended.items()}}
        with write_errors(f"{self.path}:", "the same command goes on with the sweep"):
            write_text(self.path, json.dumps(content, indent=1) + "\n")


def digest(text: str) -> str:
    """A digest of a config's YAML."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
