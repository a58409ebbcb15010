"""The page in a browser: no complaint, no request, no sideways scrolling, and a cursor that keys move."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from lptune.tools.report.page import write_page
from lptune.tools.report.run import read_run
from tests.helpers import chromium
from tests.tools.conftest import MakeRun, plan, row

PROGRAM = chromium.find()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="needs Chromium (apt-get install chromium)")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Page]:
    assert PROGRAM is not None
    with chromium.browser(PROGRAM, tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def pages(make_run: MakeRun, tmp_path: Path) -> dict[str, Path]:
    """One run, and three overlaid."""
    samples = [
        {"step": step, "when": when, "prompt": "p" * 300, "answer": "<script>alert(1)</script>" * 9}
        for step, when in ((0, "before training"), (400, "after training"))
    ]
    layer = {"gradient_sqnr_db": 30.0, "gradient_cosine": 0.999, "output_sqnr_db": 31.0, "saturated": 0.1}
    check = {"step": 9, "layers": {f"model.layers.{i}.mlp.up_proj": layer for i in range(60)}}
    folders = []
    for number in range(3):
        rows = [row(step, loss=2 + math.sin(step * (number + 1))) for step in range(1, 401)]
        rows[99] |= {"eval_loss": 1.0 + number, f"eval_loss/{'long' * 15}": 1.0}
        rows[199]["loss"] = None
        name = f"run-{number}" + "-with-a-long-name" * number
        folders.append(
            make_run(
                name, rows, precision_plan__json=plan(40), shadow__jsonl=json.dumps(check),
                samples__jsonl="".join(json.dumps(each) + "\n" for each in samples),
                config__yaml=f"seed: {number}\nmodel: {{path: {'/long' * 60}}}\n",
            )
        )  # fmt: skip
    runs = [read_run(folder) for folder in folders]
    paths = {name: tmp_path / f"{name}.html" for name in ("one", "three")}
    for name, shown in (("one", runs[:1]), ("three", runs)):
        write_page(paths[name], shown, 0)
    return paths


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("name", ["one", "three"])
def test_no_complaint_no_request_and_no_sideways_scrolling(
    browser: chromium.Page, pages: dict[str, Path], name: str, width: int
) -> None:
    browser.complaints.clear()
    browser.requests.clear()
    browser.open(pages[name], width, dark=width == 400)
    browser.evaluate("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    assert set(browser.requests) == {pages[name].as_uri()}
    assert browser.complaints == []
    # Each chart is drawn, and none of its texts is cut off by its edge or the page's.
    cut = """[...document.querySelectorAll('figure svg')].flatMap((svg) => {
        const outer = svg.getBoundingClientRect();
        return [...svg.querySelectorAll('text')].map((text) => text.getBoundingClientRect())
          .filter((box) => !box.width || box.left < outer.left || box.right > outer.right + 1)
          .map((box) => box.left);
      })"""
    assert browser.evaluate(cut) == []
    assert browser.evaluate("document.querySelectorAll('figure svg path.line').length") >= 6


def test_the_policy_of_the_page_stops_a_script_and_a_request_that_got_in(
    browser: chromium.Page, pages: dict[str, Path]
) -> None:
    text = pages["one"].read_text(encoding="utf-8")
    planted = "<script>document.title = 'ran'</script><img src='https://example.com/x'><p style='color:red'>"
    pages["one"].write_text(text.replace("</body>", f"{planted}</body>"), encoding="utf-8")
    browser.complaints.clear()
    browser.open(pages["one"], 1280)
    assert browser.evaluate("document.title") == "run-0 · lptune report"
    assert len([each for each in browser.complaints if "Content Security Policy" in each]) == 3


def test_keys_move_a_cursor_that_reads_values(browser: chromium.Page, pages: dict[str, Path]) -> None:
    browser.open(pages["three"], 1280)
    browser.evaluate("document.querySelector('#chart-lr svg').focus()")
    read = "document.querySelector('#chart-lr .readout').innerText.split(/\\s+/).join(' ')"
    long = "run-1-with-a-long-name"
    assert browser.evaluate(read).startswith(f"step 400 run-0 0.001 {long} 0.001")
    for key, step in (("ArrowLeft", 399), ("ArrowLeft", 398), ("Home", 1), ("ArrowRight", 2), ("End", 400)):
        browser.press(key)
        assert browser.evaluate(read).startswith(f"step {step} run-0 0.001"), key
    # A run that is not shown is not read.
    browser.evaluate("document.querySelector('#show-0').click()")
    browser.press("ArrowLeft")
    assert browser.evaluate(read).startswith(f"step 399 {long} 0.001")
    assert browser.evaluate("getComputedStyle(document.querySelector('#chart-lr .r0')).display") == "none"
    browser.evaluate("document.activeElement.blur()")
    assert browser.evaluate(read) == ""


def test_every_chart_can_be_reached_by_the_tab_key(browser: chromium.Page, pages: dict[str, Path]) -> None:
    browser.open(pages["one"], 1280)
    reached = set()
    for _ in range(60):
        browser.press("Tab")
        reached.add(browser.evaluate("document.activeElement.closest('figure')?.id ?? ''"))
    charts = set(browser.evaluate("[...document.querySelectorAll('figure')].map((each) => each.id)"))
    assert len(charts) >= 7
    assert charts <= reached


def test_without_javascript_charts_values_and_the_choice_of_runs_are_there(
    browser: chromium.Page, pages: dict[str, Path]
) -> None:
    browser.open(pages["three"], 1280, scripts=False)
    # The protocol still evaluates; the page's own script has not run.
    assert browser.evaluate("document.querySelector('#chart-loss svg').tabIndex") == -1
    assert (
        browser.evaluate("document.querySelector('#chart-loss .r1 .line').getBoundingClientRect().width")
        > 300
    )
    browser.evaluate("document.querySelector('#show-1').click()")
    assert browser.evaluate("getComputedStyle(document.querySelector('#chart-loss .r1')).display") == "none"
    browser.evaluate("document.querySelector('#chart-loss details').open = true")
    assert "largest" in browser.evaluate("document.querySelector('#chart-loss table').innerText")
