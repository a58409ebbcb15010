"""Fixtures shared by the whole suite."""

import gc
import hashlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import s3
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

# Images of containers often set it. Each worker would then rewrite the assertions of all tests anew, and each
# process that starts by itself would compile lptune anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

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
    "faults/test_faults", "kernels/test_triton_interpreted", "recipes/test_full_finetune",
    "recipes/test_continued_pretrain", "docs/test_tour", "cli/test_multi_node", "recipes/test_shadow",
    "recipes/test_generate", "models/hf/test_presets", "distributed/test_gather", "cli/test_run",
    "plan/test_dry_run", "recipes/test_full_kto", "models/hf/test_recipe",
    "linear/weights/test_compute_weights", "recipes/test_every_recipe", "cli/test_wrong_inputs",
    "models/hf/test_float32", "distributed/test_parallelize", "cli/test_plan",
    "distributed/test_tensor_parallel", "proofs/test_rank_matrix", "kernels/test_scaled_mm",
    "plan/test_fit", "recipes/test_full_dpo", "models/hf/test_types",
    "recipes/test_distill", "plan/test_repeated_blocks", "tools/test_without_tools",
    "tools/sweep/test_command", "recipes/test_optimizers", "training/test_update",
    "tools/migrate/test_migrate", "recipes/test_precompute_logits",
    "cli/test_restarts", "benchmarks/test_fits", "checkpoint/test_run_copy", "data/test_tokenizer",
    "tools/advise/test_command", "linear/test_linear", "recipes/test_in_backward", "models/test_backbone",
    "checkpoint/test_quantized", "proofs/test_equivalence", "faults/test_malformed",
    "recipes/test_freezing", "data/test_workers", "models/test_cache", "examples/test_own_model",
    "recipes/test_divergence", "training/test_in_backward", "training/test_from_host",
)  # fmt: skip
"""The files of 11 s and more. They run first, in this order, so that the workers of xdist end together."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts by file alone: the tests of a file keep their order, and each worker sees the same order."""
    place = {ROOT / "tests" / f"{name}.py": number for number, name in enumerate(LONGEST)}
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


@pytest.fixture
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of an S3 server on the loopback device, with a bucket called `bucket`."""
    with s3.server(monkeypatch) as address:
        yield address
