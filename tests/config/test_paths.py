"""Paths that others prepared: compared by what they lead to, opened without following or waiting."""

from pathlib import Path

import pytest

from lptune.base.errors import UserError
from lptune.base.files import TEMPORARY
from lptune.config import (
    RUN_FILES,
    RUN_FOLDERS,
    DataConfig,
    FinetuneConfig,
    ModelConfig,
    SourceConfig,
    check_inputs_stay,
    data_files,
)


def _config(
    model: Path | str, output_dir: Path | str, source: str = "builtin", **data: str
) -> FinetuneConfig:
    return FinetuneConfig(
        model=ModelConfig(path=str(model)), data=DataConfig(source=source, **data), output_dir=str(output_dir)
    )


PARTIAL = [f"{TEMPORARY}{name}" for name in (*RUN_FILES, "export-0123456789ab", "removed-export")]
"""Names beside its own under which a run writes or removes."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with an export, and links to both."""
    run = tmp_path / "run"
    for name in ("export", ".tmp-export-0"):
        (run / name).mkdir(parents=True)
    (tmp_path / "sub").mkdir()
    (tmp_path / "alias").symlink_to(run)
    (tmp_path / "base").symlink_to("alias/export")
    return run


@pytest.mark.parametrize("model", ["base", "alias/export", "sub/../run/export", "alias", "run/.tmp-export-0"])
@pytest.mark.parametrize("output_dir", ["run", "sub/../alias"])
def test_a_model_in_the_place_of_the_run_is_refused_however_it_is_spelt(
    run: Path, model: str, output_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    with pytest.raises(UserError, match=r"would overwrite the model in model\.path; choose"):
        check_inputs_stay(_config(model, output_dir))
    check_inputs_stay(_config(model, "sub"))


@pytest.mark.parametrize("name", ["metrics.jsonl", PARTIAL[0], "export/rows.jsonl", "logs/rank-1.log"])
def test_data_in_the_place_of_the_run_is_refused(run: Path, name: str) -> None:
    rows = run / name
    rows.parent.mkdir(exist_ok=True)
    rows.write_text("{}")
    (run.parent / "rows.jsonl").symlink_to(rows)
    for source in (rows, run.parent / "rows.jsonl", run.parent / "sub/../alias" / name, f"{rows}*"):
        with pytest.raises(UserError, match=r"output_dir: .* would overwrite .*, which data.source"):
            check_inputs_stay(_config(run.parent / "sub", run, str(source)))
    with pytest.raises(UserError, match=r"which data\.source names"):
        check_inputs_stay(_config(run.parent / "sub", run, str(run.parent / "alias")))
    listed = DataConfig(source=("builtin", SourceConfig(source=str(rows), weight=2.0)))
    with pytest.raises(UserError, match=r"which data\.source names"):
        check_inputs_stay(
            FinetuneConfig(model=ModelConfig(path="sub"), data=listed, output_dir=str(run.parent / "alias"))
        )
    other = run / "rows.jsonl"
    other.write_text("{}")
    check_inputs_stay(_config(run.parent / "sub", run, str(other)))


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("output_dir", ["runs/new", "alias/new"])
def test_a_cache_is_refused_in_the_place_of_a_run_whether_or_not_the_run_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output_dir: str, is_there: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/new/checkpoints" if is_there else tmp_path / "runs").mkdir(parents=True)
    (tmp_path / "alias").symlink_to("runs")
    below = ["", *RUN_FILES, *RUN_FOLDERS, *PARTIAL, "checkpoints/c", "x/../export", ".tmp-config.yaml/c"]
    for spelling in ("runs/new", "alias/new", str(tmp_path / "runs/new")):
        for name in below:
            with pytest.raises(UserError, match=r"data\.cache: .* is in output_dir .*, where the run writes"):
                check_inputs_stay(_config("model", output_dir, cache=f"{spelling}/{name}"))
    with pytest.raises(UserError, match=r"data\.cache: /.* is in output_dir"):
        check_inputs_stay(_config("model", output_dir, cache=f"file://{tmp_path}/runs/new/parts"))
    others = ("auto", "none", "new/export", "s3://runs/new/export", f"file://{tmp_path}/runs/rows")
    for cache in ("runs", "runs/newer", "runs/new/cache", "runs/new/x/export", *others):
        check_inputs_stay(_config("model", output_dir, cache=cache))


def test_a_pattern_reaches_as_deep_as_the_reader_of_the_data_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/runs/r1").mkdir(parents=True)
    for name in ("data/rows.jsonl", "data/runs/r1/metrics.jsonl"):
        (tmp_path / name).write_text("{}")
    source = "data/**/*.jsonl"
    assert Path("data/runs/r1/metrics.jsonl") in (data_files(source) or [])
    with pytest.raises(UserError, match=r"overwrite data/runs/r1/metrics\.jsonl, which data\.source"):
        check_inputs_stay(_config("model", "data/runs/r1", source))
    check_inputs_stay(_config("model", "runs/r2", source))
