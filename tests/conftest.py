"""Fixtures shared by the whole suite."""

import gc
import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.ranks import Ranks

try:
    from hypothesis import settings
except ImportError:  # a GPU machine that is lent for an hour may lack it, and few of the tests there need it
    pass
else:
    # No test is timed: a machine that does other things as well must not fail one.
    settings.register_profile("developer", deadline=None)
    # CI runs the same examples every time: what is found by luck is found on a developer's machine.
    settings.register_profile("ci", derandomize=True, deadline=None)
    settings.load_profile("ci" if os.environ.get("CI") else "developer")

# A shell starts what it runs in the background with SIGINT ignored, and so would be every process of a test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parents[1]


def _digest_of_ops() -> str:
    """Of all files in which ops are defined."""
    files = [*sorted((ROOT / "lptune" / "kernels").rglob("*.py")), ROOT / "tests" / "proofs" / "matrix.py"]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


# torch reads these when it is imported, here and in every process of a test.
for _name, _value in {
    # Without this, torch traces every graph that has a torch.autograd.Function anew. Dynamo writes the whole
    # function into the graph, and the graph is what torch looks up.
    "TORCHINDUCTOR_AUTOGRAD_CACHE_ALLOW_CUSTOM_AUTOGRAD": "1",
    # A graph names an op. What the op's fake and its gradient say is not in the graph, but compiled all the
    # same: where an op has changed, nothing of before is taken.
    "TORCH_COMPILE_CACHE_KEY_TAG": _digest_of_ops(),
    # No pool of processes that each import torch: the workers of xdist are pool enough.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}.items():
    os.environ.setdefault(_name, _value)

LONGEST = (
    "distributed/test_tensor_parallel.py",
    "distributed/test_gather.py",
    "recipes/test_full_finetune.py",
    "recipes/test_shadow.py",
    "faults/test_faults.py",
    "recipes/test_every_recipe.py",
    "plan/test_dry_run.py",
    "models/hf/test_recipe.py",
    "kernels/test_triton_interpreted.py",
    "distributed/test_parallelize.py",
    "proofs/test_rank_matrix.py",
    "cli/test_wrong_inputs.py",
    "cli/test_multi_node.py",
    "training/test_update.py",
    "recipes/test_generate.py",
    "cli/test_plan.py",
    "models/hf/test_types.py",
    "recipes/test_optimizers.py",
    "plan/test_repeated_blocks.py",
    "recipes/test_continued_pretrain.py",
    "proofs/test_matrix.py",
)
"""The files that take longest. They run first, in this order, so that the workers of xdist end together."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts by file alone: the tests of a file keep their order, and each worker sees the same order."""
    place = {ROOT / "tests" / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(LONGEST)))


def pytest_collection_finish() -> None:
    """What is imported by now stays. The collector need not visit a million objects again and again: with
    these two lines the compiled tests take a tenth less CPU time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True)
def _signals_stay_as_they_are() -> Iterator[None]:
    """A test that leaves signals blocked, as a run does to its end, would fail others in the same worker."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Up to four processes, started when a test needs them, which stay for the other tests of its file."""
    with Ranks(4) as started:
        yield started


@pytest.fixture(scope="session")
def assets() -> Path:
    """Real inputs written by others: $LPTUNE_ASSETS, else ../shared/assets. Tests that need them skip
    without.
    """
    folder = Path(os.environ.get("LPTUNE_ASSETS", ROOT.parent / "shared" / "assets"))
    if not folder.is_dir():
        pytest.skip("no real assets here: set LPTUNE_ASSETS to their folder")
    return folder
