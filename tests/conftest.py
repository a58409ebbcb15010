"""Fixtures shared by the whole suite."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def assets() -> Path:
    """Real inputs written by others: $LPTUNE_ASSETS, else ../shared/assets. Tests that need them skip
    without.
    """
    folder = Path(os.environ.get("LPTUNE_ASSETS", ROOT.parent / "shared" / "assets"))
    if not folder.is_dir():
        pytest.skip("no real assets here: set LPTUNE_ASSETS to their folder")
    return folder
