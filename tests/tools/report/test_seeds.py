"""Runs that differ in their seed alone: means, spreads, and differences that are taken seed by seed."""

import itertools
import math
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from lptune.tools.report import svg
from lptune.tools.report.page import page
from lptune.tools.report.run import Run, read_run
from lptune.tools.report.seeds import cells, compared, paired, spread
from tests.tools.conftest import CONFIG, MakeRun, row

LOSSES = {1: 3.0, 2: 4.0, 3: 5.0}  # of the baseline; seeds differ by far more than kinds


def make(make_run: MakeRun, kind: str, seed: int, more: float, num_steps: int = 100, **files: object) -> Run:
    """A run whose held-out loss is that of the baseline with its seed plus `more`, half way 0.5 above it."""
    losses = {50: LOSSES[seed] + more + 0.5, 100: LOSSES[seed] + more}
    rows = [
        row(step, **({"eval_loss": losses[step]} if step in losses else {}))
        for step in range(1, num_steps + 1)
    ]
    folder = make_run(f"{kind}-{seed}", rows, **files)
    text = (CONFIG % 100).replace("int8_rowcol", kind) + f"seed: {seed}\n"
    if kind == "worse":
        text = text.replace("emulate: false", "emulate: true")
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    return read_run(folder)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 10, 20, 31, 32, 40, 60, 100, 1000])
def test_ninety_five_per_cent_of_students_t_lie_within_the_interval(n: int) -> None:
    values = [0.0] * (n - 2) + [-1.0, 1.0]
    found = spread(values)
    assert found.deviation is not None
    assert found.interval is not None
    assert found.mean == 0
    assert found.deviation == pytest.approx(math.sqrt(2 / (n - 1)))
    t = found.interval / found.deviation * math.sqrt(n)
    freedom = n - 1
    x_N = np.linspace(-t, t, 200_001)
    log_factor = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(freedom * math.pi)
    density_N = np.exp(log_factor - (freedom + 1) / 2 * np.log1p(x_N**2 / freedom))
    # t has three decimals, and the density is below 0.4 on both sides.
    assert np.trapezoid(density_N, x_N) == pytest.approx(0.95, abs=2 * 0.4 * 0.001)


def test_differences_are_taken_seed_by_seed(make_run: MakeRun) -> None:
    samples = [
        f'{{"step": {step}, "prompt": "a", "answer": "{answer}", "reference": "b"}}\n'
        for step, answer in ((0, "b"), (100, "b"), (100, "c"))
    ]
    base = [make(make_run, "none", seed, 0.0) for seed in (3, 1, 2)]
    worse = [
        make(make_run, "worse", seed, 0.1 + 0.01 * seed, samples__jsonl="".join(samples))
        for seed in (1, 2, 3)
    ]
    better = [make(make_run, "better", 2, -0.5)]
    cut = make(make_run, "cut", 1, -1.0, num_steps=60)
    rows = {each.name: each for each in compared([*worse, cut, *base, *better], base[1])}
    assert [*rows] == [
        "kind=better",
        "kind=none",
        "kind=worse, emulate=true",
    ]  # by loss; what did not finish says nothing
    assert [each.n for each in rows.values()] == [1, 3, 3]
    assert [each.is_base for each in rows.values()] == [False, True, False]
    none, other = rows["kind=none"].measured, rows["kind=worse, emulate=true"].measured
    assert none["loss"][:2] == pytest.approx((4.0, 1.0))
    assert "difference" not in none
    # The seeds spread by 1, the differences by 0.01.
    assert other["loss"].deviation == pytest.approx(1.01)
    assert other["difference"] == pytest.approx((0.12, 0.01, 4.303 * 0.01 / math.sqrt(3), 3), abs=1e-9)
    assert other["exact"].mean == 0.5  # of the last samples
    # Steps take 0.1 s; `better` is as low as the baseline half way, `worse` never.
    times = {name: each.measured.get("time_to_base_s") for name, each in rows.items()}
    assert times["kind=none"] == pytest.approx((10.0, 0.0, 0.0, 3))
    assert times["kind=better"] == pytest.approx((5.0, None, None, 1))
    assert times["kind=worse, emulate=true"] is None
    heads, *lines = cells([*rows.values()])
    table = dict(zip(heads, zip(*lines, strict=True), strict=True))
    assert table["difference ± 95 %"] == ("-0.50000", "", "+0.12000 ± 0.02484")
    assert table["runs"][1] == "kind=none (baseline)"
    assert "note" not in table


def test_without_a_reference_nothing_is_subtracted_and_a_run_that_repeats_another_stands_alone(
    make_run: MakeRun,
) -> None:
    runs = [make(make_run, "none", seed, 0.0) for seed in (1, 2)]
    again = read_run(make_run("again", [row(100, eval_loss=9.0)]))
    (again.folder / "config.yaml").write_text((runs[0].folder / "config.yaml").read_text())
    rows = compared([*runs, read_run(again.folder)])
    assert [(each.n, each.measured["loss"].mean) for each in rows] == [(2, 3.5), (1, 9.0)]
    assert not any("difference" in each.measured or each.is_base for each in rows)
    assert compared([]) == []


def test_each_run_is_paired_with_the_run_of_its_own_seed(make_run: MakeRun) -> None:
    base = [make(make_run, "none", seed, 0.0) for seed in (1, 2)]
    others = [make(make_run, "worse", seed, 0.1) for seed in (3, 2, 1)]
    runs = [*base, *others]
    found = paired(runs, base[0])
    assert [runs.index(each) for each in found] == [0, 1, 0, 1, 0]  # seed 3 has none


def test_the_page_shows_the_rows_and_differences_from_the_run_of_the_same_seed(make_run: MakeRun) -> None:
    runs = [
        make(make_run, kind, seed, more)
        for kind, more in (("none", 0.0), ("</svg>", 0.125))
        for seed in LOSSES
    ]
    text = page(runs, 0)
    section = text[text.index("<h2>By seed</h2>") :]
    section = section[: section.index("</section>")]
    assert "+0.12500 ± 0.00000" in section
    assert section.count("<circle") == 1
    # Each run's own difference, too: 0.125 of all three, where seeds differ by 1.
    assert text[: text.index("<h2>By seed</h2>")].count("+0.1250") == 3
    assert "By seed" not in page([runs[0], runs[3]], 0)
    assert "By seed" in page(runs)


def test_the_picture_is_a_file_without_markup_of_a_stranger_and_in_proportion(make_run: MakeRun) -> None:
    kinds = {"none": 0.0, "<script>a": 0.2, "b": -0.1}
    runs = [make(make_run, kind, seed, more * seed) for kind, more in kinds.items() for seed in LOSSES]
    rows = compared(runs, runs[0])
    root = ElementTree.fromstring(svg.differences(rows))
    assert {element.tag.rpartition("}")[2] for element in root.iter()} <= {
        "svg",
        "rect",
        "path",
        "text",
        "circle",
    }
    assert "kind=<script>a" in "".join(root.itertext())
    dots = [float(each.attrib["cx"]) for each in root.iter() if each.tag.endswith("circle")]
    zero = float(next(e.attrib["d"] for e in root.iter() if e.get("class") == "base").split()[0][1:])
    assert dots[0] < zero < dots[1]  # b, then a
    assert (dots[1] - zero) / (zero - dots[0]) == pytest.approx(2.0, abs=0.01)  # in tenths of a unit


def test_the_picture_shows_names_whole_and_ticks_apart(make_run: MakeRun) -> None:
    kinds = {"none": 0.0, "float8_rowwise_with_gw_hp and more": 0.0021, "b": -0.0011}
    runs = [make(make_run, kind, seed, more * seed) for kind, more in kinds.items() for seed in LOSSES]
    root = ElementTree.fromstring(svg.differences(compared(runs, runs[0])))
    texts = [each for each in root.iter() if each.tag.endswith("text")]
    assert any(each.text == "kind=float8_rowwise_with_gw_hp and more" for each in texts)
    ticks = [each for each in texts if each.get("text-anchor") == "middle"]
    assert "0" in [each.text for each in ticks]
    ends = [(float(each.attrib["x"]), 3 * len(each.text or "")) for each in ticks]  # a letter is 6 wide
    for (x, half), (next_x, next_half) in itertools.pairwise(ends):
        assert x + half < next_x - next_half
