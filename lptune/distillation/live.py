"""The teacher as a model that runs on the ranks of the student (lptune/training/teacher.py)."""

from datetime import date
from pathlib import Path

import torch
from torch import Tensor

from lptune import checkpoint, data, distributed, linear, models, training
from lptune.base.files import read_json
from lptune.config import DistillConfig
from lptune.distillation.files import digest_of
from lptune.distributed import World


def config_digest(folder: Path) -> str:
    """Identifies the content of config.json in a model's folder."""
    return digest_of(read_json(folder / "config.json"))[:16]


class LiveTeacher:
    """A frozen model, sharded over the ranks like the student."""

    started_on: date | None = None
    """The day that chat templates print, if the teacher decides it."""
    model: models.Backbone | None = None
    """The model, after `load`."""
    low: linear.LowPrecision | None = None
    """What verifies its first passes, after `load`."""

    def __init__(self, cfg: DistillConfig, world: World) -> None:
        """Reads the headers of the weights. Raises UserError as `checkpoint.read_base` does."""
        assert cfg.teacher.path is not None
        self._cfg, self._world = cfg, world
        self._base = checkpoint.read_base(cfg.teacher.path, world.print, key="teacher.path")

    @property
    def digest(self) -> str:
        """A digest that identifies the teacher's weights."""
        return checkpoint.weights_digest(self._base.folder)[:16]

    @property
    def config_digest(self) -> str:
        """A digest of config.json, which decides what the weights compute."""
        return config_digest(self._base.folder)

    def check_tokens(self, tokenizer: data.Tokenizer, vocab_size: int) -> None:
        """Raises UserError unless the teacher reads and predicts the same tokens as the student."""
        data.check_same_tokens(tokenizer, vocab_size, self._base.folder, self._base.config.vocab_size)

    def check_rows(self, rows: data.Rows, chat_template: str | None) -> None:
        """Nothing to check: the model can read any rows."""

    def load(self) -> None:
        """Builds, shards and fills the model. A collective."""
        self.model = self._base.build_on_meta()
        plan = training.build_teacher(self.model, self._cfg, self._world)
        distributed.materialize(self.model, self._world, self._cfg)
        total = checkpoint.num_elements_here(self.model)
        with self._world.phase("loading the teacher's weights", total=total) as advance:
            checkpoint.load_hf(self.model, self._base.index, self._world, advance=advance)
        verify = self._cfg.precision.verify
        self.low = linear.LowPrecision(self.model, plan, world=self._world, verify=verify)

    @torch.no_grad()
    def hidden_states(self, batch: data.Batch) -> Tensor:
        """The last hidden states (B, S, H) of `batch`, which may be on the CPU."""
        assert self.model is not None, "load comes first"
        batch = batch.to(self._world.device)
        return self.model.hidden_states(batch.tokens_BS, models.DocumentBounds.of(batch))

    def objective(self, batch: data.Batch) -> models.Objective:
        """The loss of the section `distillation` for each token of `batch`."""
        hidden_BSH = self.hidden_states(batch)
        assert self.model is not None
        return training.distillation(hidden_BSH, self.model, self._cfg.distillation)
