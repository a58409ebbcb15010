"""The Dockerfile, which the tests cannot build: what it copies is there, and what it runs is pinned."""

import fnmatch
import re

from tests.cli import test_sdist
from tests.helpers.docs_pages import ROOT

TEXT = re.sub(r"\\\n\s*", " ", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
LINES = [line.split() for line in TEXT.splitlines() if line and not line.startswith("#")]


def test_the_image_copies_what_is_there_and_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    kept = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    assert ignored[0] == "*"
    sources = [source for name, *words in LINES if name == "COPY" for source in words[:-1]]
    assert len(sources) > 5
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(fnmatch.fnmatch(source.split("/")[0], each) for each in kept), source
    assert set(test_sdist.SOURCES) <= set(sources)  # hatchling builds the wheel of these


def test_the_image_has_a_pinned_base_no_root_and_packages_with_digests() -> None:
    (base,) = [words[0] for name, *words in LINES if name == "FROM"]
    assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-base-ubuntu24\.04", base)
    users = [words[0] for name, *words in LINES if name == "USER"]
    assert users
    assert users[-1] not in ("root", "0")
    installs = re.findall(r"pip install ([^&]*)", TEXT)
    assert sum("--require-hashes" in each for each in installs) == 2
    torch = (ROOT / "requirements" / "torch.txt").read_text(encoding="utf-8")
    assert re.search(r"^torch==\S+", torch, re.MULTILINE)
