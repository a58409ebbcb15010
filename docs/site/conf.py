"""Sphinx's settings for the site that build.py makes.

Every warning is an error there: a link or an anchor that leads nowhere, a page in no menu, a docstring that
cannot be read.
"""

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from lptune import __version__  # of the source beside these pages

project = "lptune"
author = "the lptune authors"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
html_theme = "furo"
html_title = f"lptune {__version__}"
html_theme_options = {
    "source_repository": "https://github.com/lptune/lptune/",
    "source_branch": "main",
    "source_directory": "docs/",
}
html_copy_source = False
html_show_sphinx = False
smartquotes = False  # the pages are read on GitHub too, and code in sentences must stay as it is

myst_heading_anchors = 4  # those of GitHub
nitpicky = True
# Types in signatures are names of torch and of private modules, which have no page here.
nitpick_ignore_regex = [("py:.*", ".*")]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_inherit_docstrings = False  # those of nn.Module are in another markup
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True, "undoc-members": False, "show-inheritance": False}


def _as_rst(*arguments: Any) -> None:
    """Makes RST of a docstring, which is plain text: `code`, and indented lines for code and tables."""
    lines = arguments[-1]  # Sphinx reads what is in this list afterwards
    text, literal = [], False
    for line in lines:
        indented = line.startswith("    ")
        if indented and not literal:
            text += ["", "::", ""]
        if not indented and literal and line.strip():
            text += [""]
        literal = indented or (literal and not line.strip())
        text.append(line if indented else _escaped(line))
    lines[:] = text


def _escaped(line: str) -> str:
    """A line in which only `code` has a meaning."""
    parts = line.replace("``", "`").split("`")
    if len(parts) % 2 == 0:  # a code that goes on in the next line
        return re.sub(r"([\\*_|`])", r"\\\1", line)
    parts[::2] = [re.sub(r"([\\*_|])", r"\\\1", part) for part in parts[::2]]
    parts[1::2] = [f"``{part}``\\ " for part in parts[1::2]]  # `x`s: without the blank no code ends there
    return "".join(parts).replace("``\\  ", "`` ")


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _as_rst)
