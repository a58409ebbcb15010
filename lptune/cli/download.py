"""`lptune download`: a checkpoint from the Hugging Face hub, pinned to a commit, without anything that could
run code.

Only safetensors, JSON and tokenizer files are fetched: no pickled weights, no Python. A token comes from the
environment (HF_TOKEN) or `hf auth login`, never from the command line: shell histories and process lists
would show it.
"""

import hashlib
import os
import re
import sys
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import click

from lptune.base import hub_requests
from lptune.base.errors import UserError
from lptune.base.model_folder import check_model_files
from lptune.cli.places import PathArgument

ALLOWED = ("*.safetensors", "*.json", "tokenizer.model", "*.jinja", "vocab.txt", "merges.txt")
IGNORED = (
    "*/*",
    "consolidated*",
)  # folders of other formats, and second copies of the weights in some repositories


_NOT_TAKEN = {
    "--ignore-patterns": "not needed: only safetensors, JSON and tokenizer files are fetched",
    "--hf-token": "not taken, since command lines are seen by others; set HF_TOKEN, or `hf auth login`",
}
"""Option of torchtune's download -> why lptune has no option of that name."""


def _refuse(_: click.Context, option: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise UserError(f"download: {option.opts[0]} is {_NOT_TAKEN[option.opts[0]]}")


@click.command(short_help="Download a checkpoint from the Hugging Face hub.")
@click.argument("repo")
@click.option("--revision", default="main", show_default=True, help="Branch, tag or commit.")
@click.option("--output-dir", type=PathArgument(), help="Folder.  [default: checkpoints/<name>]")
@click.option("--ignore-patterns", hidden=True, expose_value=False, callback=_refuse)
@click.option("--hf-token", hidden=True, expose_value=False, callback=_refuse)
def download(repo: str, revision: str, output_dir: Path | None) -> None:
    """Download the checkpoint REPO (e.g. Qwen/Qwen3-0.6B) and print the commit it came from.

    Gated repositories need HF_TOKEN in the environment. If the folder exists, it must be empty or hold an
    earlier download of REPO, which is then completed; no file that you have edited is overwritten.
    """
    folder = output_dir or Path("checkpoints", repo.rpartition("/")[2])
    _check_place(folder)
    check_model_files(folder)
    with hub_requests.asked(f"{repo}@{revision}" if revision != "main" else repo):
        import huggingface_hub

        api = huggingface_hub.HfApi()
        info = api.model_info(repo, revision=revision, timeout=hub_requests.WAIT_S, files_metadata=True)
        commit, siblings = str(info.sha), info.siblings or []
        listed = {
            str(each.rfilename): str((each.lfs.sha256 if each.lfs else each.blob_id) or "")
            for each in siblings
        }  # name -> digest, which is empty where the hub lists none
    if not any(name.endswith(".safetensors") and "/" not in name for name in listed):
        pickled = next((name for name in listed if name.endswith((".bin", ".pt", ".pth"))), None)
        reason = f", only {pickled}, a pickle, which is never loaded" if pickled else ""
        raise UserError(f"{repo}: holds no safetensors{reason}; choose a repository or revision that does")
    for other in {note.commit for note in _notes(folder).values()} - {commit}:
        with hub_requests.asked(
            f"{folder}: holds a download of commit {other[:12]}, which {repo} may not have",
            "choose another --output-dir",
        ):
            api.model_info(repo, revision=other, timeout=hub_requests.WAIT_S)
    wanted = {name: digest for name, digest in listed.items() if _is_wanted(name)}
    before = {name for name in wanted if (folder / name).exists()}
    _check_unchanged(folder, wanted)
    with hub_requests.asked(repo):
        if not sys.stderr.isatty():  # a log
            huggingface_hub.utils.disable_progress_bars()  # type: ignore[attr-defined]
        huggingface_hub.snapshot_download(
            repo,
            revision=commit,
            local_dir=folder,
            allow_patterns=list(ALLOWED),
            ignore_patterns=list(IGNORED),
        )
    notes = _notes(folder)
    for name in wanted:
        file, note = folder / name, notes.get(name)
        if note is None or note.commit != commit:  # without a connection any folder is taken for the download
            raise UserError(f"{file}: did not come from the hub as of {commit[:12]}; download it again")
        if _DIGEST.fullmatch(note.etag) and _digest_like(note.etag, file) != note.etag:
            if name in before:
                raise UserError(f"{file}: {_DIFFERS}; remove it and download it again")
            file.unlink()  # or it would be taken for downloaded
            raise UserError(f"{file}: {_DIFFERS}; download it again")
    click.echo(f"downloaded {repo} to {folder}")
    click.echo(f"pinned: lptune download {repo} --revision {commit} --output-dir {folder}")


def _is_wanted(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in ALLOWED) and not any(
        fnmatch(name, pattern) for pattern in IGNORED
    )


def _check_place(folder: Path) -> None:
    """Raises UserError if `folder` holds anything but a download, which may be unfinished."""
    if folder.is_symlink() and not folder.exists():
        raise UserError(f"{folder}: is a link to nowhere; choose another --output-dir")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is not a folder; choose another --output-dir")
    cache = folder / ".cache"
    if folder.is_dir() and not (folder / _NOTES).is_dir() and any(path != cache for path in folder.iterdir()):
        raise UserError(f"{folder}: is not empty, and no download lies there; choose another --output-dir")


def _check_unchanged(folder: Path, digests: Mapping[str, str]) -> None:
    """Raises UserError for a file of `digests` in `folder` that was not downloaded, or was edited after that.

    digests: name -> digest of the file on the hub, or empty. A file that has it, or that of its note, counts
    as downloaded, whatever its time: it may be a copy, or a kill came before its note. Time alone decides
    where there is no digest, and for weights that are older than their note: those are hashed at the end.
    """
    notes = _notes(folder)
    for name, digest in digests.items():
        file, note = folder / name, notes.get(name)
        if not file.exists():
            continue
        known = {each for each in (digest, note.etag if note else "") if _DIGEST.fullmatch(each)}
        is_weights = name.endswith(".safetensors")
        if note and file.stat().st_mtime - 1 <= note.time_s and (is_weights or not known):
            continue
        if file.is_file() and any(_digest_like(each, file) == each for each in known):
            continue
        raise UserError(
            f"{file}: is not as it was downloaded, and would be overwritten; move it away, or choose another "
            "--output-dir"
        )


_DIFFERS = "differs from the file on the hub (another digest)"


def verify_digests(folder: Path) -> int:
    """Compares large files with the sha256 that the hub sent (their etag); returns how many. Raises UserError
    for a file that differs. Small files are left out: a config.json may have been edited.
    """
    noted = {name: note.etag for name, note in _notes(folder).items()}
    large = {name: etag for name, etag in noted.items() if _DIGEST.fullmatch(etag) and len(etag) == 64}
    for name, digest in large.items():
        if _digest_like(digest, folder / name) != digest:
            raise UserError(f"{folder / name}: {_DIFFERS}; remove it and download it again")
    return len(large)


_DIGEST = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
"""git's SHA-1 of a small file, sha256 of a large one."""


def _digest_like(digest: str, file: Path) -> str:
    """The digest of `file`, of the kind of `digest`."""
    with file.open("rb") as content:
        if len(digest) == 64:
            return hashlib.file_digest(content, "sha256").hexdigest()
        header = b"blob %d\0" % os.fstat(content.fileno()).st_size
        return hashlib.file_digest(content, lambda: hashlib.sha1(header, usedforsecurity=False)).hexdigest()


_NOTES = ".cache/huggingface/download"


class _Note(NamedTuple):
    """The note that huggingface_hub writes about a file that it has downloaded."""

    commit: str
    etag: str
    """On the hub: sha256 of a large file, git's SHA-1 of a small one."""
    time_s: float
    """When it was written, in seconds since 1970."""


def _notes(folder: Path) -> dict[str, _Note]:
    """Name -> note of the files directly in `folder`; anything that is not a note is left out."""
    notes = {}
    for path in sorted((folder / _NOTES).glob("*.metadata")):
        lines = path.read_text("utf-8", errors="replace").splitlines()
        name = path.name.removesuffix(".metadata")
        if len(lines) == 3 and re.fullmatch(r"\d+\.?\d*", lines[2]) and (folder / name).is_file():
            notes[name] = _Note(lines[0], lines[1], float(lines[2]))
    return notes
