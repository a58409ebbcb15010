"""What the tests of losses share."""

from collections.abc import Iterator

import pytest

from lptune import distributed


@pytest.fixture(scope="module")
def world() -> Iterator[distributed.World]:
    """This process as the only rank."""
    with distributed.session("cpu") as alone:
        yield alone
