"""`lptune report` and `lptune diff`: what they print, where they write, and what is one line of error."""

import json
import os
import re
from pathlib import Path

import pytest

from tests.cli.conftest import Command, Lptune


def a_run(folder: Path, num_steps: int = 5, **config: str) -> Path:
    folder.mkdir(parents=True)
    rows = [{"step": step, "loss": 3.0 - step / 10, "lr": 1e-3} for step in range(1, num_steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"num_steps": str(num_steps), "seed": "0"} | config
    (folder / "config.yaml").write_text("".join(f"{key}: {value}\n" for key, value in keys.items()))
    return folder


def test_one_run_is_reported_in_its_folder_and_several_in_this_one(command: Command, tmp_path: Path) -> None:
    for name in ("a", "b"):
        a_run(tmp_path / "runs" / name)
    code, out, err = command("report", "runs/a")
    assert (code, err) == (0, "")
    assert out == f"report: {tmp_path}/runs/a/report.html\n"
    assert (tmp_path / "runs/a/report.html").read_text().startswith("<!doctype html>")
    code, out, err = command("report", "runs/a", "runs/b", "./runs/a")
    assert (code, out, err) == (0, f"report: {tmp_path}/report.html\n", "")
    assert "2 runs" in (tmp_path / "report.html").read_text()
    code, out, err = command("report", "runs/a", "./runs/a", "--output", "x.html", "--reference", "runs/b")
    assert (code, out, err) == (0, f"report: {tmp_path}/x.html\n", "")
    assert "b (reference)" in (tmp_path / "x.html").read_text()


def test_a_folder_of_runs_stands_for_them(command: Command, tmp_path: Path) -> None:
    for name in ("a", "b"):
        a_run(tmp_path / "sweep" / name)
    (tmp_path / "sweep" / "logs").mkdir()
    code, stdout, _ = command("report", str(tmp_path / "sweep"))
    assert code == 0
    page = tmp_path / "sweep" / "report.html"
    assert str(page) in stdout
    assert "2 runs" in page.read_text(encoding="utf-8")
    code, _, stderr = command("report", str(tmp_path / "sweep" / "logs"))
    assert code == 2
    assert "is not a run's folder" in stderr


def test_each_chart_becomes_an_svg_file(command: Command, tmp_path: Path) -> None:
    run = a_run(tmp_path / "a")
    with (run / "metrics.jsonl").open("a") as metrics:  # two names that are the same as a file's
        metrics.write('{"step": 6, "eval_loss/a b": 1.0, "eval_loss/a-b": 2.0}\n')
    code, out, _ = command("report", "a", "--svg", "out/svg")
    assert code == 0
    names = {path.name for path in (tmp_path / "out/svg").iterdir()}
    assert names == {"loss.svg", "lr.svg", "eval-loss-a-b.svg", "eval-loss-a-b-2.svg"}
    assert f"4 charts as SVG: {tmp_path}/out/svg\n" in out
    (tmp_path / "out/svg/loss.svg").unlink()
    os.mkfifo(tmp_path / "out/svg/loss.svg")
    code, _, err = command("report", "a", "--svg", "out/svg")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("error: out/svg: cannot be written: it is a pipe")


def test_what_a_run_holds_cannot_control_the_terminal(lptune: Lptune, tmp_path: Path) -> None:
    evil = "\x1b[2J"
    run = a_run(tmp_path / "a")
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, evil: 1.0}) + "\nx\n")
    (run / "config.yaml").write_text(f"{json.dumps(evil)}: {json.dumps(evil)}\n")
    (run / "run.json").write_text(json.dumps({"recipe": evil, "data_digest": evil}))
    layer = {"name": evil, "output": evil}
    (run / "precision_plan.json").write_text(json.dumps({"kind": evil, "layers": [layer]}))
    b = a_run(tmp_path / "b")
    other = {"kind": "none", "layers": [layer | {"output": "high"}]}
    (b / "precision_plan.json").write_text(json.dumps(other))
    a_run(tmp_path / f"c{evil}")
    for arguments, code, said in (
        (("report", "a"), 0, "note: a: metrics.jsonl: lines that were left out"),
        (("diff", "b", "a"), 0, "\\x1b[2J"),
        (("report", f"c{evil}", "b"), 2, ""),
    ):
        done = lptune(*arguments)
        assert done.returncode == code, done.stderr
        assert "\x1b" not in done.stdout + done.stderr
        assert said in done.stdout + done.stderr


def test_open_asks_for_a_browser_and_says_where_the_file_is_if_there_is_none(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import webbrowser

    asked = list[str]()
    monkeypatch.setattr(webbrowser, "open", lambda url: asked.append(url))
    a_run(tmp_path / "a")
    code, _, err = command("report", "a", "--open")
    assert code == 0
    assert asked == [(tmp_path / "a" / "report.html").as_uri()]
    assert "no browser here" in err


def test_diff_compares_runs_and_configs_in_any_pair(command: Command, tmp_path: Path) -> None:
    a_run(tmp_path / "a")
    a_run(tmp_path / "b", seed="1")
    code, out, err = command("diff", "a", "b")
    assert (code, err) == (0, "")
    assert "config: 1 of 2 keys differ" in out
    assert max(map(len, out.splitlines())) <= 80
    mine = "model: {path: x}\ndata: {source: builtin}\nseed: 3\nnum_steps: 5\n"
    (tmp_path / "mine.yaml").write_text(mine)
    code, out, err = command("diff", "quickstart", "mine.yaml")
    assert (code, err) == (0, "")
    assert re.search(r"seed +0 +3", out)
    assert re.search(r"global_batch_size +16 +\d+", out)  # mine.yaml has the default
    code, out, _ = command("diff", "a", "mine.yaml")
    assert code == 0
    assert "losses" not in out
    # The recipe of a config that does not name it is found.
    (tmp_path / "dpo.yaml").write_text(f"{mine}preference: {{beta: 0.5}}\n")
    code, out, err = command("diff", "dpo.yaml", "quickstart")
    assert (code, err, "preference.beta" in out) == (0, "", True)
