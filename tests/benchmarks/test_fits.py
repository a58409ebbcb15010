"""Which model fits which GPU: the table of README.md is what the code says."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from lptune.plan import fit

ROOT = Path(__file__).parents[2]
CELL = ("3B", "1x80")
"""It fits with a change: two dry runs."""


@pytest.fixture
def fits(load: Callable[[str], ModuleType]) -> Iterator[ModuleType]:
    real = fit.dry_run
    (module := load("fits")).remember_plans()
    yield module
    fit.dry_run = real


def cells(fits: ModuleType, page: str, *, in_full: bool) -> dict[tuple[str, str], str]:
    """(model, GPUs) -> the cell as the page has it."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    first = lines.index(fits.table({}, in_full=in_full)[0])
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines[first + 2 :][: len(fits.MODELS)]
    ]
    assert [row[0] for row in rows] == list(fits.MODELS)
    return {(row[0], gpus): cell for row in rows for gpus, cell in zip(fits.GPUS, row[1:], strict=True)}


def test_a_cell_of_the_tables_is_what_is_planned(fits: ModuleType) -> None:
    short, full = (cells(fits, page, in_full=in_full) for page, in_full in fits.PAGES.items())
    found = fits.cell(*CELL)
    assert found.text(in_full=False) == short[CELL]
    assert found.text(in_full=True) == full[CELL]


def test_the_readme_s_table_is_that_of_the_plan_page_in_words_and_all_signs_are_explained(
    fits: ModuleType,
) -> None:
    short, full = (cells(fits, page, in_full=in_full) for page, in_full in fits.PAGES.items())
    found = {key: cell.partition(": ")[2].replace("as it is", "") for key, cell in full.items()}
    for key, cell in full.items():
        assert short[key] == fits.in_a_word(not cell.startswith("no"), found[key])
    signs = {sign for key, cell in found.items() if short[key] != "–" for sign in cell.split()}
    assert signs <= set(fits.LETTERS.values())
    text = (ROOT / "docs/plan.md").read_text(encoding="utf-8")
    assert all(f"**{sign}** " in text for sign in signs)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"**{word}**" in readme for word in short.values() if word != "–")


@pytest.mark.slow  # all of the models: minutes
@pytest.mark.parametrize("model", ["1B", "3B", "8B", "14B", "32B"])
def test_all_cells_of_a_model_are_what_is_planned(fits: ModuleType, model: str) -> None:
    full = cells(fits, "docs/plan.md", in_full=True)
    assert {gpus: fits.cell(model, gpus).text(in_full=True) for gpus in fits.GPUS} == {
        gpus: full[model, gpus] for gpus in fits.GPUS
    }
