"""The oracle of the adversary; `make faults` runs the adversary (`python -m tests.faults.adversary`)."""

from pathlib import Path

import pytest

from tests.faults.adversary.judge import Case, run
from tests.faults.adversary.place import Inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return Inputs(tmp_path_factory.mktemp("adversary").resolve())


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
