"""Fixtures shared by the tests of kernels."""

from collections.abc import Iterator

import pytest

from lptune.kernels import native
from lptune.kernels.backend import choose_backend


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
