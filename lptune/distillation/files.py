"""The folder of a teacher's log-probabilities: logits.json and safetensors files.

    logits.json                     the index: what the numbers were computed from, and the files
    logits-00000-of-00012.safetensors
        log_p     (n, k) float16 or float32   the k largest log-probabilities of a token, the largest first
        words     (n, k) int32                the words they belong to
        log_rest  (n, M) as log_p             of all other words, for each of the M temperatures (top_k.py)
        crc32     (D,)   int64                a checksum of the rows of each document

The n tokens are the supervised tokens of D consecutive documents of the training data, in order: no token
without a target is stored. Numbers belong to documents and not to packed rows, so the seed, packing, batch
sizes and number of ranks of the training do not matter.

A file is written under a temporary name, flushed, and renamed. Its metadata have a digest of `made_with`. So
a job that continues after a kill knows a finished file of its own by its header. logits.json exists from the
beginning of the job; `is_complete` is set in the end. Readers map files into memory and copy the rows of one
document at a time, after which the checksum tells whether they are what was written.
"""

import bisect
import functools
import hashlib
import itertools
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lptune.base.errors import UserError
from lptune.base.files import read_json, replacing, write_json
from lptune.checkpoint.files import WRITE_ERRORS, why
from lptune.distillation.top_k import TopK

INDEX = "logits.json"
FORMAT = 1
_KEY = "lptune"
_MAX_OPEN = 64
"""Number of files that a reader keeps open."""


@dataclass(frozen=True)
class FileEntry:
    """A file of the index."""

    name: str
    first_document: int
    num_documents: int
    num_targets: int
    num_bytes: int
    digest: str
    """sha256 of its checksums."""


@dataclass(frozen=True)
class Index:
    """The content of logits.json, and the folder it is in."""

    folder: Path
    content: dict[str, Any]

    @property
    def made_with(self) -> dict[str, Any]:
        """What decides the numbers, by name."""
        found: dict[str, Any] = self.content["made_with"]
        return found

    @property
    def is_complete(self) -> bool:
        """Whether all files are there."""
        return bool(self.content["is_complete"])

    @property
    def files(self) -> list[FileEntry]:
        """The files, in the order of their documents; empty before the end of the job."""
        return [FileEntry(**each) for each in self.content["files"]]

    @property
    def temperatures(self) -> tuple[float, ...]:
        """The temperatures of the columns of log_rest."""
        return tuple(self.made_with["temperatures"])

    @property
    def made_with_digest(self) -> str:
        """A sha256 of `made_with`, which each file repeats."""
        return digest_of(self.made_with)

    def digest(self) -> str:
        """A sha256 that identifies the numbers of all files."""
        return digest_of({key: self.content[key] for key in ("made_with", "files")})


def digest_of(value: Any) -> str:
    """sha256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def read_index(folder: Path) -> Index | None:
    """The index of a folder; None if it has none. Raises UserError if lptune did not write it."""
    path = folder / INDEX
    if not path.exists():
        return None
    content = read_json(path)
    number = content.get("format") if isinstance(content, dict) else None
    if isinstance(number, int) and number > FORMAT:
        raise UserError(f"{path}: has format {number}, this lptune reads {FORMAT}; install a newer one")
    if number != FORMAT or not _is_index(content):
        raise UserError(f"{path}: is not an index of precompute_logits; choose another folder")
    return Index(folder, content)


_MADE_WITH = {
    "the teacher's weights", "the teacher's config.json", "tokens", "documents", "logits.top_k", "vocab_size",
    "temperatures",
}  # fmt: skip


def _is_index(content: dict[str, Any]) -> bool:
    """Whether everything that is read from an index is there. Files follow each other."""
    try:
        files = [FileEntry(**each) for each in content["files"]]
        stops = [0, *itertools.accumulate(each.num_documents for each in files)]
        follow = [each.first_document for each in files] == stops[:-1]
        are_beside = all(Path(each.name).name == each.name for each in files)
        is_whole = stops[-1] == content["num_documents"] or not content["is_complete"]
        date.fromisoformat(content["started_on"])
        keys = content["made_with"].keys() >= _MADE_WITH and content.keys() >= {"rows", "num_targets"}
        return bool(follow and are_beside and is_whole and keys)
    except (LookupError, TypeError, ValueError, AttributeError):
        return False


def write_index(folder: Path, content: Mapping[str, Any]) -> None:
    """Writes `content` and the number of the format to logits.json, durably."""
    write_json(folder / INDEX, {"format": FORMAT, **content})


def file_name(number: int, num_files: int) -> str:
    """The name of a file."""
    return f"logits-{number:05d}-of-{num_files:05d}.safetensors"


def write_file(path: Path, found: TopK, num_targets_D: npt.NDArray[np.int64], made_with: str) -> None:
    """Writes a file durably; at `path` it is complete or not there. Raises UserError if the disk does not
    take it.

    found: on the CPU, of all targets of D documents. made_with: digest of what decides the numbers.
    """
    tensors = {
        "log_p": found.log_p_Tk,
        "words": found.words_Tk,
        "log_rest": found.log_rest_TM,
        "crc32": torch.tensor(
            [_checksum(TopK(*(each[a:b] for each in found))) for a, b in _bounds(num_targets_D)],
            dtype=torch.int64,
        ),
    }
    try:
        with replacing(path) as partial:
            save_file(tensors, partial, metadata={_KEY: made_with})
            partial.chmod(path.parent.stat().st_mode & 0o666)  # safetensors makes its files private
    except WRITE_ERRORS as error:
        raise UserError(
            f"logits.folder: {path} cannot be written ({why(error)}); run again to continue"
        ) from None


def entry_of(path: Path, first_document: int, num_documents: int, made_with: str) -> FileEntry | None:
    """The entry of a finished file of the job `made_with`; None if there is no such file."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            crc_D = file.get_tensor("crc32")
            num_targets = file.get_slice("log_p").get_shape()[0]
            if (file.metadata() or {}).get(_KEY) != made_with or len(crc_D) != num_documents:
                return None
    except (SafetensorError, OSError):
        return None
    size = path.stat().st_size
    return FileEntry(path.name, first_document, num_documents, num_targets, size, _digest(crc_D))


def _digest(crc_D: Tensor) -> str:
    return hashlib.sha256(crc_D.numpy().tobytes()).hexdigest()[:16]


class Reader:
    """Reads the numbers of documents. Memory: the rows that are asked for; files are mapped."""

    def __init__(self, index: Index, num_targets_N: npt.NDArray[np.int64]) -> None:
        """num_targets_N: number of targets of each document. Raises UserError if a file is missing or has
        another size than in the index.
        """
        self._index, self._files = index, index.files
        self._first = [each.first_document for each in self._files]
        self._offsets = np.r_[0, np.cumsum(num_targets_N)].astype(np.int64)
        self._file = functools.lru_cache(maxsize=_MAX_OPEN)(self._opened)
        for each in self._files:
            path = index.folder / each.name
            size = path.stat().st_size if path.is_file() else None
            if size != each.num_bytes:
                found = "is not there" if size is None else f"has {size:,} bytes, not {each.num_bytes:,}"
                raise UserError(f"logits.folder: {path} {found}; remove it and run precompute_logits again")

    def read(self, documents: Sequence[int]) -> TopK:
        """The numbers of all targets of `documents`, in order, on the CPU. Raises UserError for rows that are
        damaged.
        """
        parts = [self._read(each) for each in documents]
        return TopK(*(torch.cat(each) for each in zip(*parts, strict=True)))

    def _read(self, document: int) -> TopK:
        entry = self._files[bisect.bisect_right(self._first, document) - 1]
        start = int(self._offsets[entry.first_document])
        first, stop = (int(each) - start for each in self._offsets[document : document + 2])
        path, place = self._index.folder / entry.name, document - entry.first_document
        try:
            file = self._file(entry)
            found = TopK(*(file.get_slice(name)[first:stop] for name in ("log_p", "words", "log_rest")))
            crc = int(file.get_slice("crc32")[place : place + 1])
        except UserError:
            raise
        except (SafetensorError, OSError, ValueError, IndexError, RuntimeError) as error:
            raise UserError(f"logits.folder: {path} cannot be read ({error!s:.80})") from None
        if _checksum(found) != crc or not self._is_possible(found, stop - first):
            raise UserError(
                f"logits.folder: {path} is damaged: the rows of document {document:,} do not match their "
                "checksum; remove the file and run precompute_logits again"
            )
        return found

    def _is_possible(self, found: TopK, num_targets: int) -> bool:
        """Whether shapes, words and numbers can be those of a job with this index: a word that does not exist
        would end the process on a GPU, and a NaN the training.
        """
        k, num_words = (int(self._index.made_with[key]) for key in ("logits.top_k", "vocab_size"))
        shapes = [(num_targets, k), (num_targets, k), (num_targets, len(self._index.temperatures))]
        if [tuple(each.shape) for each in found] != shapes or found.words_Tk.dtype != torch.int32:
            return False
        if int(found.words_Tk.min()) < 0 or int(found.words_Tk.max()) >= num_words:
            return False
        # Rounding to float16 may leave a probability a little above 1; a NaN fails the comparison.
        return bool((found.log_p_Tk <= 1e-3).all() and not found.log_rest_TM.isnan().any())

    def _opened(self, entry: FileEntry) -> Any:
        path = self._index.folder / entry.name
        file: Any = safe_open(os.fspath(path), framework="pt")
        made_with, crc_D = (file.metadata() or {}).get(_KEY), file.get_tensor("crc32")
        if made_with != self._index.made_with_digest or _digest(crc_D) != entry.digest:
            raise UserError(
                f"logits.folder: {path} is not the file that {INDEX} names (damaged, or of another job); "
                "remove the file and run precompute_logits again"
            )
        return file


def _bounds(num_targets_D: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    stops = np.cumsum(num_targets_D).tolist()
    return list(itertools.pairwise([0, *stops]))


def _checksum(found: TopK) -> int:
    crc = 0
    for each in found:
        tensor: Tensor = each.contiguous()
        crc = zlib.crc32(tensor.numpy().data, crc)
    return crc
