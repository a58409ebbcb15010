"""The Hugging Face hub, and whatever else answers at HF_ENDPOINT: a proxy's page, half an answer, or nothing.

huggingface_hub checks little of what it is sent, and it takes a folder that is there for downloaded where the
hub does not list its files. So what came is compared with what was asked for.
"""

import hashlib
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lptune.config import UserError

WAIT_S = 30.0
"""For an answer; huggingface_hub would wait for ever. Files have its own limit, HF_HUB_DOWNLOAD_TIMEOUT."""

_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, AssertionError, RecursionError)


@contextmanager
def asked() -> Iterator[None]:
    """Questions to the hub within end after a time without an answer. Where nobody watches a terminal, stderr
    is left to errors.
    """
    from huggingface_hub import utils

    if not sys.stderr.isatty():
        utils.disable_progress_bars()  # type: ignore[attr-defined]
        utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    client = utils.get_session()  # type: ignore[attr-defined]
    before, client.timeout = client.timeout, WAIT_S
    try:
        yield
    finally:
        client.timeout = before


def reason(error: Exception, doing: str) -> str:
    """What went wrong, in one line. doing: what did not work, as `cannot be downloaded`.

    An exception that is none of the hub's, of what it answers or of the system's is a bug, and raised.
    """
    from huggingface_hub import constants, errors

    endpoint = re.sub(r"//[^/@]*@", "//", constants.ENDPOINT)  # without a password
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # it is not there, since it could not be asked for
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"{doing}: HF_HUB_OFFLINE is set"
    if isinstance(error, (errors.HfHubHTTPError, OSError)) or type(error).__module__.startswith(
        ("httpx", "httpcore")
    ):
        if type(error).__name__ == "ConnectError" or isinstance(error, errors.LocalEntryNotFoundError):
            return f"{doing}: {endpoint} cannot be reached, or does not answer as a hub does"
        return f"{doing}: {_first_line(error)}"
    if isinstance(error, _MALFORMED):
        return (
            f"{doing}: {endpoint} does not answer as a hub does ({type(error).__name__}: "
            f"{_first_line(error):.80}); check HF_ENDPOINT, and whether a proxy or a login page is in between"
        )
    raise error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def check_download(folder: Path, names: Sequence[str], commit: str) -> None:
    """Raises UserError unless each of `names` is in `folder`, of `commit` and with the bytes of the hub.

    A file with other bytes is removed: huggingface_hub would take it for downloaded, and a run for whole.
    """
    notes = _notes(folder)
    for name in names:
        if not (folder / name).is_file() or notes.get(name, ("", ""))[0] != commit:
            raise UserError(
                f"{folder / name}: did not come from the hub as of {commit[:12]}; download it again"
            )
    try:
        verify_digests(folder)
    except _OtherBytesError as error:
        error.file.unlink()
        raise


class _OtherBytesError(UserError):
    def __init__(self, file: Path) -> None:
        super().__init__(f"{file}: is not what the hub sent (its sha256 differs); download it again")
        self.file = file


def verify_digests(folder: Path) -> int:
    """Compares files with the sha256 that the hub sent along (large ones have it as their etag); how many."""
    num_hashed = 0
    for name, (_, etag) in _notes(folder).items():
        file = folder / name
        if re.fullmatch(r"[0-9a-f]{64}", etag) and file.is_file():
            with file.open("rb") as content:
                if hashlib.file_digest(content, "sha256").hexdigest() != etag:
                    raise _OtherBytesError(file)
            num_hashed += 1
    return num_hashed


def _notes(folder: Path) -> dict[str, tuple[str, str]]:
    """huggingface_hub's notes of a download: file -> (commit, etag)."""
    notes = {}
    for path in sorted((folder / ".cache/huggingface/download").glob("*.metadata")):
        commit, etag, *_ = [*path.read_text(encoding="utf-8", errors="replace").splitlines(), "", ""]
        notes[path.name.removesuffix(".metadata")] = (commit, etag)
    return notes
