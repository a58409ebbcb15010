"""A run and `lptune export --average` export the mean of checkpoints, whose values test_export.py checks."""

from pathlib import Path

from tests.helpers import warm
from tests.helpers.cold import Finished
from tests.helpers.tiny_recipe import make_checkpoint, write_config


def test_the_mean_is_exported_by_the_run_and_by_the_command(tmp_path: Path) -> None:
    config = write_config(tmp_path / "tiny.yaml", make_checkpoint(tmp_path / "tiny"), tmp_path / "run")
    keys = ["num_steps=4", "eval_every_steps=0", "checkpoint.every_steps=2", "checkpoint.keep_last=2"]

    def train(*more: str) -> Finished:
        command = ["run", "full_finetune", "--config", str(config), *keys, *more]
        return warm.lptune(command, folder=tmp_path, timeout_s=300)

    done = train("export.average_checkpoints=3")
    assert done.returncode == 2
    assert "3 checkpoints must be kept, found checkpoint.keep_last=2" in done.stderr
    done = train("export.average_checkpoints=2")
    assert done.returncode == 0, done.stderr
    assert "compared with the mean of the last 2 checkpoints" in done.stdout
    done = warm.lptune(["export", str(tmp_path / "run"), "same", "--average=2"], folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for file in (tmp_path / "run" / "export").iterdir():
        assert file.read_bytes() == (tmp_path / "same" / file.name).read_bytes()
    assert "already finished" in train("export.average_checkpoints=2").stdout
    assert "exists already, with export.average_checkpoints 2 (now 1)" in train().stderr
