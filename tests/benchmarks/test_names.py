"""Benchmarks, proofs and faults are run by hand, and seldom: each name of lptune that they use must exist."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import lptune

ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT / name for name in ("benchmarks", "tests/proofs", "tests/faults")]


def unknown_names(text: str) -> Iterator[str]:
    """What a program imports from lptune, or reads of a module of it, that is not there."""
    tree, modules = ast.parse(text), dict[str, ModuleType]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == lptune.__name__:
            for alias in node.names:
                try:
                    found = _imported(str(node.module), alias.name)
                except (ImportError, AttributeError):
                    yield f"{node.module}.{alias.name}"
                    continue
                if isinstance(found, ModuleType):
                    modules[alias.asname or alias.name] = found
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id)
            if module is not None and not hasattr(module, node.attr):
                yield f"{module.__name__}.{node.attr}"


def _imported(module: str, name: str) -> object:
    found = importlib.import_module(module)
    return getattr(found, name) if hasattr(found, name) else importlib.import_module(f"{module}.{name}")


def test_every_name_that_a_program_uses_exists() -> None:
    files = [path for folder in FOLDERS for path in sorted(folder.glob("*.py"))]
    assert len(files) > 40
    missing = [f"{file.name}: {name}" for file in files for name in unknown_names(file.read_text("utf-8"))]
    assert missing == []


def test_a_name_that_is_gone_is_found() -> None:
    text = "from lptune import data\nfrom lptune.data import gone\ndata.also_gone()\ndata.prepare()\n"
    assert list(unknown_names(text)) == ["lptune.data.gone", "lptune.data.also_gone"]
