"""Builds the site: docs/*.md in a menu, and a page for each public module from its docstrings.

    python docs/site/build.py [FOLDER]        the site goes to FOLDER, by default build/site

The pages stay plain Markdown for GitHub: the menu stands here, and in a copy of the pages links out of docs/
become links to GitHub. Needs Sphinx, MyST-Parser and furo (requirements/docs.txt) and what lptune imports:
`make docs` has both.
"""

import importlib
import inspect
import re
import shutil
import sys
from pathlib import Path

from sphinx.cmd.build import main as sphinx

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GITHUB = "https://github.com/lptune/lptune"

# The menu. A page that is not there is left out; one that is in no list fails the build.
MENU = {
    "Start": ("tour", "choose_precision", "data", "models", "platforms"),
    "Run": (
        "commands", "advise", "plan", "optimizers", "distributed", "multi_node", "resume", "tracking",
        "report", "shadow", "sweep", "compare", "migrate", "pretraining", "preferences", "distillation",
    ),
    "Results": ("export", "generate", "evaluation"),
    "Library": ("library", "linear", "recipes", "extending"),
    "Reference": ("troubleshooting", "glossary", "security", "api/index"),
    "Inside": ("architecture", "numerics"),
    "Evidence": ("benchmarks", "gpu", "matrix", "rank_matrix", "log"),
}  # fmt: skip
MODULES = (
    "linear", "models", "data", "checkpoint", "training", "distributed", "inference", "numerics", "kernels",
    "config",
)  # fmt: skip


def outside(target: str) -> str:
    """The address on GitHub of a file or folder that a page links to by `../`."""
    if not (ROOT / target).exists():
        raise SystemExit(f"error: a page links to ../{target}, which is not there")
    return f"{GITHUB}/{'blob' if (ROOT / target).is_file() else 'tree'}/main/{target}"


def copy_pages(folder: Path) -> None:
    """docs/ without this folder; README.md becomes the index, with the menu at its end."""
    shutil.copytree(DOCS, folder, ignore=shutil.ignore_patterns("site", "__pycache__"))
    (folder / "README.md").rename(folder / "index.md")
    for page in folder.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        text = re.sub(r"\]\(\.\./([^)#]+)((?:#[^)]*)?)\)", lambda m: f"]({outside(m[1])}{m[2]})", text)
        page.write_text(text.replace("](README.md", "](index.md"), encoding="utf-8")
    menu = ""
    for title, names in MENU.items():
        there = [name for name in names if name == "api/index" or (folder / f"{name}.md").is_file()]
        menu += "\n".join(("", "```{toctree}", ":hidden:", f":caption: {title}", "", *there, "```", ""))
    index = folder / "index.md"
    index.write_text(index.read_text(encoding="utf-8") + menu, encoding="utf-8")


def write_api(folder: Path) -> None:
    """A page for each module with what its __init__ exports, in the order of __all__."""
    folder.mkdir()
    index = ["API", "===", "", "What each module exports. The reading order is in :doc:`/architecture`.", ""]
    index += [".. toctree::", "   :maxdepth: 1", "", *(f"   {name}" for name in MODULES), ""]
    (folder / "index.rst").write_text("\n".join(index), encoding="utf-8")
    for name in MODULES:
        module = importlib.import_module(f"lptune.{name}")  # noqa: TID251  (our own pages)
        title = f"lptune.{name}"
        lines = [title, "=" * len(title), "", f".. automodule:: {title}", "   :no-members:", ""]
        for each in sorted(module.__all__, key=str.lower):
            thing = getattr(module, each)
            if inspect.ismodule(thing):
                continue
            kind = "class" if inspect.isclass(thing) else "function" if inspect.isroutine(thing) else "data"
            if issubclass(thing, BaseException) if kind == "class" else False:
                kind = "exception"
            lines += [f".. auto{kind}:: {title}.{each}", *(["   :no-value:"] if kind == "data" else []), ""]
        (folder / f"{name}.rst").write_text("\n".join(lines), encoding="utf-8")


def build(out: Path) -> int:
    """Sphinx's exit code; the site is in `out`."""
    source = out.parent / f"{out.name}-source"
    for folder in (source, out):
        shutil.rmtree(folder, ignore_errors=True)
    copy_pages(source)
    write_api(source / "api")
    return sphinx(
        ["-W", "-n", "--keep-going", "-q", "-b", "html", "-c", str(DOCS / "site"), str(source), str(out)]
    )


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(build(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "site"))
