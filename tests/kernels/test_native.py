"""Where the C++ cannot be built the bits stay the same, and a warning says what is missing."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lptune import kernels, numerics
from lptune.kernels import native
from lptune.kernels.backend import choose_backend


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing built, nothing chosen."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("LPTUNE_KERNELS", raising=False)
    for cached in (choose_backend, native._library):
        cached.cache_clear()
    yield
    for cached in (choose_backend, native._library):
        cached.cache_clear()


def _assert_quantizes() -> None:
    x = torch.randn(20, 30)
    for ours, truth in zip(kernels.quantize_rows(x, "int8"), numerics.quantize_rows(x), strict=True):
        assert torch.equal(ours, truth)


def test_it_is_built_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native.available():
        pytest.skip("needs a C++ compiler")
    _assert_quantizes()
    (built,) = (tmp_path / "lptune").iterdir()
    written = built.stat().st_mtime_ns
    native._library.cache_clear()
    monkeypatch.setattr(native.subprocess, "run", lambda *args, **kwargs: pytest.fail("compiled again"))
    assert native.available()
    assert built.stat().st_mtime_ns == written


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    assert choose_backend("quantize", "cpu") == "reference"
    assert "no C++ compiler found" in caplog.text
    _assert_quantizes()


@pytest.mark.parametrize("compiler", ["/nonexistent/g++", "/bin/false"])
def test_a_compiler_that_fails(
    compiler: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with caplog.at_level(logging.WARNING):
        assert choose_backend("quantize", "cpu") == "reference"
    assert caplog.text.count("could not be built") == 1
    _assert_quantizes()


def test_a_file_in_the_place_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "lptune").write_text("in the way")
    assert choose_backend("quantize", "cpu") == "reference"
    _assert_quantizes()
