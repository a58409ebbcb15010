"""The short form of fuzz_configs.py: config.json files of all families, mutated, against transformers."""

import logging
import warnings
from collections import Counter
from collections.abc import Iterator

import pytest
import transformers

from tests.proofs.fuzz_configs import DEFECTS, cases, try_case


@pytest.fixture
def quiet() -> Iterator[None]:
    """transformers warns of most of what is tried here."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    transformers.logging.set_verbosity(level)


@pytest.mark.usefixtures("quiet")
def test_mutated_configs_give_the_logits_of_transformers_or_one_line() -> None:
    counts: Counter[str] = Counter()
    for case in cases(40, seed=5):
        outcome, details = try_case(case)
        assert outcome not in DEFECTS, (outcome, case.family, case.changes, case.head, details)
        counts[outcome] += 1
    assert counts["equal"] >= 12
    assert counts["refused by both"] >= 4
