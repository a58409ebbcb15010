"""Called by hatchling: the README of a wheel or sdist. Its links lead to the pages of its version on GitHub.

On PyPI there is nothing beside a README, so `docs/resume.md` would lead nowhere there.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

GITHUB = "https://github.com/lptune/lptune"


def readme(root: Path) -> str:
    """README.md with an address in place of each relative link."""
    source = (root / "lptune" / "__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)

    def address(found: re.Match[str]) -> str:
        # An sdist has the files, so this holds there, too.
        kind = "tree" if (root / found[1]).is_dir() else "blob"
        return f"]({GITHUB}/{kind}/v{version}/{found[1]}{found[2]})"

    text = (root / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\]\((?![a-z]+:|#)([^)#\s]+)((?:#[^)\s]*)?)\)", address, text)


class ReadmeHook(MetadataHookInterface):
    """Sets `readme` of the metadata, which pyproject.toml declares dynamic."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Adds the key `readme` to `metadata`, the table [project]."""
        metadata["readme"] = {"content-type": "text/markdown", "text": readme(Path(self.root))}
