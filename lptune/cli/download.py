"""`lptune download`: a checkpoint from the Hugging Face hub, pinned to a commit, without anything that could
run code.

Only safetensors, JSON and tokenizer files are fetched: no pickled weights, no Python. A token comes from the
environment (HF_TOKEN) or `hf auth login`, never from the command line: shell histories and process lists
would show it.
"""

import glob
import re
from fnmatch import fnmatch
from pathlib import Path

import click

from lptune.base import hub_requests
from lptune.base.errors import UserError
from lptune.base.model_folder import check_model_files
from lptune.cli import hub
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
    hub_requests.check_environment()
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    folder = output_dir or Path("checkpoints", repo.rpartition("/")[2])
    try:
        check_outside_checkpoints(folder, "--output-dir")
        hub.check_place(folder)
        check_model_files(folder)
        commit, digests = _list(repo, revision)
        before = {name for name in digests if (folder / name).exists()}
        changed = hub.changed_files(folder, repo, commit, digests)
        with hub_requests.asked():
            huggingface_hub.snapshot_download(
                repo,
                revision=commit,
                local_dir=folder,
                allow_patterns=list(ALLOWED),
                ignore_patterns=[*IGNORED, *map(glob.escape, changed)],
            )
        fetched = {name: digest for name, digest in digests.items() if name not in changed}
        hub.check_download(folder, fetched, commit, before)
    except UserError:
        raise
    except HFValidationError:
        raise UserError(f"{repo}: is not a repository id; give OWNER/NAME, e.g. Qwen/Qwen3-0.6B") from None
    except Exception as error:
        raise UserError(f"{repo}: {_reason(error, revision)}") from None
    for name in changed:
        click.echo(
            f"kept: {folder / name}, which was changed since it was downloaded; remove it to get the hub's"
        )
    click.echo(f"downloaded {repo} to {folder}")
    click.echo(f"pinned: lptune download {repo} --revision {commit} --output-dir {folder}")


def _list(repo: str, revision: str) -> tuple[str, dict[str, str]]:
    """The commit of `revision`, and the files to fetch: name -> digest, which is empty where the hub lists
    none.
    """
    import huggingface_hub

    with hub_requests.asked():
        info = huggingface_hub.HfApi().model_info(
            repo, revision=revision, timeout=hub_requests.WAIT_S, files_metadata=True
        )
    names = [str(sibling.rfilename) for sibling in info.siblings or []]
    if not any(name.endswith(".safetensors") and "/" not in name for name in names):
        pickled = next((name for name in names if name.endswith((".bin", ".pt", ".pth"))), None)
        reason = f", only {pickled}, a pickle, which is never loaded" if pickled else ""
        raise UserError(f"{repo}: holds no safetensors{reason}; choose a repository or revision that does")
    if not re.fullmatch("[0-9a-f]{40}", str(info.sha)):  # it becomes part of a path
        raise hub_requests.OddAnswerError(f"{info.sha!r:.60} is not a commit")
    digests = {}
    for name, sibling in zip(names, info.siblings or [], strict=True):
        if _is_wanted(name):
            if not name.isprintable():  # half a surrogate pair or a NUL: not possible in a path
                raise hub_requests.OddAnswerError(f"{name!a:.60} is not a file name")
            digests[name] = str((sibling.lfs.sha256 if sibling.lfs else sibling.blob_id) or "")
    return str(info.sha), digests


def _is_wanted(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in ALLOWED) and not any(
        fnmatch(name, pattern) for pattern in IGNORED
    )


def _reason(error: Exception, revision: str) -> str:
    """What went wrong and what to do."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "is gated; accept its terms on the hub, then set HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"has no revision {revision!r}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "is not on the hub, or private (set HF_TOKEN)"
    return hub_requests.reason(error, "cannot be downloaded")
