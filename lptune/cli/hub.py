"""Requests to the Hugging Face hub, or to whatever answers at HF_ENDPOINT: perhaps a proxy's login page.

huggingface_hub checks little of what it receives, and if the hub lists no files, it takes an existing folder
for a finished download. So the code here compares the files that came with the files that the hub lists.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from lptune.base import hub_requests
from lptune.base.errors import UserError
from lptune.base.files import kind_of, open_regular


def check_place(folder: Path) -> None:
    """Raises UserError if `folder` holds anything but a download (which may be unfinished), or if its
    download notes are links, through which huggingface_hub would write.
    """
    if kind_of(folder) and not folder.is_dir():
        what = kind_of(folder) if folder.exists() else "a link to nowhere"
        raise UserError(f"{folder}: is {what}; choose another --output-dir")
    cache = folder / ".cache"
    is_download = (folder / _NOTES).is_dir()
    if folder.is_dir() and not is_download and any(path != cache for path in folder.iterdir()):
        raise UserError(f"{folder}: is not empty, and no download lies there; choose another --output-dir")
    # Only where huggingface_hub writes: the user's cache may be next to it, in .cache/huggingface/hub.
    notes, above = folder / _NOTES, (folder / _NOTES).parent
    written = (above / name for name in (".gitignore", ".gitignore.lock", "CACHEDIR.TAG"))
    for path in (cache, above, *written, notes, *notes.rglob("*")):
        kind = kind_of(path)
        if kind == "a file" and path.lstat().st_nlink > 1:
            kind = "a hard link"
        if kind not in ("", "a file", "a folder"):
            raise UserError(f"{path}: is {kind}, through which a download would write; remove it")


def changed_files(folder: Path, repo: str, commit: str, digests: Mapping[str, str]) -> list[str]:
    """Names of the files in `folder` that the user edited after an earlier download, and that stay.

    digests: name -> digest of the files of `commit` on the hub; empty where the hub lists no digest.
    Raises UserError if the folder holds a download of another repository, if something that is not a regular
    file has the name of a file on the hub, and if the download would overwrite a file that came neither from
    an earlier download nor equals the new one: a file from elsewhere, edited weights, or an edited file that
    has also changed on the hub.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RevisionNotFoundError

    notes = _notes(folder)
    for other in {note.commit for note in notes.values()} - {commit}:
        try:
            with hub_requests.asked():
                HfApi().model_info(repo, revision=other, timeout=hub_requests.WAIT_S)
        except RevisionNotFoundError:
            raise UserError(
                f"{folder}: holds a download of commit {other[:12]}, which {repo} does not have: it is of "
                f"another repository, or the commit was removed from {repo}; choose another --output-dir"
            ) from None
    changed = []
    for name, digest in digests.items():
        file, note = folder / name, notes.get(name)
        kind, is_weights = kind_of(file), name.endswith(".safetensors")
        if kind not in ("", "a file"):
            raise UserError(
                f"{file}: is {kind}, where the hub has a file; move it away, or choose another --output-dir"
            )
        if not kind:
            continue
        # Weights are hashed once, at the end (check_download). A small file is hashed: its time proves
        # little.
        if is_weights and note and note.commit == commit and note.is_newer_than(file):
            continue
        if _has_digest(file, digest) or (note and note.describes(file)):
            continue
        is_same_on_hub = note and (note.commit == commit or note.etag == digest)
        if not is_same_on_hub or is_weights:
            raise UserError(
                f"{file}: is not as it was downloaded from {repo}, and would be overwritten; move it away, "
                "or choose another --output-dir"
            )
        changed.append(name)
    return changed


def check_download(folder: Path, digests: Mapping[str, str], commit: str, before: Iterable[str]) -> None:
    """Raises UserError unless each file of `digests` is in `folder`, of `commit`, with the bytes of the hub.

    digests: as in `changed_files`. A file with other bytes is removed, unless it existed `before`: otherwise
    huggingface_hub would take it for downloaded, and a run would take it for intact.
    """
    notes = _notes(folder)
    for name in digests:
        if not (folder / name).is_file() or name not in notes or notes[name].commit != commit:
            raise UserError(
                f"{folder / name}: did not come from the hub as of {commit[:12]}; download it again"
            )
    try:
        _compare(folder, {name: _expected(digest, notes[name].etag) for name, digest in digests.items()})
    except _OtherBytesError as error:
        if error.file.name in before:
            raise
        error.file.unlink()
        raise UserError(str(error).replace("remove it and download", "download")) from None


class _OtherBytesError(UserError):
    def __init__(self, file: Path) -> None:
        super().__init__(
            f"{file}: differs from the file on the hub (another digest); remove it and download it again"
        )
        self.file = file


def verify_digests(folder: Path) -> int:
    """Compares files with the sha256 that the hub sent (the etag of large files); returns how many."""
    return _compare(folder, {name: _expected("", note.etag) for name, note in _notes(folder).items()})


def _expected(listed: str, etag: str) -> set[str]:
    """Digests of which a file must have one: the sha256 listed or sent by the hub, else the listed SHA-1.

    Not every SHA-1 counts: for a large file, a mirror may list the SHA-1 of the pointer to it.
    """
    large = {digest for digest in (listed, etag) if re.fullmatch("[0-9a-f]{64}", digest)}
    return large or {digest for digest in (listed,) if re.fullmatch("[0-9a-f]{40}", digest)}


def _compare(folder: Path, expected: Mapping[str, set[str]]) -> int:
    num_hashed = 0
    for name, digests in expected.items():
        file = folder / name
        if digests and file.is_file():
            if not all(_has_digest(file, digest) for digest in digests):
                raise _OtherBytesError(file)
            num_hashed += 1
    return num_hashed


_NOTES = ".cache/huggingface/download"


class _Note(NamedTuple):
    """The note that huggingface_hub writes about a file that it has downloaded."""

    commit: str
    etag: str
    """On the hub: sha256 of a large file, git's SHA-1 of a small one. A mirror may send anything."""
    time_s: float
    """When it was written, in seconds since 1970."""

    def is_newer_than(self, file: Path) -> bool:
        """Whether the note is newer than `file`: huggingface_hub then takes the file for unchanged."""
        return file.stat().st_mtime - 1 <= self.time_s

    def describes(self, file: Path) -> bool:
        """Whether `file` has the bytes that were downloaded."""
        is_digest = re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", self.etag)
        return _has_digest(file, self.etag) if is_digest else self.is_newer_than(file)


def _notes(folder: Path) -> dict[str, _Note]:
    """Name -> note of the files directly in `folder`; anything that is not a note is left out."""
    notes = {}
    for path in sorted((folder / _NOTES).glob("*.metadata")):
        with open(open_regular(path, os.O_RDONLY), encoding="utf-8", errors="replace") as file:
            lines = file.read(1000).splitlines()
        if (
            len(lines) == 3
            and re.fullmatch("[0-9a-f]{40}", lines[0])
            and re.fullmatch(r"\d+\.?\d*", lines[2])
        ):
            notes[path.name.removesuffix(".metadata")] = _Note(lines[0], lines[1], float(lines[2]))
    return notes


def _has_digest(file: Path, digest: str) -> bool:
    """digest: a sha256, or the SHA-1 by which git names a file. Any other text: False."""
    with open(open_regular(file, os.O_RDONLY), "rb") as content:
        if len(digest) == 64:
            return hashlib.file_digest(content, "sha256").hexdigest() == digest
        header = b"blob %d\0" % os.fstat(content.fileno()).st_size
        git = hashlib.file_digest(content, lambda: hashlib.sha1(header, usedforsecurity=False))
    return git.hexdigest() == digest
