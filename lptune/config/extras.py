"""The command that installs a package which lptune can do without, for the error that misses it.

It names this interpreter, since a `pip` on the PATH may belong to another one. It names packages instead of
`lptune[extra]`: lptune may come from a checkout, a wheel or a URL, and a package index may then hold nothing
of this name, or a stranger's package.
"""

import re
import shlex
import sys
from collections.abc import Iterable


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
