"""Requests to the Hugging Face hub, whoever makes them: `lptune download`, an export that is uploaded, data.

huggingface_hub waits for an answer for ever, and sleeps as long as an answer tells it to.
Here are the limits for that, and the line that says what went wrong.

Imports nothing of lptune, so that every part may ask.
"""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

WAIT_S = 30.0
"""For an answer; huggingface_hub would wait for ever. Files have its own limit, HF_HUB_DOWNLOAD_TIMEOUT."""

UPLOAD_WAIT_S = 300.0
"""For an answer to an upload: the hub takes its time over a commit of large files. Not the whole upload's."""

MAX_TOLD_WAIT_S = 30.0
"""The longest that an answer may tell huggingface_hub to sleep before it asks again."""

_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, AssertionError, RecursionError)
"""What huggingface_hub raises over an answer that it does not understand."""


class OddAnswerError(Exception):
    """What no hub answers."""


class _LongWaitError(Exception):
    """The hub answers that one should ask again much later."""


@contextmanager
def session(wait_s: float | None = None) -> Iterator[None]:
    """Around calls of huggingface_hub, or of datasets, which calls it.

    A request ends after `wait_s` seconds without an answer, WAIT_S by default, and where an answer tells to
    wait longer than MAX_TOLD_WAIT_S. Unless stderr is a terminal, only errors are written there.
    """
    from huggingface_hub import set_client_factory, utils
    from huggingface_hub.utils import _http

    # No public name returns the factory that is set: it has to be put back, and wrapped. A client made here
    # would lack the hook by which HF_HUB_OFFLINE works, or the certificates that a user's factory brings; a
    # client changed here is replaced by a new one when a connection fails.
    factory = _http._GLOBAL_CLIENT_FACTORY
    verbosity = utils.logging.get_verbosity()
    if not sys.stderr.isatty():
        utils.disable_progress_bars()  # type: ignore[attr-defined]
        utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    set_client_factory(lambda: _client(factory, WAIT_S if wait_s is None else wait_s))
    try:
        yield
    finally:
        set_client_factory(factory)
        utils.logging.set_verbosity(verbosity)


@contextmanager
def asked(wait_s: float | None = None) -> Iterator[None]:
    """A `session` for calls of huggingface_hub, and nothing else: what they raise over a malformed answer
    becomes an OddAnswerError, which the same exception of our own code must not.
    """
    from huggingface_hub import errors

    try:
        with session(wait_s):
            yield
    except (errors.HFValidationError, OSError):  # OSError: of the hub's errors, too
        raise
    except _MALFORMED as error:
        raise OddAnswerError(f"{type(error).__name__}: {first_line(error)}") from error


def _client(factory: Callable[[], Any], wait_s: float) -> Any:
    """An httpx.Client, of httpx or httpx2, as huggingface_hub has them."""
    client = factory()
    client.timeout = wait_s
    hooks = client.event_hooks
    client.event_hooks = {**hooks, "response": [*hooks.get("response", []), _refuse_long_wait]}
    return client


def _refuse_long_wait(response: Any) -> None:
    """For what huggingface_hub obeys: `Retry-After` in seconds, and `ratelimit` where no request is left."""
    if response.status_code not in (408, 429) and response.status_code < 500:
        return
    told = re.fullmatch(r"\s*(\d+)\s*", response.headers.get("retry-after", ""))
    if response.status_code == 429:
        told = re.search(r"\br\s*=\s*0+\s*;\s*t\s*=\s*(\d+)", response.headers.get("ratelimit", "")) or told
    if told is None:
        return
    told_s = float(told[1])  # of a thousand digits, too
    what = f"the hub answers {response.status_code} and asks to wait {told_s:.0f} s"
    if told_s > MAX_TOLD_WAIT_S:
        raise _LongWaitError(f"{what}; run the command again then")
    print(f"note: {what}", file=sys.stderr)


def reason(error: Exception, doing: str) -> str:
    """What went wrong, in one line. doing: what did not work, as `cannot be downloaded`.

    An exception that is neither the hub's or the system's nor about an answer is a bug, and raised.
    """
    from huggingface_hub import constants, errors

    endpoint = re.sub(r"//[^/@]*@", "//", constants.ENDPOINT)  # without a password
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # it is not there, since it could not be asked for
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"{doing}: HF_HUB_OFFLINE is set"
    if isinstance(error, (errors.HfHubHTTPError, OSError, _LongWaitError)) or type(
        error
    ).__module__.startswith(("httpx", "httpcore")):
        if type(error).__name__ == "ConnectError" or isinstance(error, errors.LocalEntryNotFoundError):
            return f"{doing}: {endpoint} cannot be reached, or does not answer as a hub does"
        return f"{doing}: {first_line(error)}"
    if isinstance(error, OddAnswerError):
        return (
            f"{doing}: {endpoint} does not answer as a hub does ({first_line(error):.100}); check "
            "HF_ENDPOINT, and whether a proxy or a login page is in between"
        )
    raise error


def first_line(error: Exception) -> str:
    """Of its message; its type where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
