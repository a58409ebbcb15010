"""The summary at the end of a run, made from its files."""

import dataclasses
import json
import shlex
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lptune.base.errors import DivergedError
from lptune.cli import closing
from lptune.cli.catalog import find_config
from lptune.config import EvaluateConfig, FinetuneConfig, load_config
from lptune.tools.report import closing as tool


def _cfg(folder: Path, *keys: str) -> FinetuneConfig:
    config = folder / "c.yaml"
    config.write_text("model: {path: m}\ndata: {source: rows.jsonl}\n", encoding="utf-8")
    return load_config(FinetuneConfig, config, [f"output_dir={folder / 'run'}", *keys])


def _write(folder: Path, records: list[Any]) -> None:
    (folder / "run").mkdir(exist_ok=True)
    text = "".join(f"{json.dumps(record)}\n" for record in records)
    (folder / "run" / "metrics.jsonl").write_text(text, encoding="utf-8")


def _show(cfg: FinetuneConfig) -> None:
    with closing.around(cfg):
        pass


def _step(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 2.0,
        "step_time_s": 2.0,
        "compile_time_s": 30.0 if step == 1 else 0.0,
        "tokens_per_s": 1000.0,
        "peak_memory_gib": 1.25,
        "low_precision_flops_fraction": 0.75,
        **more,
    }


def test_a_run_is_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = _cfg(tmp_path, "precision.kind=int8_rowcol")
    _write(
        tmp_path,
        [
            {"step": 0, "eval_loss": 6.5},
            _step(1),
            _step(2, eval_loss=1.25),
            _step(3, eval_loss=None, tokens_per_s=None),
            _step(4, eval_loss=1.5, peak_memory_gib=2.0),
        ],
    )
    (tmp_path / "run" / "export").mkdir()
    _show(cfg)
    run = tmp_path / "run"
    assert capsys.readouterr().out.splitlines() == [
        "done       4 steps in 38.0 s (30.0 s of it compiling), 1,000 tokens/s",
        "held-out   loss 6.5000 before training, 1.5000 after step 4; 1.2500 at step 2",
        "precision  int8_rowcol ran 75% of the FLOPs of the linear layers in 8 bits",
        "memory     2.00 GiB at most on rank 0",
        f"files      {run}: export/, report.html, metrics.jsonl",
        "next",
        f"  lptune run generate --config generation model.path={run}",
        f"  lptune report {run} --open",
    ]


def test_the_time_of_a_continued_run_is_that_of_all_launches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for time, of in (
        ("2026-01-01T00:00:00.000+00:00", " of all launches"),
        ("9999-01-01T00:00:00+00:00", ""),
        ("?", ""),
    ):
        _write(tmp_path, [_step(1, time=time), _step(2)])
        _show(_cfg(tmp_path))
        assert f"done       2 steps in 34.0 s{of} (30.0 s of it compiling)" in capsys.readouterr().out


def test_the_command_to_evaluate_measures_the_rows_that_the_run_held_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = _cfg(tmp_path, "data.source=my rows.jsonl", "data.eval_fraction=0.05", "data.seq_len=128", "seed=3")
    _write(tmp_path, [_step(1)])
    (tmp_path / "run" / "export").mkdir()
    _show(cfg)
    command = capsys.readouterr().out.partition("\nnext\n")[2].partition("lptune report")[0]
    command = command[command.index("lptune run evaluate") :]
    assert all(len(line) <= 80 or str(tmp_path) in line for line in command.splitlines())
    assert command.count("\\\n") == command.strip().count("\n") > 0, "each line but the last goes on"
    words = shlex.split(command.replace("\\\n", ""))
    assert words == [
        *("lptune", "run", "evaluate", "--config", "evaluation", f"model.path={tmp_path / 'run'}"),
        f"output={tmp_path / 'run' / 'evaluation.json'}",
        *("data.source=my rows.jsonl", "data.seq_len=128", "data.eval_fraction=0.05", "seed=3"),
    ]
    again = load_config(EvaluateConfig, find_config("evaluation"), words[5:])
    assert (again.data.source, again.data.eval_fraction, again.seed) == ("my rows.jsonl", 0.05, 3)


def test_a_shell_reads_each_value_of_the_command_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "Q: {prompt}\n\tA\\: it's "
    system = (
        "You are a patient teacher who answers every question in two plain sentences, without a list: 'ä'"
    )
    values = {"data.prompt_template": prompt, "data.system_prompt": system, "data.chat_template": "none"}
    cfg = _cfg(tmp_path, "data.eval_fraction=0.05")
    cfg = dataclasses.replace(
        cfg,
        data=dataclasses.replace(cfg.data, **{key.partition(".")[2]: each for key, each in values.items()}),
    )
    _write(tmp_path, [_step(1)])
    (tmp_path / "run" / "export").mkdir()
    _show(cfg)
    command = capsys.readouterr().out.partition("lptune run evaluate")[2].partition("lptune report")[0]
    script = "printf '%s\\0' " + command
    read = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    words = dict(word.split("=", 1) for word in read.split("\0") if "=" in word)
    assert {key: words[key] for key in values} == values


def test_shadow_checks_are_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = _cfg(tmp_path)
    _write(tmp_path, [_step(1, shadow_worst_sqnr_db=31.25), _step(2, shadow_worst_sqnr_db=-23.5)])
    checks = [
        {"step": 1, "loss": 1.0, "shadow_loss": 1.0, "layers": {}, "switched_to_high": []},
        {"step": 2, "loss": 1.0, "shadow_loss": 1.0, "layers": {}, "switched_to_high": ["layers.0.up"]},
    ]
    lines = "".join(f"{json.dumps(check)}\n" for check in checks)
    (tmp_path / "run" / "shadow.jsonl").write_text(lines, encoding="utf-8")
    _show(cfg)
    shown = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("shadow"))
    assert shown == ("shadow     2 checks, lowest SQNR -23.5 dB; fell back to high precision: layers.0.up")


def test_what_is_not_known_is_left_out_and_a_run_without_a_step_says_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = _cfg(tmp_path)
    _show(cfg)
    for records in ([], [{"step": 0, "eval_loss": 1.0}]):
        _write(tmp_path, records)
        _show(cfg)
    assert capsys.readouterr().out == ""
    _write(tmp_path, [[1], "x", {"step": "2"}, {"step": 1, "loss": 2.0}])
    with (tmp_path / "run" / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 2, "lo')
    _show(cfg)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "done       1 step"
    assert [line.split("  ")[0] for line in lines] == ["done", "files"]


@pytest.mark.parametrize(
    ("rank", "ends_by", "has_summary", "has_report"),
    [
        ("0", None, True, True),
        ("1", None, False, False),
        ("0", DivergedError("three steps in a row"), False, True),
        ("0", SystemExit(143), False, False),
    ],
)
def test_rank_0_speaks_of_a_run_that_was_not_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    rank: str, ends_by: BaseException | None, has_summary: bool, has_report: bool,
) -> None:  # fmt: skip
    _write(tmp_path, [_step(1)])
    monkeypatch.setenv("RANK", rank)
    with suppress(DivergedError, SystemExit), closing.around(_cfg(tmp_path)):
        if ends_by is not None:
            raise ends_by
    assert capsys.readouterr().out.startswith("done ") == has_summary
    assert (tmp_path / "run" / "report.html").is_file() == has_report


def test_no_error_of_the_report_makes_a_finished_run_a_failed_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise MemoryError("no memory for a page")

    cfg = _cfg(tmp_path)
    _write(tmp_path, ["nothing of a run"] * 3)
    _show(cfg)
    assert capsys.readouterr().out.startswith("note: no report of the run: ")
    _write(tmp_path, [_step(1)])
    monkeypatch.setattr(tool, "summary", fails)
    _show(cfg)
    assert capsys.readouterr().out == "note: no report of the run: MemoryError: no memory for a page\n"
    with pytest.raises(DivergedError), closing.around(cfg):  # not the error of the report in its place
        raise DivergedError("three steps in a row")
