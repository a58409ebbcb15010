"""Where the C++ cannot be built the bits stay the same, and a warning says what is missing."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lptune import kernels, numerics
from lptune.kernels import native
from lptune.kernels.backend import choose_backend
from lptune.kernels.native import library


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing built, nothing chosen."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("LPTUNE_KERNELS", raising=False)
    for cached in (choose_backend, library.load):
        cached.cache_clear()
    yield
    for cached in (choose_backend, library.load):
        cached.cache_clear()


def _assert_quantizes() -> None:
    x = torch.randn(20, 30)
    for ours, truth in zip(kernels.quantize_rows(x, "int8"), numerics.quantize_rows(x), strict=True):
        assert torch.equal(ours, truth)


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


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, built once for the tests below and kept as usual, and a compiler that copies it and
    counts.
    """
    folder = tmp_path_factory.mktemp("image")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        compiler = library._compiler()
        if compiler is None:
            pytest.skip("needs a C++ compiler")
        (folder / "native.so").write_bytes(library._image(compiler))
    (folder / "a compiler").write_text(
        f"echo >>{folder}/built; while [ $1 != -o ]; do shift; done; cp {folder}/native.so $2"
    )
    return folder


def test_it_is_built_once_and_kept(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(image))
    (built,) = (image / "lptune").iterdir()
    written = built.stat().st_mtime_ns
    monkeypatch.setattr(library.subprocess, "run", lambda *args, **kwargs: pytest.fail("compiled again"))
    assert native.available()
    assert built.stat().st_mtime_ns == written
    _assert_quantizes()


@pytest.mark.parametrize("what", ["cut", "changed", "a link", "writable", "another user's"])
def test_a_kept_library_that_is_damaged_or_not_of_this_user_is_built_anew(
    what: str, image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", f"sh '{image}/a compiler'")  # of two words, and one of them in quotes
    (image / "built").unlink(missing_ok=True)
    assert native.available()
    (kept,) = (tmp_path / "lptune").iterdir()
    whole = kept.read_bytes()
    others = {"cut": whole[:9000], "changed": whole.replace(b"lptune", b"LPTUNE", 1)}
    kept.unlink()
    if what == "a link":
        (tmp_path / "elsewhere").write_bytes(whole)
        kept.symlink_to(tmp_path / "elsewhere")
    else:
        kept.write_bytes(others.get(what, whole))
        kept.chmod(0o666 if what == "writable" else 0o600)
    if what == "another user's":
        if os.geteuid() == 0:
            os.chown(kept, 12345, -1)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: 12345)
    for _ in range(2):
        library.load.cache_clear()
        assert native.available()
        monkeypatch.undo()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setenv("CXX", f"sh '{image}/a compiler'")
    assert kept.name in caplog.text
    assert len((image / "built").read_text()) == 2  # at first, and once again
    assert kept.read_bytes() == whole
    assert kept.stat().st_mode & 0o777 == 0o600
    _assert_quantizes()


def test_a_file_in_the_place_of_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, image: Path
) -> None:
    monkeypatch.setenv("CXX", f"sh '{image}/a compiler'")
    (tmp_path / "lptune").write_text("in the way")
    assert native.available()
    _assert_quantizes()
