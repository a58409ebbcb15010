"""The teacher as a folder of its most probable words (files.py): no second model runs."""

from datetime import date
from pathlib import Path

import torch

from lptune import checkpoint, data, linear, models
from lptune.base.errors import UserError
from lptune.config import DistillConfig
from lptune.distillation.files import Index, Reader, read_index
from lptune.distillation.job import documents_digest, rows_of, tokens_digest
from lptune.distillation.live import LiveTeacher, config_digest, top_k_distillation
from lptune.distillation.top_k import at_temperature, fewer
from lptune.distributed import World


def open_teacher(cfg: DistillConfig, world: World) -> "Teacher":
    """The teacher that `cfg` names. Reads headers only. Raises UserError if it is not there."""
    return LiveTeacher(cfg, world) if cfg.runs_teacher else StoredTeacher(cfg, world)


class StoredTeacher:
    """Log-probabilities that precompute_logits wrote. The methods are those of `LiveTeacher`."""

    model: models.Backbone | None = None
    """No model runs."""
    low: linear.LowPrecision | None = None

    def __init__(self, cfg: DistillConfig, world: World) -> None:
        """Reads the index. Raises UserError if the folder is not complete, or does not serve `cfg`."""
        self._cfg, self._world = cfg, world
        self._index = _complete_index(cfg)
        self.started_on: date | None = date.fromisoformat(self._index.content["started_on"])
        self._reader: Reader | None = None

    @property
    def digest(self) -> str:
        """Identifies the numbers that the student learns from."""
        weights = self._index.made_with["the teacher's weights"]
        return f"{weights}, top {self._cfg.logits.top_k} of {self._index.digest()[:16]}"

    def check_tokens(self, tokenizer: data.Tokenizer, vocab_size: int) -> None:
        """Raises UserError unless the student has the tokens for which the numbers were computed."""
        made_with, folder = self._index.made_with, self._index.folder
        if made_with["tokens"] != tokens_digest(tokenizer):
            raise UserError(
                f"logits.folder: {folder} was computed with another tokenizer than that of "
                f"{tokenizer.folder}; use the student it was computed for, or run precompute_logits into "
                "another folder"
            )
        if made_with["vocab_size"] != vocab_size:
            raise UserError(
                f"logits.folder: {folder} has words of a vocabulary of {made_with['vocab_size']}, "
                f"config.json of model.path has vocab_size {vocab_size}; use a student with as many words"
            )

    def check_rows(self, rows: data.Rows, chat_template: str | None) -> None:
        """Raises UserError unless the numbers are of these documents."""
        index = self._index
        if index.made_with["documents"] != documents_digest(rows):
            cause = checkpoint.causes_of_change(index.content["rows"], rows_of(self._cfg, chat_template))
            raise UserError(
                f"logits.folder: {index.folder} was computed for other training documents (changed: "
                f"{cause}); restore it, or run precompute_logits into another folder"
            )
        self._reader = Reader(index, rows.documents.num_targets_N)
        targets, k = index.content["num_targets"], self._cfg.logits.top_k
        self._world.print(f"teacher: the top {k} words of {targets:,} targets from {index.folder}")

    def on_meta(self) -> None:
        """Nothing that `training.check_memory` would count: no model runs."""

    def load(self) -> None:
        """Nothing to load: rows are read when they are needed."""

    def objective(self, batch: data.Batch) -> models.Objective:
        """The loss of the section `distillation` for each token of `batch`, which is on the CPU."""
        assert self._reader is not None, "check_rows comes first"
        goal, device, shape = self._cfg.distillation, self._world.device, batch.labels_BS.shape
        k, temperatures = self._cfg.logits.top_k, self._index.temperatures
        is_target_T = batch.labels_BS.flatten() != models.IGNORE_INDEX
        documents = batch.numbers_D[batch.numbers_D >= 0].tolist()
        column = temperatures.index(goal.temperature)
        # Tokens without a target get zeros: any finite numbers, since the objective ignores them.
        log_p_Tk = torch.zeros(len(is_target_T), k, device=device)
        words_Tk = torch.zeros(len(is_target_T), k, dtype=torch.int32, device=device)
        log_rest_T = torch.zeros(len(is_target_T), device=device)
        if documents:
            found = fewer(self._reader.read(documents), k, temperatures)
            # The targets of a document stand in order, and so do the documents of a batch.
            places = torch.nonzero(is_target_T)[:, 0].to(device, non_blocking=True)
            log_p_nk, words_nk, log_rest_nM = (each.to(device, non_blocking=True) for each in found)
            log_p_nk, log_rest_n = at_temperature(log_p_nk, log_rest_nM[:, column], goal.temperature)
            log_p_Tk[places], words_Tk[places], log_rest_T[places] = log_p_nk, words_nk, log_rest_n
        return top_k_distillation(
            log_p_Tk.unflatten(0, shape), words_Tk.unflatten(0, shape), log_rest_T.unflatten(0, shape), goal
        )


Teacher = LiveTeacher | StoredTeacher
"""What a student learns from."""


def _complete_index(cfg: DistillConfig) -> Index:
    assert cfg.logits.folder is not None
    folder = Path(cfg.logits.folder).expanduser()
    index = read_index(folder)
    if index is None:
        raise UserError(
            f"logits.folder: {folder} has no logits.json; write it with `lptune run precompute_logits` and "
            "the same config, or set logits.folder=null to run the teacher"
        )
    if not index.is_complete:
        raise UserError(
            f"logits.folder: {folder} is not complete; run precompute_logits again, which continues it"
        )
    top_k = index.made_with["logits.top_k"]
    if cfg.logits.top_k > top_k:
        raise UserError(
            f"logits.top_k: {cfg.logits.top_k} is more than the {top_k} words in {folder}; lower it, or run "
            "precompute_logits into another folder"
        )
    if cfg.distillation.temperature not in index.temperatures:
        there = ", ".join(f"{each:g}" for each in index.temperatures)
        raise UserError(
            f"distillation.temperature: {cfg.distillation.temperature:g} is not among those of {folder} "
            f"({there}); choose one, or run precompute_logits with it into another folder"
        )
    path = cfg.teacher.path
    if path is not None and (its := Path(path).expanduser()).is_dir():
        for what, found in (
            ("weights", checkpoint.weights_digest(its)[:16]),
            ("config.json", config_digest(its)),
        ):
            stored = index.made_with[f"the teacher's {what}"]
            if found != stored:
                raise UserError(
                    f"teacher.path: {its} has other {what} ({found}) than the teacher of {folder} "
                    f"({stored}); set teacher.path=null, or choose the other folder"
                )
    return index
