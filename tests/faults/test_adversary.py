"""Some cases of every subject of the adversary; `python -m tests.faults.adversary` tries more."""

from pathlib import Path

import pytest

from tests.faults.adversary.judge import Case, run
from tests.faults.adversary.place import Inputs
from tests.faults.adversary.subjects import all_cases, drawn
from tests.faults.adversary.things import NotHere

# Slow, by new interpreters, a compiler and a megabyte of text; the tests of these parts have such cases.
_SHORT = ("ASCII terminal", "cached kernels", "cached rows")
_CASES = [
    *drawn([case for case in all_cases(0) if case.subject not in _SHORT], 2, seed=1),
    *drawn([case for case in all_cases(0) if case.subject in _SHORT], 1, seed=1),
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return Inputs(tmp_path_factory.mktemp("adversary").resolve())


@pytest.mark.parametrize("case", _CASES, ids=lambda case: case.title)
def test_the_adversary_gains_nothing(inputs: Inputs, case: Case) -> None:
    try:
        _, wrong = run(case, inputs.place())
    except NotHere:
        pytest.skip("needs rights that this user lacks")
    assert wrong == []


def test_the_adversary_has_a_thousand_attacks_on_two_dozen_subjects() -> None:
    cases = all_cases(1)
    assert len(cases) >= 1000
    assert len({case.subject for case in cases}) >= 23


def test_what_an_attack_changes_is_seen(inputs: Inputs, tmp_path: Path) -> None:
    """An oracle that sees nothing would hold everything: here the attack itself does the harm."""

    def attack(place: object, pid: int) -> None:
        folder = inputs.root / "case"
        (folder / "work" / "victim" / "file").write_text("gone")
        (folder / "work" / "copy").write_text("s3cr3t-5b1f9e")
        (folder / "tmp" / "left").touch()

    case = Case(
        subject="none",
        name="none",
        prepare=lambda place: ["verify", "\\x1b"],
        codes=frozenset({0}),
        meanwhile=attack,
    )
    _, wrong = run(case, inputs.place())
    assert wrong == [
        "exit code 2, expected [0]",
        "lost or changed: work/victim/file",
        "exit code 2, and there is tmp/left, work/copy",
        "left in TMPDIR: tmp/left",
        "holds the secret: work/copy",
    ]
