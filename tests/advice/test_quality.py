"""The quality figures are those of docs/benchmarks.md."""

import re
from pathlib import Path

from lptune.advice.quality import MEASURED
from lptune.config import PRECISION_KINDS

PAGE = Path(__file__).parents[2] / "docs/benchmarks.md"


def test_each_figure_is_the_one_in_the_table() -> None:
    rows = re.findall(
        r"^\| (\w+) \| [\d.]+ \| ([+-][\d.]+ ± [\d.]+) \|$", PAGE.read_text("utf-8"), re.MULTILINE
    )
    assert {kind: str(quality) for kind, quality in MEASURED.items()} == dict(rows)
    assert {*MEASURED, "none"} == set(PRECISION_KINDS)
