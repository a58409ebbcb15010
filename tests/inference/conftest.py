"""One rank on a CPU, and a tiny checkpoint, for the tests of a file."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lptune import distributed
from lptune.distributed import World
from tests.helpers.tiny_recipe import make_checkpoint


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with distributed.session("cpu") as one:
        yield one


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """llama3_2/tiny, whose tokenizer is byte-level and knows ChatML."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")
