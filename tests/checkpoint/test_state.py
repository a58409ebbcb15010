"""Which checkpoint is found and taken, and what state.json may say. What comes back: test_stored.py."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from lptune import checkpoint, distributed, training
from lptune.base.errors import UserError
from lptune.base.step_folders import list_checkpoints
from tests.helpers.saving import save


def _saved(folder: Path, step: int = 2, keep_last: int = 9) -> Path:
    model = nn.Linear(8, 5)
    with distributed.session("cpu") as world:
        return save(folder, step, model, training.AdamW(model.parameters()), world, keep_last=keep_last)


def test_files_and_folders_of_other_names_are_no_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000002").touch()
    (tmp_path / "step-²").mkdir()
    assert list_checkpoints(tmp_path) == [tmp_path / "step-00000001"]


def test_a_renamed_folder_is_noticed(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    path.rename(tmp_path / "step-00000007")
    with pytest.raises(
        UserError, match="is of step 2, the folder says step-00000007; it was renamed or swapped"
    ):
        checkpoint.verify(tmp_path / "step-00000007")


def test_a_link_to_a_checkpoint_is_one_whatever_its_name(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    (tmp_path / "newest").symlink_to(path)
    assert checkpoint.verify(tmp_path / "newest").step == 2
    (tmp_path / "newest").unlink()
    path.rename(tmp_path / "elsewhere")
    path.symlink_to("elsewhere")
    assert checkpoint.verify(path).step == 2


def _find(folder: Path, resume: str, warn: Callable[[str], None]) -> checkpoint.Manifest | None:
    with distributed.session("cpu") as world:
        return checkpoint.find_checkpoint(folder, resume, world, warn)


def test_the_newest_that_verifies_is_found_and_the_damaged_one_named(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        _saved(tmp_path, step)
    (tmp_path / ".tmp-step-00000011").mkdir()
    (tmp_path / "step-00000010" / "state.json").write_text("{}", encoding="utf-8")
    warnings: list[str] = []
    found = _find(tmp_path, "auto", warnings.append)
    assert found is not None
    assert found.step == 2
    assert len(warnings) == 1
    assert "step-00000010/state.json: has 2 bytes" in warnings[0]
    assert _find(tmp_path, "none", warnings.append) is None
    assert _find(tmp_path / "empty", "auto", warnings.append) is None
    with pytest.raises(UserError, match="no such checkpoint folder"):
        _find(tmp_path, str(tmp_path / "step-00000099"), warnings.append)


def test_a_new_folder_names_the_checkpoints_of_the_run_in_another_precision(tmp_path: Path) -> None:
    for name, step in (("m-int8_rowcol", 200), ("m", 7), ("m-mine", 9), ("n-int8_rowcol", 9)):
        _saved(tmp_path / name / "checkpoints", step)
    said: list[str] = []
    assert _find(tmp_path / "m-none" / "checkpoints", "auto", said.append) is None
    int8, plain = tmp_path / "m-int8_rowcol", tmp_path / "m"
    assert said == [
        f"note: {int8} has step 200; output_dir={int8} continues it; "
        f"{plain} has step 7; output_dir={plain} continues it"
    ]
    for name, resume in (("m-none", "none"), ("m-int8_rowcol", "auto"), ("m-other", "auto")):
        _find(tmp_path / name / "checkpoints", resume, said.append)
    assert len(said) == 1


def test_a_folder_with_checkpoints_takes_none_of_another_run(tmp_path: Path) -> None:
    theirs, ours, new, link = (tmp_path / name for name in ("theirs", "ours", "new", "link"))
    _saved(theirs, 2)
    _saved(ours, 1)
    link.symlink_to(ours)
    with pytest.raises(
        UserError, match=r"theirs/step-00000002 is of another run than .*ours; .* resume=auto"
    ):
        _find(ours, str(theirs / "step-00000002"), print)
    for folder, path in ((new, theirs / "step-00000002"), (ours, link / "step-00000001")):
        found = _find(folder, str(path), print)
        assert found is not None
        assert found.folder == path


def test_a_damaged_later_checkpoint_never_displaces_the_one_just_saved(tmp_path: Path) -> None:
    _saved(tmp_path, 10)
    for step in (1, 2):
        _saved(tmp_path, step, keep_last=1)
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == [f"step-{step:08d}", "step-00000010"]
    _saved(tmp_path, 10, keep_last=1)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["old-step-00000010-1", "step-00000010"]


def test_a_run_folder_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match=r"resume: .* is a run's folder; give one of its checkpoints/step"):
        _find(tmp_path / "checkpoints", str(tmp_path), print)


def test_only_damaged_checkpoints_are_no_reason_to_start_over_in_silence(tmp_path: Path) -> None:
    (_saved(tmp_path) / "state.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match="none of its 1 checkpoints is intact"):
        _find(tmp_path, "auto", lambda line: None)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"num_skipped": "2"}, "num_skipped: expected 0 to 5, found '2'"),
        ({"num_skipped": True}, "num_skipped: expected 0 to 5, found True"),
        ({"num_skipped": 6}, "num_skipped: expected 0 to 5, found 6"),
        ({"num_skipped": 2, "num_skipped_in_a_row": 3}, "num_skipped_in_a_row: expected 0 to 2, found 3"),
        ({"num_skipped": 2, "num_skipped_in_a_row": -1}, "num_skipped_in_a_row: expected 0 to 2, found -1"),
        ({"last_grad_norm": "2.0"}, "last_grad_norm: expected a number of at least 0, found '2.0'"),
        ({"last_grad_norm": -1.0}, "last_grad_norm: expected a number of at least 0, found -1.0"),
        ({"last_grad_norm": math.nan}, "last_grad_norm: expected a number of at least 0, found nan"),
    ],
)
def test_counts_of_skipped_steps_that_no_run_can_have_are_refused(
    facts: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "state.json"
    path.write_text(json.dumps({"step": 5} | facts), encoding="utf-8")
    with pytest.raises(UserError) as error:
        _ = checkpoint.read_state(checkpoint.Manifest(tmp_path, 5, 1, {}, {})).counts
    assert str(error.value) == f"{path}: {message}"


def test_a_folder_of_checkpoints_is_no_checkpoint(tmp_path: Path) -> None:
    _saved(tmp_path)
    with pytest.raises(UserError, match="is a folder of checkpoints, not one of them"):
        checkpoint.verify(tmp_path)


def test_a_training_checkpoint_or_a_run_is_no_model(tmp_path: Path) -> None:
    saved = _saved(tmp_path / "checkpoints")
    with pytest.raises(
        UserError, match="is a training checkpoint; `lptune export` makes a model folder of it"
    ):
        checkpoint.read_index(saved)
    with pytest.raises(UserError, match=r"is a run's folder; the model it trained is .*export"):
        checkpoint.read_index(tmp_path)
