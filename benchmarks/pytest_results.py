"""A pytest plugin that writes the outcome of every test to a benchmark's JSON file, as soon as it is known.

LPTUNE_TEST_RESULTS=tests.json python -m pytest -p pytest_results …        with benchmarks/ on PYTHONPATH
"""

import os
from pathlib import Path

import pytest
from harness import Results

_results: Results | None = None


def pytest_configure(config: pytest.Config) -> None:
    global _results
    if not hasattr(config, "workerinput"):  # with several workers the one that hands out the tests writes
        _results = Results(Path(os.environ["LPTUNE_TEST_RESULTS"]))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # A test that is skipped, or whose fixture fails, has no call phase.
    if _results is not None and (report.when == "call" or report.outcome != "passed"):
        why = "" if report.outcome == "passed" else str(report.longrepr)[-800:]
        _results.add(test=report.nodeid, outcome=report.outcome, seconds=report.duration, why=why)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if _results is not None and report.failed:
        _results.add(test=report.nodeid, outcome="not collected", why=str(report.longrepr)[-800:])


def pytest_sessionfinish() -> None:
    if _results is not None:
        _results.__exit__(None, None, None)
