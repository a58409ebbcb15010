"""The page: what it says, in which order, and that nothing in a run's files can become markup."""

import base64
import hashlib
import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lptune.tools import report
from lptune.tools.report.page import arrange, page
from lptune.tools.report.run import is_running, read_run
from lptune.tools.report.svg import standalone, styles
from tests.tools.conftest import MakeRun, plan, row

HOSTILE = '</script></style><script>alert(1)</script><img src=x onerror="alert(1)">\'"&\x1b[2J\u202e\ud800'


class Parsed(HTMLParser):
    """Elements with their attributes, and the text between them."""

    VOID = ("meta", "input", "br")

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.open = "", list[str]()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


ELEMENTS = {
    "html", "head", "meta", "title", "style", "body", "header", "p", "div", "h1", "h2", "h3", "h4", "span",
    "dl", "dt", "dd", "section", "figure", "figcaption", "svg", "path", "rect", "g", "text", "output",
    "details", "summary", "table", "thead", "tbody", "tr", "th", "td", "code", "pre", "footer", "script",
    "label", "input", "aside", "ul", "li",
}  # fmt: skip


def parsed(*folders: Path, reference: int | None = None) -> Parsed:
    return Parsed(page([read_run(folder) for folder in folders], reference))


def shadow_rows(name: str = "model.layers.0.mlp.up_proj") -> str:
    layer = {"gradient_cosine": 0.9, "gradient_sqnr_db": 12.5, "output_sqnr_db": 30.0, "saturated": 0.25}
    other = {"gradient_cosine": 0.99, "gradient_sqnr_db": 33.0, "output_sqnr_db": 31.0, "saturated": 0.0}
    layers = {name: layer, "model.layers.1.mlp.up_proj": other}
    losses = {"loss": 2.0, "shadow_loss": 2.1}
    return json.dumps({"step": 10, **losses, "layers": layers, "switched_to_high": [name]})


def test_no_text_of_a_run_becomes_markup(make_run: MakeRun) -> None:
    files = {
        "samples__jsonl": json.dumps(
            {"step": 0, "when": HOSTILE, "prompt": HOSTILE, "answer": HOSTILE, "reference": HOSTILE}
        ),
        "config__yaml": f"model: {{path: {json.dumps(HOSTILE)}}}\n'k<b>': {json.dumps(HOSTILE)}\n",
        "precision_plan__json": {
            "kind": HOSTILE,
            "layers": [{"name": HOSTILE, "output": HOSTILE, "shape": [HOSTILE]}],
        },
        "run__json": {
            "recipe": HOSTILE,
            "id": HOSTILE,
            "data_digest": HOSTILE,
            "launches": [{"device": HOSTILE, "versions": {HOSTILE: HOSTILE}, "num_ranks": HOSTILE}],
        },
        "shadow__jsonl": shadow_rows(HOSTILE),
    }
    rows = [row(step, **{f"eval_loss/{HOSTILE}": 1.0, HOSTILE: 2.0, "time": HOSTILE}) for step in (1, 2)]
    one = make_run("<b>a", rows, **files)
    two = make_run("b&amp;", rows, **files | {"config__yaml": "seed: 1\n"})
    for found in (parsed(one), parsed(one, two, reference=1)):
        assert not found.open
        assert {name for name, _ in found.elements} <= ELEMENTS
        assert found.count("script") == 3
        for name, attributes in found.elements:
            assert not [key for key in attributes if key.startswith("on")], attributes
            assert not {"src", "href", "action", "style"} & set(attributes), (name, attributes)
        assert "alert(1)" in found.text  # it is shown
        assert "\x1b" not in found.text
        assert "\u202e" not in found.text
        assert "\\x1b[2J\\u202e\\ud800" in found.text


def test_the_page_fetches_nothing_and_its_policy_allows_its_own_script_and_style_alone(
    make_run: MakeRun,
) -> None:
    text = page([read_run(make_run("a", [row(1)]))])
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    digests = []
    for name in ("style", "script"):
        (own,) = re.findall(f"<{name}>(.*?)</{name}>", text, re.DOTALL)
        digests.append(base64.b64encode(hashlib.sha256(own.encode()).digest()).decode())
    assert html.unescape(policy) == (
        f"default-src 'none'; style-src 'sha256-{digests[0]}'; script-src 'sha256-{digests[1]}'; "
        "base-uri 'none'; form-action 'none'"
    )
    assert not re.search(r"url\(|@import|<link|<img|<iframe|https?://(?!www.w3.org/2000/svg)", text)


def test_a_standalone_chart_is_xml_without_markup_of_a_stranger(make_run: MakeRun) -> None:
    import xml.etree.ElementTree as ElementTree

    folders = [make_run(name, [row(step) for step in (1, 2)]) for name in ("<script>a", "b")]
    shown = arrange([read_run(folder) for folder in folders], 0)
    for chart in [*shown.main, *shown.others]:
        root = ElementTree.fromstring(standalone(chart, shown.names, shown.looks))
        names = {element.tag.rpartition("}")[2] for element in root.iter()}
        assert names <= {"svg", "style", "rect", "text", "g", "path"}
        assert "<script>a" in "".join(root.itertext())


def test_runs_are_sorted_by_their_final_held_out_loss_and_those_without_come_last(make_run: MakeRun) -> None:
    losses = {"middle": 2.0, "none": None, "best": 1.0, "worst": 3.0}
    folders = []
    for name, loss in losses.items():
        # A lower loss before the last one does not count.
        more = {} if loss is None else {"eval_loss": loss}
        folders.append(make_run(name, [row(1, **({"eval_loss": 0.5} if more else {})), row(2, **more)]))
    shown = arrange([read_run(folder) for folder in folders], reference=3)
    assert shown.names == ["best", "middle", "worst", "none"]
    assert shown.reference == 2
    text = page([read_run(folder) for folder in folders], reference=3)
    body = text[text.index("<tbody") :]
    places = [
        body.index(f"</svg> {name}<") if name != "worst" else body.index("</svg> worst (reference)")
        for name in shown.names
    ]
    assert places == sorted(places)


@pytest.mark.parametrize(("num_runs", "reference"), [(42, None), (37, 0), (37, 36)])
def test_each_run_has_a_look_of_its_own_and_six_differ_also_without_colour(
    num_runs: int, reference: int | None
) -> None:
    looks = styles(num_runs, reference)
    assert len(set(looks)) == num_runs
    assert len({look.dash for look in looks[:6]}) == 6
    if reference is not None:
        assert [place for place, look in enumerate(looks) if look.colour is None] == [reference]
        assert [place for place, look in enumerate(looks) if look.dash == ""] == [reference]


def test_the_first_page_says_what_the_run_is_and_how_it_went(make_run: MakeRun) -> None:
    rows = [{"step": 0, "eval_loss": 6.5}, *(row(step) for step in range(1, 100)), row(100, eval_loss=0.4321)]
    rows[1]["compile_time_s"] = 57.25
    run_json = {
        "id": "0a1b2c3d",
        "recipe": "full_dpo",
        "data_digest": "c24c6e570d203238",
        "launches": [
            {"num_steps": 100, "num_ranks": 8, "device": "NVIDIA H100", "versions": {"torch": "2.13.0"}}
        ],
    }
    samples = [
        {"step": 0, "when": "before training", "prompt": "1+1?", "answer": "the", "reference": "2"},
        {"step": 100, "when": "after training", "prompt": "1+1?", "answer": "two", "reference": "2"},
    ]
    folder = make_run(
        "a",
        rows,
        run__json=run_json,
        precision_plan__json=plan(32),
        shadow__jsonl=shadow_rows(),
        samples__jsonl="".join(json.dumps(each) + "\n" for each in samples),
    )
    text = " ".join(parsed(folder).text.split())
    for said in (
        "finished, step 100 of 100", "full_dpo", "int8_rowcol", "NVIDIA H100, 8 ranks", "torch 2.13.0",
        "0a1b2c3d", "c24c6e570d203238", "2026-11-23 10:00 UTC", "0.4321", "before training 6.5000",
        "57.2 s of compilation", "20,000", "0.50 GiB", "75 %", "model.layers.0-31.self_attn.q_proj",
        "in precision.skip", "64 of 65 linear layers", "Answer before training", "Answer after training",
        "step 10: the shadow check switched model.layers.0.mlp.up_proj to high precision", "12.5 (0)",
        "25 % (0)", "checkpoints/quickstart", "optimizer: {lr: 0.003}",
    ):  # fmt: skip
        assert said in text, said
    assert text.count("self_attn.q_proj") == 1  # of 32 layers


def test_differing_keys_are_columns_and_equal_ones_are_not(make_run: MakeRun) -> None:
    folders = [make_run(name, [row(1)]) for name in ("a", "b")]
    config = folders[1] / "config.yaml"
    config.write_text(config.read_text().replace("0.003", "0.001").replace("runs/x", "runs/y"))
    text = page([read_run(folder) for folder in folders])
    heads = re.findall(r'<th scope="col"><code>([^<]*)</code>', text)
    assert heads == ["optimizer.lr"]


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        ([row(step) for step in range(1, 101)], "finished"),
        ([row(step) for step in range(1, 41)], "stopped"),
        ([row(1), row(2, loss=None), row(3, loss=None), row(4, loss=None)], "diverged"),
        ([row(1), row(2, loss=None), row(3, loss=None), row(4)], "stopped"),
        ([], "not started"),
        ([{"step": 0, "eval_loss": 1.0}], "stopped"),
    ],
)
def test_the_status_of_a_run_that_no_longer_goes_on(make_run: MakeRun, rows: list[dict], word: str) -> None:
    assert read_run(make_run("a", rows)).status.word == word


@pytest.mark.parametrize(
    ("losses", "word"),
    [
        ({10: 2.0, 20: 1.0, 30: 1.1, 40: 1.0}, "finished"),  # an equal loss is no lower one
        ({10: None, 40: None}, "finished"),
        ({10: 2.0, 20: 1.0, 30: 1.1, 40: 0.9}, "stopped"),
        ({10: 2.0, 20: 1.0, 40: 1.1}, "stopped"),
        ({10: 1.0, 20: 2.0, 30: 1.1}, "stopped"),  # trained on after the evaluation
        ({}, "stopped"),
    ],
)
def test_a_run_that_its_evaluations_ended_is_finished_whatever_was_exported(
    make_run: MakeRun, losses: dict[int, float | None], word: str
) -> None:
    rows = [row(step, **({"eval_loss": losses[step]} if step in losses else {})) for step in range(1, 41)]
    folder = make_run("a", rows, export__json={"step": 20})  # checkpoint.keep_best
    (folder / "config.yaml").write_text("num_steps: 100\nearly_stop_after: 2\n")
    assert read_run(folder).status.word == word
    (folder / "export.json").write_text('{"step": 40}')  # of the last step: it had ended
    assert read_run(folder).status.word == "finished"


def test_a_run_whose_lock_is_held_goes_on_but_not_for_itself(make_run: MakeRun) -> None:
    import fcntl

    folder = make_run("a", [row(step) for step in range(1, 41)])
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 4')
    with (folder / ".lock").open("w") as lock:
        assert not is_running(folder)
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert is_running(folder)
        assert read_run(folder).status.word == "running"
        assert read_run(folder).notes == ()
        assert "about 6.0 s to go" in parsed(folder).text
        assert "stopped, step 40 of 100" in report.write(folder).read_text()
    assert read_run(folder).status.word == "stopped"
    assert read_run(folder).notes == ("metrics.jsonl: the last line is incomplete, as a kill leaves it",)


def test_write_makes_one_file_and_leaves_the_others_alone(make_run: MakeRun) -> None:
    folder = make_run("a", [row(step) for step in range(1, 41)], precision_plan__json=plan())
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert report.write(folder) == folder / "report.html"
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert after.pop("report.html")
    assert after == before
    report.write(folder)
    assert len(list(folder.iterdir())) == len(before) + 1


def test_a_link_among_the_files_of_a_run_is_not_followed(make_run: MakeRun, tmp_path: Path) -> None:
    folder = make_run("a", [row(1)])
    (tmp_path / "secret").write_text("api_token: hush\n")
    (folder / "config.yaml").unlink()
    (folder / "config.yaml").symlink_to(tmp_path / "secret")
    found = parsed(folder)
    assert "hush" not in found.text
    assert "config.yaml: is a link" in found.text
    (folder / "report.html").symlink_to(tmp_path / "secret")
    report.write(folder)
    assert (tmp_path / "secret").read_text() == "api_token: hush\n"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.yaml", "a: [1"),
        ("config.yaml", "- 1\n"),
        ("run.json", "{"),
        ("run.json", '{"launches": 7, "id": [[]]}'),
        ("run.json", '{"launches": [1, {"versions": 7, "num_steps": "x"}]}'),
        ("run.json", 100_000 * "["),
        ("precision_plan.json", '{"layers": [1, {"shape": 3, "spec": 2}]}'),
        ("samples.jsonl", '{"step": 1, "prompt": [[1]], "answer": null}\nx\n'),
        ("shadow.jsonl", '{"step": 1, "layers": {"a": 1, "b": {"gradient_sqnr_db": "x"}}}\n'),
        ("shadow.jsonl", '{"step": 1, "layers": {}, "switched_to_high": 3, "loss": 1e400}\n'),
        ("export.json", "7"),
        (".lock", ""),
    ],
)
def test_another_file_that_is_not_as_it_should_be_does_not_stop_the_report(
    make_run: MakeRun, name: str, content: str
) -> None:
    folder = make_run("a", [row(1), row(2)])
    (folder / name).write_text(content, encoding="utf-8")
    found = parsed(folder)
    assert found.count("figure") >= 6
    report.write(folder)


def test_numbers_beyond_any_real_one_still_make_a_page(make_run: MakeRun) -> None:
    rows = [
        row(1, loss=1.7e308, lr=-1e308, grad_norm=5e-324, tokens_per_s=1e308, compile_time_s=1e308),
        row(2, loss=-1.7e308, lr=1e308, grad_norm=1e308, num_skipped=10**300, step_time_s=1e308),
        row(2**53 - 1, loss=0.0, low_precision_flops_fraction=1e300),
    ]
    layers = {f"l.{i}.x": {"gradient_sqnr_db": value} for i, value in enumerate((1.7e308, -1.7e308, 1e99))}
    check = json.dumps({"step": 1, "layers": layers})
    a = make_run("a", rows, shadow__jsonl=check)
    found = parsed(a, make_run("b", rows[::-1]), reference=0)
    assert found.count("figure") >= 6
    assert not re.search(r"\bnan\b|\binf\b", found.text)
    for _, attributes in found.elements:
        assert not re.search(r"nan|inf", f"{attributes.get('d')} {attributes.get('height')}")


def test_a_page_of_three_long_runs_is_small_and_shows_each_peak(make_run: MakeRun) -> None:
    num_steps = 20_000
    rows = [row(step, loss=2 + (step * 7919 % 1000) / 1000) for step in range(1, num_steps + 1)]
    rows[12_345]["grad_norm"] = 345.678
    folders = [make_run(name, rows) for name in ("a", "b", "c")]
    runs = [read_run(folder) for folder in folders]
    text = page(runs, 0)
    assert len(text.encode()) < 1_000_000
    assert text.count("345.68") >= 3  # the cursor's data of each run
    assert "every peak is there" in text
    assert "345.7 (step 12,346)" in text
    assert "every peak is there" not in page([read_run(make_run("short", rows[:100]))])
