"""The table of planted faults fits the code; `make proofs` plants them."""

from tests.helpers.each import holds_for_each
from tests.proofs.planted import FAULTS, ROOT, Fault, source_of


def _fits(fault: Fault) -> None:
    assert source_of(fault).read_text(encoding="utf-8").count(fault.old) == 1, "occurs not exactly once"
    assert all((ROOT / "tests" / name).is_file() for name in fault.tests.split()), "a test file is not there"


def test_the_text_of_every_fault_occurs_once_and_its_tests_are_there() -> None:
    holds_for_each(FAULTS, _fits, lambda fault: f"{fault.file}: {fault.old!r}")
    assert len(FAULTS) >= 40
    assert 2 * sum(bool(fault.mended) for fault in FAULTS) >= 40
