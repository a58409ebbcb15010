"""Fixtures shared by the tests of benchmarks, which are scripts and no package."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def load() -> Iterator[Callable[[str], ModuleType]]:
    """Imports a script of benchmarks/ by its name; it and what it imported there are forgotten afterwards."""
    before = set(sys.modules)
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module
    sys.path.remove(str(BENCHMARKS))
    for name in set(sys.modules) - before:
        if name in {path.stem for path in BENCHMARKS.glob("*.py")}:
            del sys.modules[name]
