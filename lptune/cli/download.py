"""`lptune download`: a checkpoint from the Hugging Face hub, pinned to a commit, without anything that could
run code.

Only safetensors, JSON and tokenizer files are fetched: no pickled weights, no Python. A token comes from the
environment (HF_TOKEN) or `hf auth login`, never from the command line: shell histories and process lists
would show it.
"""

import glob
import hashlib
import re
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import click

from lptune.base import hub_requests
from lptune.base.errors import UserError
from lptune.base.model_folder import check_model_files
from lptune.cli.path_argument import PathArgument
from lptune.cli.places import check_outside_checkpoints

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
    earlier download of REPO, which is then completed; a config.json that you have edited stays.
    """
    folder = output_dir or Path("checkpoints", repo.rpartition("/")[2])
    check_outside_checkpoints(folder, "--output-dir")
    _check_place(folder)
    check_model_files(folder)
    with hub_requests.asked(f"{repo}@{revision}" if revision != "main" else repo):
        import huggingface_hub

        api = huggingface_hub.HfApi()
        info = api.model_info(repo, revision=revision, timeout=hub_requests.WAIT_S)
        commit, names = str(info.sha), [str(each.rfilename) for each in info.siblings or []]
    if not any(name.endswith(".safetensors") and "/" not in name for name in names):
        pickled = next((name for name in names if name.endswith((".bin", ".pt", ".pth"))), None)
        reason = f", only {pickled}, a pickle, which is never loaded" if pickled else ""
        raise UserError(f"{repo}: holds no safetensors{reason}; choose a repository or revision that does")
    for other in {note.commit for note in _notes(folder).values()} - {commit}:
        with hub_requests.asked(
            f"{folder}: holds a download of commit {other[:12]}, which {repo} may not have",
            "choose another --output-dir",
        ):
            api.model_info(repo, revision=other, timeout=hub_requests.WAIT_S)
    wanted = [name for name in names if _is_wanted(name)]
    changed = _changed(folder, wanted)
    with hub_requests.asked(repo):
        if not sys.stderr.isatty():  # a log
            huggingface_hub.utils.disable_progress_bars()  # type: ignore[attr-defined]
        huggingface_hub.snapshot_download(
            repo,
            revision=commit,
            local_dir=folder,
            allow_patterns=list(ALLOWED),
            ignore_patterns=[*IGNORED, *map(glob.escape, changed)],
        )
    notes = _notes(folder)
    for name in wanted:  # without a connection huggingface_hub takes a folder that is there for the download
        if name not in changed and (name not in notes or notes[name].commit != commit):
            raise UserError(
                f"{folder / name}: did not come from the hub as of {commit[:12]}; download it again"
            )
    verify_digests(folder)
    for name in changed:
        click.echo(
            f"kept: {folder / name}, which was changed since it was downloaded; remove it to get the hub's"
        )
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


def _changed(folder: Path, names: list[str]) -> list[str]:
    """Of `names`, the files in `folder` that were not downloaded, or were edited after that; they stay.
    Raises UserError for weights among them: with the other weights of the hub they would be no model.
    """
    notes, changed = _notes(folder), []
    for name in names:
        file, note = folder / name, notes.get(name)
        if file.exists() and (note is None or file.stat().st_mtime - 1 > note.time_s):
            if name.endswith(".safetensors"):
                raise UserError(
                    f"{file}: is not as it was downloaded, and would be overwritten; move it away, or choose "
                    "another --output-dir"
                )
            changed.append(name)
    return changed


def verify_digests(folder: Path) -> int:
    """Compares files with the sha256 that the hub sent (the etag of large files); returns how many. Raises
    UserError for a file that differs, which huggingface_hub would take for downloaded.
    """
    large = {
        name: note.etag for name, note in _notes(folder).items() if re.fullmatch("[0-9a-f]{64}", note.etag)
    }
    for name, digest in large.items():
        with (folder / name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise UserError(
                    f"{folder / name}: differs from the file on the hub (another digest); remove it and "
                    "download it again"
                )
    return len(large)


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
