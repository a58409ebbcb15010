"""One test for a claim about many things of the repository: its pages, their commands, its configs."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest

T = TypeVar("T")


def holds_for_each(cases: Iterable[T], check: Callable[[T], object], name: Callable[[T], str] = str) -> None:
    """Calls `check` with every case, then fails once, with name and error of each case that it refused."""
    refused, num_cases = [], 0
    for case in cases:
        num_cases += 1
        try:
            check(case)
        except Exception as error:
            refused.append(f"{name(case)}: {str(error) or type(error).__name__}")
    assert num_cases, "no case"
    if refused:
        pytest.fail("\n".join(refused), pytrace=False)
