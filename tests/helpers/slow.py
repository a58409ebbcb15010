"""A product of cases of which the suite runs those that stand for the others."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow_but(kept: Callable[..., bool], cases: Iterable[Any]) -> list[Any]:
    """For parametrize: the cases for which `kept(*case)` is false are marked slow (`make proofs` runs them).

    A case is a tuple, or one value.
    """
    found = []
    for case in cases:
        values = tuple(case) if type(case) is tuple else (case,)
        found.append(pytest.param(*values, marks=[] if kept(*values) else [pytest.mark.slow]))
    assert any(not param.marks for param in found), "nothing is left for the suite"
    return found
