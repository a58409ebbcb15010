"""Where the documentation is: in a clone beside the code, for an installed wheel on the web.

Messages and help texts name a page as `docs/resume.md`. Who has only the wheel has no such file.
"""

import re
from pathlib import Path

from lptune import __version__

GITHUB = "https://github.com/lptune/lptune"
_ROOT = Path(__file__).parents[2]
# Both: some packages leave a folder docs/ in site-packages.
_IN_A_CLONE = all((_ROOT / name).is_file() for name in ("docs/README.md", "pyproject.toml"))


def with_addresses(text: str) -> str:
    """`text`; without a clone with the web address of this version's page in place of each `docs/PAGE.md`."""
    if _IN_A_CLONE or "docs/" not in text:
        return text
    return re.sub(r"(?<![\w/])docs/(?=[\w-]+\.md\b)", f"{GITHUB}/blob/v{__version__}/docs/", text)
