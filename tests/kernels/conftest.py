"""Fixtures shared by the tests of kernels."""

import os
from collections import Counter
from collections.abc import Iterator

import pytest

from lptune.kernels import native
from lptune.kernels.backend import choose_backend


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With ONE_CASE_IN=n keeps each n-th case of a test, from the first on (test_triton_interpreted.py)."""
    step, seen, kept = int(os.environ.get("ONE_CASE_IN", "1")), Counter[str](), []
    for item in items:
        name = item.nodeid.partition("[")[0]
        kept += [item] if seen[name] % step == 0 else []
        seen[name] += 1
    items[:] = kept


@pytest.fixture(params=["native", "reference"])
def cpu_quantizers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Quantizers on a CPU run on this backend: C++, then plain torch."""
    if request.param == "native" and not native.available():
        pytest.skip("needs a C++ compiler")
    monkeypatch.setenv("LPTUNE_KERNELS", request.param)
    choose_backend.cache_clear()
    assert choose_backend("quantize", "cpu") == request.param
    yield
    choose_backend.cache_clear()
