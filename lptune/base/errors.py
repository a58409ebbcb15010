"""The two exceptions that end a command with one line: the input is wrong, or training diverged.

Everything a user can get wrong (a key, a path, a row, a tensor) ends as a `UserError`. The command line
prints its message and exits with its `exit_code`; a traceback always means a bug of ours.

An error that misses a package names the command that installs it: with this interpreter, since a `pip` on the
PATH may belong to another one, and with packages instead of `lptune[extra]`. lptune may come from a checkout,
a wheel or a URL, and a package index may then hold nothing of this name, or a stranger's package.
"""

import difflib
import errno
import re
import shlex
import sys
from collections.abc import Iterable

from lptune.base.text import printable, with_addresses


class UserError(ValueError):
    """Bad input. The message is one line: where, what was found, what to do."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(printable(with_addresses(" ".join(message.split()))))


class UnavailableError(UserError):
    """A machine or a service does not answer now. The same command may work later, so it ends as a failure
    that is tried again (`--restarts`, the exit codes of a cluster's job), and not as wrong input.
    """

    exit_code = 1


class ChoiceError(UserError):
    """The value of a key is none of its choices."""

    def __init__(self, message: str, key: str, choices: tuple[str, ...]) -> None:
        super().__init__(message)
        self.key, self.choices = key, choices


class UnknownKeyError(UserError):
    """A config has a key that the recipe does not have."""

    def __init__(
        self, where: str, key: str, hint: str, leaf: str | None = None, similar: str | None = None
    ) -> None:
        """leaf: the dotted key, where `key` may be its section. similar: the key with the same last part."""
        super().__init__(f"{where}: unknown key {key!r}{hint}")
        self.where, self.key, self.similar = where, leaf or key, similar


def no_gpu_error(why: str) -> UserError:
    """The error for `device=cuda` without a GPU. why: what was asked, and that it has no GPU."""
    return UserError(f"device: cuda was asked for, but {why}; set device=cpu or auto")


def too_many_ranks_error(local_rank: int, num_gpus: int) -> UserError:
    """The error for a rank that has no GPU of its own. local_rank: the number of the rank on its machine."""
    return UserError(
        f"--nproc-per-node: rank {local_rank} of this machine has no GPU, there are {num_gpus}; start fewer "
        "ranks or set device=cpu"
    )


def no_8_bit_gemm_error(kind: str, fmt: str, where: str) -> UserError:
    """The error for a device without an 8-bit GEMM of the kind. fmt: of the operands; where: the device."""
    return UserError(
        f"precision.kind: {kind} needs a device with an 8-bit ({fmt}) GEMM, and {where} has none; "
        "precision.emulate=true multiplies the same operands in wider arithmetic, slowly"
    )


class DivergedError(RuntimeError):
    """Training produced a loss or gradient that is not finite. The message is one line."""

    exit_code = 3

    def __init__(self, message: str) -> None:
        super().__init__(printable(" ".join(message.split())))


def closest(word: str, choices: Iterable[str]) -> str:
    """`" (did you mean 'x'?)"` for the choice nearest to `word`, or an empty string when none is near.

    A choice that begins with the word is near as well, and the nearest if no other does: `--nproc` ->
    `--nproc-per-node`, and not `--role`.
    """
    by_lower = {choice.lower(): choice for choice in choices}
    begun = [choice for choice in by_lower if choice.startswith(word.lower())] if len(word) >= 3 else []
    near = begun
    if len(begun) != 1:
        near = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6) or begun
    return f" (did you mean {by_lower[near[0]]!r}?)" if near else ""


def remedy(error: BaseException | None, otherwise: str) -> str:
    """What to do about a file that could not be written: `otherwise`, unless only descriptors were short."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return "raise the limit of open files (`ulimit -n`)"
    return otherwise


def how_to_install(extra: str) -> str:
    """`run: /venv/bin/python -m pip install 'pyarrow>=20'`.

    extra: a key of [project.optional-dependencies] in pyproject.toml.
    """
    import importlib.metadata  # slow to import

    try:
        listed = importlib.metadata.requires("lptune") or []
    except importlib.metadata.PackageNotFoundError:  # the source is on PYTHONPATH, nothing is installed
        listed = []
    of_extra = re.compile(rf"extra == ['\"]{re.escape(extra)}['\"]")
    required = [each.partition(";") for each in listed]
    packages = [name.strip() for name, _, marker in required if of_extra.search(marker)]
    if not packages:
        return f"install the packages that lptune's pyproject.toml lists as the extra {extra!r}"
    return command_to_install(packages)


def command_to_install(packages: Iterable[str]) -> str:
    """`run: /venv/bin/python -m pip install socksio`, with uv where the environment has no pip."""
    import importlib.metadata

    # To look for the module would run setuptools' hook.
    has_pip = any(importlib.metadata.distributions(name="pip"))
    pip = [sys.executable, "-m", "pip", "install"]
    uv = ["uv", "pip", "install", "--python", sys.executable]
    return "run: " + shlex.join([*(pip if has_pip else uv), *packages])
