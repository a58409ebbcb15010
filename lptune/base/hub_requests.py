"""Requests to the Hugging Face hub: by `lptune download`, by data sources.

huggingface_hub brings time limits, retries and progress bars of its own. Here its errors become one line.
"""

import re
import socket
import ssl
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from lptune.base.errors import UserError
from lptune.base.text import first_line as plain_line

WAIT_S = 30.0
"""For an answer about a repository; files have HF_HUB_DOWNLOAD_TIMEOUT."""


_OF_CONNECTIONS = (ConnectionError, TimeoutError, socket.gaierror, ssl.SSLError)


@contextmanager
def asked(where: str, todo: str = "") -> Iterator[None]:
    """Around an import of huggingface_hub and calls of it, and nothing else: whatever they raise (for a wrong
    variable of the environment, a lost connection, a proxy's login page, a full disk) becomes a UserError. An
    error from outside huggingface_hub is a bug, and goes on. where: what the line begins with. todo: what it
    ends with.
    """
    try:
        yield
    except Exception as error:
        frames = traceback.walk_tb(error.__traceback__)
        if not any(frame.f_globals.get("__name__", "").startswith("huggingface_hub") for frame, _ in frames):
            raise
        raise UserError(f"{where}: {_reason(error)}{todo and '; '}{todo}") from None


def _reason(error: Exception) -> str:
    """What went wrong and what to do."""
    try:
        from huggingface_hub import constants, errors
    except ValueError:  # it does not take one of the HF_… variables
        return f"huggingface_hub cannot be imported: {first_line(error)}"
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # it is not there, since it could not be asked for
    known = {
        errors.HFValidationError: "is not a repository id; give OWNER/NAME, e.g. Qwen/Qwen3-0.6B",
        errors.GatedRepoError: "is gated; accept its terms on the hub, then set HF_TOKEN",
        errors.RevisionNotFoundError: "has no such revision",
        errors.RepositoryNotFoundError: "is not on the hub, or private (set HF_TOKEN)",
        errors.OfflineModeIsEnabled: "HF_HUB_OFFLINE is set",
    }
    for kind, text in known.items():
        if isinstance(error, kind):
            return text
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    if status == 401:
        return "401: the hub does not accept the token; set another HF_TOKEN"
    if status == 403:
        return "403: the token may not do this; set one that may, or choose another repository"
    if isinstance(error, OSError) and error.errno and not isinstance(error, _OF_CONNECTIONS):
        return first_line(error)  # of this machine: a full disk, no permission
    return f"{without_secrets(constants.ENDPOINT)} does not answer as a hub does: {first_line(error)}"


def without_secrets(text: str) -> str:
    """`text` without user, password, query and fragment of each address in it."""
    return re.sub(r"(://)(?:[^\s/?#]*@)?([^\s?#'\"<>]*)(?:[?#][^\s'\"<>]*)?", r"\1\2", text)


def first_line(error: Exception) -> str:
    """Of its message, `without_secrets`; its type where it has none."""
    return without_secrets(plain_line(error))
