"""Fixtures shared by the whole suite."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

# No test is timed: a machine that does other things as well must not fail one.
settings.register_profile("developer", deadline=None)
# CI runs the same examples every time: what is found by luck is found on a developer's machine.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "developer")

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
