"""metrics.jsonl, as a run writes it, as a killed run leaves it, and as nobody should write it."""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lptune.base.errors import UserError
from lptune.base.files import MEBI
from lptune.tools.report.rows import Rows, read_rows


def read(folder: Path, content: str | bytes) -> Rows:
    path = folder / "metrics.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_rows(path)


GOOD = '{"step": 1, "loss": 2.5}\n'


def test_each_metric_becomes_a_column_of_the_steps_that_have_it(tmp_path: Path) -> None:
    rows = read(
        tmp_path,
        '{"step": 0, "eval_loss": 7.0}\n'
        '{"step": 1, "loss": 0.1, "time": "2026-11-23T10:00:00+00:00"}\n'
        '{"step": 2, "loss": 5, "eval_loss": null, "time": "2026-11-23T10:00:09+00:00"}\n',
    )
    assert rows["loss"].steps_N.tolist() == [1, 2]
    assert rows["loss"].values_N.tolist() == [0.1, 5.0]
    assert rows["eval_loss"].steps_N.tolist() == [0, 2]
    assert np.isnan(rows["eval_loss"].values_N).tolist() == [False, True]
    assert rows["eval_loss"].finite.values_N.tolist() == [7.0]
    assert (rows.num_rows, rows.last_step, rows.notes) == (3, 2, ())
    assert (rows.first_time[-8:-6], rows.last_time[-8:-6]) == ("00", "09")
    assert len(rows["absent"].steps_N) == 0


@pytest.mark.parametrize("line", ["not json", '{"loss": 1.0}', '{"step": ' + 5000 * "9" + "}", 100_000 * "["])
def test_a_line_that_is_no_row_is_counted_and_the_others_are_read(tmp_path: Path, line: str) -> None:
    rows = read(tmp_path, GOOD + line + '\n{"step": 3, "loss": 2.0}\n')
    assert rows["loss"].steps_N.tolist() == [1, 3]
    assert rows.notes == ("lines that were left out, being no rows of metrics: 1",)


def test_of_rows_of_one_step_the_last_one_counts_and_steps_increase(tmp_path: Path) -> None:
    lines = [
        {"step": step, "loss": loss} for step, loss in ((1, 1.0), (2, 2.0), (3, 3.0), (2, 20.0), (3, 30.0))
    ]
    rows = read(tmp_path, "".join(json.dumps(line) + "\n" for line in lines))
    assert rows["loss"].steps_N.tolist() == [1, 2, 3]
    assert rows["loss"].values_N.tolist() == [1.0, 20.0, 30.0]
    assert "repeat or go back" in rows.notes[0]


def test_no_file_an_empty_file_and_one_that_just_begins_have_no_rows(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "none").num_rows == 0
    assert read(tmp_path, "").num_rows == 0
    assert read(tmp_path, '{"st').num_rows == 0


def test_a_link_and_a_pipe_are_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(GOOD)
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match="is a link"):
        read_rows(tmp_path / "metrics.jsonl")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="is a pipe"):
        read_rows(tmp_path / "pipe")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
ROWS = st.lists(
    st.dictionaries(st.sampled_from(["step", "loss", "x"]), JSON, max_size=3)
    | st.builds(lambda step, loss: {"step": step, "loss": loss}, st.integers(0, 9), st.floats())
    | JSON,
    max_size=12,
)


@given(ROWS)
def test_whatever_a_file_says_a_step_is_there_once_with_the_last_value_that_it_has(
    tmp_path_factory: pytest.TempPathFactory, values: list[object]
) -> None:
    folder = tmp_path_factory.mktemp("any")
    expected = dict[int, float]()
    for value in values:
        if isinstance(value, dict) and type(value.get("step")) is int and 0 <= value["step"] < 2**53:
            loss = value.get("loss", "")
            if loss is None or type(loss) is float or (type(loss) is int and abs(loss) < 1e100):
                number = math.nan if loss is None else float(loss)
                number = 0.0 if abs(number) < 1e-100 else number
                expected[value["step"]] = number if abs(number) < 1e100 else math.nan
    try:
        rows = read(folder, "".join(json.dumps(value) + "\n" for value in values))
    except UserError:
        assert not expected
        return
    found = dict(zip(rows["loss"].steps_N.tolist(), rows["loss"].values_N.tolist(), strict=True))
    assert list(found) == sorted(expected)
    assert all(
        found[step] == value or (found[step] != found[step] and value != value)
        for step, value in expected.items()
    )


def test_a_value_that_is_not_finite_becomes_nan_and_one_that_is_no_number_is_left_out_and_said(
    tmp_path: Path,
) -> None:
    for value in ("NaN", "-Infinity", "1e999", "-1e308", "null"):
        rows = read(tmp_path, GOOD + f'{{"step": 2, "loss": {value}}}\n')
        assert (np.isnan(rows["loss"].values_N).tolist(), rows.notes) == ([False, True], ()), value
    for value in ('"2.0"', "true", "[1.0]", "1" + 400 * "0"):
        rows = read(tmp_path, GOOD + f'{{"step": 2, "loss": {value}}}\n')
        assert rows["loss"].steps_N.tolist() == [1], value
        assert rows.notes == ("values that were left out, being no numbers: 1",)


def test_the_last_line_counts_if_it_is_whole_and_a_line_without_end_ends_the_reading(tmp_path: Path) -> None:
    rows = read(tmp_path, GOOD + '{"step": 2, "lo')
    assert (rows["loss"].steps_N.tolist(), rows.notes, rows.is_cut) == ([1], (), True)
    rows = read(tmp_path, GOOD + '{"step": 2, "loss": 2.25}')
    assert (rows["loss"].values_N.tolist(), rows.is_cut) == ([2.5, 2.25], False)
    rows = read(tmp_path, GOOD + '{"step": 2, "x": "' + MEBI * "a" + '"}\n' + '{"step": 3, "loss": 1}\n')
    assert rows["loss"].steps_N.tolist() == [1]
    assert rows.notes == (f"line 2 is longer than {MEBI:,} bytes; it and what follows was not read",)
