"""Requests to the Hugging Face hub, by `lptune download`, by an export that is uploaded, and by data sources.

huggingface_hub waits for an answer for ever, sleeps as long as an answer says, prints addresses with their
passwords when it tries again, and does not check its variables and the proxies of the environment. This
module sets limits for all that, and makes the line that says what went wrong.

Imports nothing of lptune but its config, so that every part may ask.
"""

import logging
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from lptune.base.errors import UserError, command_to_install

WAIT_S = 30.0
"""For an answer; huggingface_hub would wait for ever. Files have its own limit, HF_HUB_DOWNLOAD_TIMEOUT."""

UPLOAD_WAIT_S = 300.0
"""For an answer to an upload: the hub takes its time over a commit of large files. Not the whole upload's."""

MAX_TOLD_WAIT_S = 30.0
"""The longest that an answer may tell huggingface_hub to sleep before it asks again."""

_MAX_TOKEN_BYTES = 1024**2
"""Of a file of tokens; each has some forty characters."""

_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, AssertionError, RecursionError)
"""What huggingface_hub raises over an answer that it does not understand."""


class OddAnswerError(Exception):
    """An answer that no hub gives, a login page for example."""


class _LongWaitError(Exception):
    """The hub answers that one should ask again much later."""


class _NoClientError(Exception):
    """The environment's proxies or certificates let nothing be asked."""


def check_environment() -> None:
    """Raises UserError where huggingface_hub could not be imported, or would not come back from a file of
    tokens. To be called before huggingface_hub or datasets is imported.
    """
    _check_endpoint(os.environ.get("HF_ENDPOINT"))
    try:
        from huggingface_hub import constants, get_session  # noqa: F401  (the latter parses the endpoint)
    except ValueError as error:
        names = ", ".join(sorted(name for name in os.environ if name.startswith("HF_")))
        raise UserError(
            f"{names}: huggingface_hub does not take one of these variables ({first_line(error)}); correct "
            "or unset it"
        ) from None
    for path in (constants.HF_TOKEN_PATH, constants.HF_STORED_TOKENS_PATH):
        _check_token_file(path)


def _check_endpoint(endpoint: str | None) -> None:
    if endpoint is None:
        return
    try:
        parts = urlsplit(endpoint)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the port, and of brackets
        is_address = False
    if not is_address or not endpoint.isprintable() or re.search(r"[?#\s]", endpoint):
        # Without the value, a part of which may be a password.
        raise UserError(
            "HF_ENDPOINT: must be the address of a hub, as https://huggingface.co or http://host:8080/path, "
            "without `?`, `#` and blanks; correct or unset it"
        )


def _check_token_file(path: str) -> None:
    if path == os.devnull:  # how one asks without a token
        return
    try:
        about = os.stat(path)
    except (OSError, ValueError):  # huggingface_hub takes what is not there for no token, and says the rest
        return
    if not stat.S_ISREG(about.st_mode) or about.st_size > _MAX_TOKEN_BYTES:
        raise UserError(
            f"{path}: must be a file with a token for the hub (HF_TOKEN_PATH, HF_HOME), and is no regular "
            "file or far too large; set HF_TOKEN instead"
        )


@contextmanager
def session(wait_s: float | None = None) -> Iterator[None]:
    """Around calls of huggingface_hub, or of datasets, which calls it.

    A request ends after `wait_s` seconds without an answer, WAIT_S by default, and where an answer tells to
    wait longer than MAX_TOLD_WAIT_S. Unless stderr is a terminal, only errors are written there; never with
    a password or a query of an address.
    """
    from huggingface_hub import set_client_factory, utils
    from huggingface_hub.utils import _http

    # No public name returns the factory that is set: it has to be put back, and wrapped. A client made here
    # would lack the hook by which HF_HUB_OFFLINE works, or the certificates that a user's factory brings; a
    # client changed here is replaced by a new one when a connection fails.
    factory = _http._GLOBAL_CLIENT_FACTORY
    verbosity = utils.logging.get_verbosity()
    has_bars = not utils.are_progress_bars_disabled()  # type: ignore[attr-defined]
    if not sys.stderr.isatty():
        utils.disable_progress_bars()  # type: ignore[attr-defined]
        utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    handlers, cut = logging.getLogger("huggingface_hub").handlers, _CutSecrets()
    for handler in handlers:
        handler.addFilter(cut)
    set_client_factory(lambda: _client(factory, WAIT_S if wait_s is None else wait_s))
    try:
        yield
    finally:
        set_client_factory(factory)
        for handler in handlers:
            handler.removeFilter(cut)
        utils.logging.set_verbosity(verbosity)
        if has_bars:
            utils.enable_progress_bars()  # type: ignore[attr-defined]


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
    try:
        client = factory()
    except Exception as error:  # nothing was asked yet: a client reads the environment alone
        raise _NoClientError(_no_client(error)) from error
    client.timeout = wait_s
    hooks = client.event_hooks
    client.event_hooks = {**hooks, "response": [*hooks.get("response", []), _refuse_long_wait]}
    return client


_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


def _no_client(error: Exception) -> str:
    proxies = [name for name in os.environ if name.upper() in _PROXIES and os.environ[name]]
    socks = [name for name in proxies if os.environ[name].startswith("socks")]
    if isinstance(error, ImportError) and "socksio" in str(error) and socks:
        return (
            f"{', '.join(socks)}: a SOCKS proxy needs the package socksio; {command_to_install(['socksio'])}"
        )
    if isinstance(error, OSError):
        names = [name for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if os.environ.get(name)]
        return (
            f"{', '.join(names) or 'certificates'}: cannot be read ({first_line(error)}); correct or unset it"
        )
    proxies += [name for name in os.environ if name.upper() == "NO_PROXY"]
    # Without what the error says, which may be a part of a password.
    return (
        f"{', '.join(proxies) or 'the environment'}: names a proxy that cannot be used; give it as "
        "http://host:port or socks5://host:port"
    )


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


class _CutSecrets(logging.Filter):
    """Of what huggingface_hub logs: the addresses of requests that it makes again."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = without_secrets(record.getMessage()), ()
        return True


def without_secrets(text: str) -> str:
    """`text` without user, password, query and fragment of each address in it."""
    return re.sub(r"(://)(?:[^\s/?#]*@)?([^\s?#'\"<>]*)(?:[?#][^\s'\"<>]*)?", r"\1\2", text)


def reason(error: Exception, doing: str) -> str:
    """What went wrong, in one line. doing: what did not work, as `cannot be downloaded`.

    An exception that is neither the hub's or the system's nor about an answer is a bug, and raised.
    """
    from huggingface_hub import constants, errors

    endpoint = without_secrets(constants.ENDPOINT)
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # it is not there, since it could not be asked for
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"{doing}: HF_HUB_OFFLINE is set"
    if isinstance(error, (errors.HfHubHTTPError, OSError, _LongWaitError, _NoClientError)) or type(
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
    """Of its message, `without_secrets`; its type where it has none."""
    return without_secrets((str(error).strip() or type(error).__name__).splitlines()[0])
