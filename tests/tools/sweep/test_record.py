"""The tables of a sweep: whose runs they are of, what becomes of an earlier sweep's, and seeds that fail."""

import json
from pathlib import Path

import pytest

from lptune.tools.sweep.grid import Grid
from lptune.tools.sweep.record import Ended, Outcome, Record, digest, is_of, table
from tests.tools.conftest import CONFIG, MakeRun, row


class Sweep:
    """A folder of a sweep, whose runs are files alone."""

    def __init__(self, folder: Path, make_run: MakeRun) -> None:
        self.folder, self._make_run = folder, make_run

    def outcome(self, kind: str, seed: int, code: int | None = 0, line: str = "") -> Outcome:
        """Of the run of a kind with a seed; one that ended well has the loss seed + length of the kind."""
        name = f"seed={seed},kind={kind}" if kind else f"seed={seed}"
        if code == 0 and not (self.folder / name).exists():
            made = self._make_run(f"{self.folder.name}/{name}", [row(100, eval_loss=seed + len(kind))])
            text = (CONFIG % 100).replace("int8_rowcol", kind or "none") + f"seed: {seed}\n"
            (made / "config.yaml").write_text(text, encoding="utf-8")
        return Outcome(name, self.folder / name, code, f"kind={kind}" if kind else "", line)

    def end(self, *runs: Outcome) -> list[list[str]]:
        """Ends a sweep of these runs; returns the cells of its table."""
        lines = Record(self.folder, "toy").compare(runs)
        return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]

    @property
    def rows(self) -> list[str]:
        """The names in sweep.json."""
        return [each["name"] for each in json.loads((self.folder / "sweep.json").read_text())["rows"]]

    @property
    def files(self) -> set[str]:
        """Those of the table."""
        return {name for name in ("table.md", "differences.svg") if (self.folder / name).exists()}


BOTH = {"table.md", "differences.svg"}


@pytest.fixture
def sweep(tmp_path: Path, make_run: MakeRun) -> Sweep:
    (tmp_path / "sweep").mkdir()
    return Sweep(tmp_path / "sweep", make_run)


def test_a_table_stays_until_there_is_another_and_goes_with_results_that_it_is_not_of(sweep: Sweep) -> None:
    compared = [sweep.outcome(kind, seed) for kind in ("none", "int8") for seed in (1, 2)]
    sweep.end(*compared)
    assert (sweep.rows, sweep.files) == (["kind=none", "kind=int8"], BOTH)
    # In a repeat, a run that ends, a kill, and a stop or a failure of all leave the rows.
    Record(sweep.folder, "toy").add("seed=1,kind=none", Ended("", 0, 1.0))
    stopped = [compared[0], compared[2]._replace(exit_code=143), compared[1]._replace(exit_code=None)]
    assert sweep.end(*stopped) == []
    assert sweep.end(compared[0]._replace(exit_code=2), compared[2]._replace(exit_code=2)) == []
    assert (sweep.rows, sweep.files) == (["kind=none", "kind=int8"], BOTH)
    # One row has no difference: no picture of it, and none that was there.
    assert sweep.end(sweep.outcome("", 1), sweep.outcome("", 2)) != []
    assert (sweep.rows, sweep.files) == (["all"], {"table.md"})
    assert sweep.end(*compared) != []
    assert sweep.files == BOTH
    assert sweep.end(compared[0], compared[2]) == []  # each row is one run
    assert (sweep.rows, sweep.files) == ([], set())


def test_a_failed_seed_is_named_in_the_row_of_the_others(sweep: Sweep) -> None:
    cells = sweep.end(sweep.outcome("", 1), sweep.outcome("", 2), sweep.outcome("", 3, 2, "rows: not JSON"))
    assert [(line[0], line[1], line[-1]) for line in cells] == [
        ("all (baseline)", "2", "seed=3: failed (2): rows: not JSON")
    ]
    ok = [sweep.outcome(kind, seed) for seed in (2, 3) for kind in ("none", "int8")]
    failed = [sweep.outcome("none", 1, 3), sweep.outcome("int8", 1, 137), sweep.outcome("int8", 4, 137)]
    other = [sweep.outcome("x", seed, 2, "x") for seed in (1, 2)]
    odd = [sweep.outcome("odd", 1, 2, "a"), sweep.outcome("odd", 2, None)]
    cells = sweep.end(*failed, *ok, *other, *odd)
    # The first run failed; its row is the baseline by the other seeds.
    assert [(line[0], line[1], line[-1]) for line in cells] == [
        ("kind=none (baseline)", "2", "seed=1,kind=none: diverged"),
        ("kind=int8", "2", "seed=1,kind=int8, seed=4,kind=int8: failed (137)"),
        ("kind=x", "0", "failed (2): x"),
        ("kind=odd", "0", "seed=1,kind=odd: failed (2): a; seed=2,kind=odd: not run"),
    ]
    assert sweep.files == BOTH


def test_runs_of_one_row_are_those_whose_other_values_are_the_same() -> None:
    points = Grid(["seed=1,2", "precision.skip=[lm_head],[a b]", "num_steps=3"]).points
    one, two = {point.row for point in points[::2]}, {point.row for point in points[1::2]}
    assert (len(one), len(two), len(one | two)) == (1, 1, 2)
    assert len({point.name for point in points}) == 4
    assert {point.row for point in Grid(["seed=1,2"]).points} == {""}
    assert [point.row for point in Grid(["num_steps=1,2"]).points] == ["num_steps=1", "num_steps=2"]


def test_the_losses_of_another_config_are_not_those_of_a_run(make_run: MakeRun) -> None:
    theirs, ours = CONFIG % 100, (CONFIG % 100).replace("0.003", "0.005").replace("runs/x", "runs/y")
    folder = make_run("seed=3", [row(1, eval_loss=6.8)])
    assert is_of(folder, digest(theirs.replace("runs/x", "runs/y")))
    assert not is_of(folder, digest(ours))
    (folder / "config.yaml").write_bytes(b"\xff")
    assert not is_of(folder, digest(ours))
    runs = [Outcome(f"{own}", folder, 2, is_own=own) for own in (False, True)]
    own, other = table(runs).splitlines()[1:]
    assert other.split() == ["-", "-", "-", "-", "failed", "(2)", "False"]
    assert own.split()[0] == "6.8000"
    (folder / "config.yaml").unlink()
    assert is_of(folder, digest(ours))
