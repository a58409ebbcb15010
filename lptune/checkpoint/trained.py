"""A model that is used and not trained: where its weights, its config.json and its tokenizer are.

    a Hugging Face folder, an export         all in that folder
    a checkpoint (checkpoints/step-N)       weights there, the rest in the base checkpoint of its state.json
    the folder of a run                      its newest intact checkpoint

All three are read by headers first, so that a wrong path is reported before a weight is read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from types import MappingProxyType

from torch import Tensor, nn

from lptune.base.errors import UserError
from lptune.checkpoint.export import EMA
from lptune.checkpoint.files import sha256
from lptune.checkpoint.hf import Base, load_hf, read_base, weights_digest
from lptune.checkpoint.hosts import check_same
from lptune.checkpoint.load import load_weights
from lptune.checkpoint.manifest import NAME as MANIFEST
from lptune.checkpoint.manifest import Manifest, verify
from lptune.checkpoint.resume import newest_of_run
from lptune.checkpoint.state import base_digests, check_base, read_state
from lptune.distributed import World


@dataclass(frozen=True)
class Trained:
    """A model of a Hugging Face folder or of a checkpoint, before its weights are read."""

    base: Base
    """The folder of config.json and the tokenizer. Without a checkpoint also that of the weights."""
    checkpoint: Manifest | None
    """The verified checkpoint that has the weights; None: `base` has them."""
    chat_template: str | None
    """Text of the chat template that the run used instead of the tokenizer's; `none`: it used no template;
    None: the tokenizer's."""
    started_on: date | None
    """The day on which the run began, for chat templates that print a date; None without a checkpoint."""
    learned_stops: tuple[int, ...] = ()
    """Of a checkpoint: ids that end the answers of its training rows. The files of a folder have its own."""

    @property
    def folder(self) -> Path:
        """The folder of the weights."""
        return self.checkpoint.folder if self.checkpoint else self.base.folder

    def digest(self) -> str:
        """Identifies the weights, without reading all of them: of a checkpoint by its manifest."""
        return sha256(self.folder / MANIFEST) if self.checkpoint else weights_digest(self.folder)

    def check_same(self, world: World) -> None:
        """Raises UserError if ranks have found different weights, config.json or tokenizer. A collective."""
        if world.size > 1:
            own = {"checkpoint": self.digest()} if self.checkpoint else {}
            check_same("model.path", repr(base_digests(self.base.folder) | own), world)

    def load(self, model: nn.Module, tensors: Mapping[str, Tensor] = MappingProxyType({})) -> None:
        """Fills the parameters of `model`, in place, cast to their dtype.

        model: from `base.build_on_meta`, with storage. tensors: further tensors, as in `load_state`. They are
        filled if a checkpoint has them. Raises UserError as `load_hf` and `load_state` do.
        """
        if self.checkpoint is None:
            load_hf(model, self.base.index)
        else:
            load_weights(self.checkpoint, model, tensors)


def read_trained(path: str, say: Callable[[str], None]) -> Trained:
    """Finds the model that `path` names, see above. path: may begin with ~. say: gets a line for a checkpoint
    that is damaged and passed over, and the lines of `read_base`.

    Raises UserError as `read_base` does, and for a checkpoint that is damaged, or whose base checkpoint is
    not where it was, or is another one.
    """
    folder = Path(path).expanduser()
    if (folder / MANIFEST).is_file():
        return _of_checkpoint(verify(folder), say)
    if (folder / "checkpoints").is_dir() and not (folder / "config.json").exists():
        newest = newest_of_run(folder, say)
        if newest is None:
            raise UserError(f"model.path: {folder} is the folder of a run that has no checkpoint yet")
        return _of_checkpoint(newest, say)
    return Trained(read_base(path, say), None, None, None)


def _of_checkpoint(checkpoint: Manifest, say: Callable[[str], None]) -> Trained:
    state = read_state(checkpoint)
    about = state.about
    if not Path(about.model).is_dir():
        raise UserError(
            f"model.path: {checkpoint.folder} was trained from {about.model}, which has its config.json and "
            "tokenizer and is not there; `lptune export CHECKPOINT DEST --base FOLDER` makes a model folder"
        )
    base = read_base(about.model, say)
    check_base(state, base.folder)
    if any(name.startswith(f"{EMA}/") for name in checkpoint.shards):
        say(f"{checkpoint.folder}: uses the weights of this step; its moving averages are in exports only")
    # `about` has the text of a template. That a run used none is said by the settings of its rows alone.
    of_rows = state.content.get("decides_rows")
    has_none = isinstance(of_rows, dict) and of_rows.get("data.chat_template") == "none"
    template = "none" if has_none else about.chat_template
    return Trained(base, checkpoint, template, state.started_on, tuple((state.stop_tokens or {}).values()))
