"""The job that computes a teacher's log-probabilities for all targets of the training data, file by file.

Consecutive documents go into one file until it has about logits.max_file_mib. The documents of a file are
packed into rows of their own, so the content of a file depends on the documents, the teacher and the config:
not on the number of ranks, and not on which files an earlier launch has finished. Data rank r of n computes
the files r, r + n, … of those that are missing. Because the teacher is sharded over the ranks, all of them
run equally many forwards: a rank whose file has fewer batches gets rows of padding.

A job that continues may have another micro_batch_size or data.packing (less memory, say): its files then
differ from those of the first launch by the rounding of another order of sums.
"""

import hashlib
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import lptune
from lptune import checkpoint, data
from lptune.base.errors import UserError
from lptune.base.files import TEMPORARY, Lock
from lptune.base.text import size_text
from lptune.checkpoint.files import free_bytes, remove_leftover, why
from lptune.config import PrecomputeConfig, RunConfig
from lptune.data.packing import one_document_per_row
from lptune.data.rows import EMPTY_ROW
from lptune.distillation.files import (
    FileEntry,
    digest_of,
    entry_of,
    file_name,
    read_index,
    write_file,
    write_index,
)
from lptune.distillation.live import LiveTeacher
from lptune.distillation.top_k import TEMPERATURES, TopK
from lptune.distributed import World, side_group

_LOCK = ".lock"
_SAY_EVERY_S = 30.0


def tokens_digest(tokenizer: data.Tokenizer) -> str:
    """Identifies the ids of all tokens."""
    return digest_of(sorted(tokenizer.backend.get_vocab(with_added_tokens=True).items()))[:16]


def documents_digest(rows: data.Rows) -> str:
    """Identifies tokens and targets of the documents, in order; packing does not matter."""
    documents, sha = rows.documents, hashlib.sha256()
    for array_T in (documents.tokens_T, documents.is_target_T):
        for piece in documents.end_to_end(array_T):
            sha.update(np.ascontiguousarray(piece).data)
    sha.update(np.ascontiguousarray(documents.offsets_N1).data)
    return sha.hexdigest()[:16]


def rows_of(cfg: RunConfig, chat_template: str | None) -> dict[str, Any]:
    """What decides the documents, by name, for messages."""
    return {**checkpoint.decides_rows(cfg, chat_template), "seed": cfg.seed}


class LogitsJob:
    """The job on this rank. Every rank makes one, and all call its methods in the same order."""

    def __init__(self, cfg: PrecomputeConfig, world: World) -> None:
        """Reads the index of a job to continue. Raises UserError for a folder with other files."""
        assert cfg.logits.folder is not None
        self._cfg, self._world = cfg, world
        self.folder = Path(cfg.logits.folder).expanduser()
        before = read_index(self.folder)
        if before is None and self.folder.exists():
            names = [path.name for path in self.folder.iterdir()]
            # A kill in the first moments leaves the lock, and a temporary file of the index.
            others = [name for name in names if name != _LOCK and not name.startswith(TEMPORARY)]
            if others:
                raise UserError(
                    f"logits.folder: {self.folder} has no logits.json but {sorted(others)[0]}; choose a new "
                    "folder"
                )
        self._before = before
        self.started_on = date.fromisoformat(before.content["started_on"]) if before else date.today()
        """The day that chat templates print: that of the first launch."""
        goal = cfg.distillation.temperature
        self.temperatures = TEMPERATURES if goal in TEMPERATURES else (*TEMPERATURES, goal)
        """The temperatures for which the rest is stored."""
        self.dtype: torch.dtype = getattr(torch, cfg.logits.dtype)
        """Of the stored log-probabilities."""

    def prepare(self, rows: data.Rows, tokenizer: data.Tokenizer, teacher: LiveTeacher, vocab: int) -> None:
        """Cuts the documents of `rows` into files and packs each. vocab: the number of words of the teacher.
        Raises UserError if the folder belongs to a job that would give other numbers, or if the teacher has
        fewer words than logits.top_k.
        """
        cfg = self._cfg
        if cfg.logits.top_k > vocab:
            raise UserError(
                f"logits.top_k: {cfg.logits.top_k} is more than the {vocab} words of the teacher; lower it"
            )
        made_with = {
            "the teacher's weights": teacher.digest,
            "the teacher's config.json": teacher.config_digest,
            "teacher.precision": cfg.teacher.precision,
            "compute_dtype": cfg.compute_dtype,
            "tokens": tokens_digest(tokenizer),
            "vocab_size": vocab,
            "logits.top_k": cfg.logits.top_k,
            "logits.dtype": cfg.logits.dtype,
            "logits.max_file_mib": cfg.logits.max_file_mib,
            "temperatures": list(self.temperatures),
            "documents": documents_digest(rows),
        }
        decides_rows = rows_of(cfg, tokenizer.chat_template)
        if self._before is not None:
            for key, value in made_with.items():
                stored = self._before.made_with.get(key)
                if stored != value:
                    cause = ""
                    if key == "documents":
                        changed = checkpoint.causes_of_change(self._before.content["rows"], decides_rows)
                        cause = f" (a digest of the training documents; changed: {changed})"
                    raise UserError(
                        f"logits.folder: {self.folder} was begun with {key} {stored!r}, this job has "
                        f"{value!r}{cause}; restore it, or choose another folder"
                    )
        self._made_with_digest = digest_of(made_with)
        documents = rows.documents
        self._offsets = np.r_[0, np.cumsum(documents.num_targets_N)].astype(np.int64)
        item = self.dtype.itemsize
        target_bytes = cfg.logits.top_k * (item + 4) + len(self.temperatures) * item
        per_file = max(1, int(cfg.logits.max_file_mib * 2**20 / target_bytes))
        first = np.unique(self._offsets[:-1] // per_file, return_index=True)[1].tolist()
        self._bounds = list(itertools.pairwise([*first, documents.num_documents]))
        self._pack(rows)
        self._num_targets = int(self._offsets[-1])
        self._num_bytes = self._num_targets * target_bytes + 8 * documents.num_documents
        self._content = {
            "made_with": made_with,
            "rows": decides_rows,
            "started_on": self.started_on.isoformat(),
            "num_documents": documents.num_documents,
            "num_targets": self._num_targets,
            "versions": {"lptune": lptune.__version__, "torch": str(torch.__version__)},
        }

    def _pack(self, rows: data.Rows) -> None:
        """Packs the documents of each file into rows; _rows_at[i] is the first row of file i."""
        lengths, numbers, offsets = rows.documents.lengths, [], [np.zeros(1, dtype=np.int64)]
        self._rows_at = [0]
        for first, stop in self._bounds:
            if self._cfg.data.packing:
                packing = data.pack(lengths[first:stop], rows.seq_len, seed=0)
            else:
                packing = one_document_per_row(stop - first)
            numbers.append(packing.documents + first)
            offsets.append(packing.row_offsets[1:] + first)
            self._rows_at.append(self._rows_at[-1] + packing.num_rows)
        packing = data.Packing(np.concatenate(numbers), np.concatenate(offsets))
        self._rows = data.Rows(rows.documents, packing, seq_len=rows.seq_len, pad_id=rows.pad_id)

    @contextmanager
    def begin(self) -> Iterator[bool]:
        """Makes and locks the folder, and prints how much is to do. Yields True if files, or the end of the
        index, are missing. A collective.

        Raises UserError if the folder cannot be written, another job is writing there, or the disk is full.
        """
        lock = None
        try:
            what = "logits.folder: the teacher, the data or the config"
            checkpoint.check_same(what, self._made_with_digest, self._world)
            with side_group(self._world) as group:
                with group.together((UserError, OSError), self._line_of):
                    if self._world.is_main:
                        lock = self._lock()
                        for partial in self.folder.glob(f"{TEMPORARY}logits*"):  # of a killed rank
                            remove_leftover(partial)
                checkpoint.check_shared("logits.folder", self.folder, self._world)
                with group.together((UserError, OSError), self._line_of):
                    self._missing = [i for i in range(len(self._bounds)) if self._entry(i) is None]
                group.total(0)  # no rank writes before all have looked
                with group.together((UserError, OSError), self._line_of):
                    self._check_size()
                    if self._world.is_main and self._missing:
                        write_index(self.folder, {**self._content, "is_complete": False, "files": []})
            is_complete = self._before is not None and self._before.is_complete and not self._missing
            if is_complete:
                self._world.print(f"already finished: {self.folder}")
            yield not is_complete
        finally:
            if lock is not None:
                lock.close()

    def _lock(self) -> Lock:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            return Lock(self.folder / _LOCK)
        except BlockingIOError:
            raise UserError(f"logits.folder: another job is writing to {self.folder}; wait for it") from None

    def _line_of(self, error: Exception) -> str:
        if isinstance(error, UserError):
            return str(error)
        return f"logits.folder: {self.folder} cannot be written ({why(error)}); choose another"

    def _check_size(self) -> None:
        """Prints the size of the files. Raises UserError if the disk is too small."""
        num_files, left = len(self._bounds), len(self._missing)
        print_ = self._world.print
        print_(
            f"{self._num_targets:,} targets x {self._cfg.logits.top_k} words -> "
            f"{size_text(self._num_bytes)} in {num_files:,} files in {self.folder}"
            + (f", {num_files - left:,} of them are there" if left < num_files else "")
        )
        needed = self._num_bytes * left // num_files
        if self._world.is_main and needed > free_bytes(self.folder):
            raise UserError(
                f"logits.folder: {self.folder} needs {size_text(needed)} more, and its disk has "
                f"{size_text(free_bytes(self.folder))}; lower logits.top_k, or choose another disk"
            )

    def _path(self, number: int) -> Path:
        return self.folder / file_name(number, len(self._bounds))

    def _entry(self, number: int) -> FileEntry | None:
        first, stop = self._bounds[number]
        return entry_of(self._path(number), first, stop - first, self._made_with_digest)

    def files(self) -> Iterator["LogitsFile"]:
        """This rank's files, one after the other; all ranks get equally many. Write each of them."""
        size, said_s = self._world.data_size, time.monotonic()
        num_there = len(self._bounds) - len(self._missing)
        for at in range(0, len(self._missing), size):
            group = self._missing[at : at + size]
            rank = self._world.data_rank
            num_rows = max(self._rows_at[i + 1] - self._rows_at[i] for i in group)
            yield LogitsFile(self, group[rank] if rank < len(group) else None, num_rows)
            if time.monotonic() - said_s > _SAY_EVERY_S:
                said_s, num_done = time.monotonic(), num_there + at + len(group)
                self._world.print(f"{num_done:,} of {len(self._bounds):,} files")

    def finish(self) -> None:
        """Completes the index. A collective."""
        with side_group(self._world) as group:
            group.total(0)  # all files are there
            with group.together((UserError, OSError), self._line_of):
                if self._world.is_main:
                    entries = [self._entry(number) for number in range(len(self._bounds))]
                    for number, entry in enumerate(entries):
                        if entry is None:
                            raise UserError(f"logits.folder: {self._path(number)} has disappeared; run again")
                    files = [vars(entry) for entry in entries]
                    write_index(self.folder, {**self._content, "is_complete": True, "files": files})
        self._world.print(f"finished: {self.folder}")


class LogitsFile:
    """A file that this rank is to fill, batch by batch."""

    def __init__(self, job: LogitsJob, number: int | None, num_rows: int) -> None:
        """number: of the file; None: this rank only runs along. num_rows: of the longest file of a rank."""
        self._job, self._number, self._num_rows = job, number, num_rows
        self._parts: TopK | None = None
        if number is None:
            return
        first, stop = job._bounds[number]
        self._start = int(job._offsets[first])
        n, k = int(job._offsets[stop]) - self._start, job._cfg.logits.top_k
        self._parts = TopK(
            torch.empty(n, k, dtype=job.dtype),
            torch.empty(n, k, dtype=torch.int32),
            torch.empty(n, len(job.temperatures), dtype=job.dtype),
        )

    def batches(self) -> Iterator[data.Batch]:
        """The rows of the file in batches of micro_batch_size; then padding until all ranks are through."""
        job, size = self._job, self._job._cfg.micro_batch_size
        first, stop = 0, 0
        if self._number is not None:
            first, stop = job._rows_at[self._number : self._number + 2]
        for at in range(0, self._num_rows, size):
            rows = range(first + at, first + at + size)
            yield job._rows.batch([row if row < stop else EMPTY_ROW for row in rows])

    def add(self, batch: data.Batch, found: TopK) -> None:
        """Takes the numbers of all targets of `batch`, in the order of its tokens."""
        if self._parts is None:
            return
        documents = batch.numbers_D[batch.numbers_D >= 0].tolist()
        offsets = self._job._offsets
        places: list[Tensor] = [torch.arange(*offsets[each : each + 2].tolist()) for each in documents]
        if places:
            at = torch.cat(places) - self._start
            assert len(at) == len(found.words_Tk)
            for part, new in zip(self._parts, found, strict=True):
                part[at] = new.cpu()

    def write(self) -> None:
        """Writes the file. Raises UserError for a number that is NaN, or if the disk does not take it."""
        job = self._job
        if self._parts is None or job._world.rank % job._world.ranks_per_row:
            return
        assert self._number is not None
        if any(part.isnan().any() for part in (self._parts.log_p_Tk, self._parts.log_rest_TM)):
            raise UserError(
                f"teacher.path: the logits of {job._cfg.teacher.path} are not finite; compute with "
                "teacher.precision=none or compute_dtype=float32"
            )
        first, stop = job._bounds[self._number]
        counts = np.diff(job._offsets[first : stop + 1])
        write_file(job._path(self._number), self._parts, counts, job._made_with_digest)
