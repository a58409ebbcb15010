"""What a user sees beside the output: nothing, where all is well.

`make test-newest` runs this with the newest versions of everything and the installed wheel
(LPTUNE_TEST_INSTALLED=1): what a newer torch or Triton has to say about us it says on stderr, after every
command.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT, clean_environment


def test_loading_a_recipe_imports_neither_the_compiler_nor_triton() -> None:
    """Half of the time to the first line; and Triton 3.8 reports at exit what the collector was kept from."""
    code = (
        "import sys; from pathlib import Path; from lptune.cli import recipe\n"
        "recipe.load_main(Path('recipes/full_finetune.py'))\n"
        "print([name for name in ('triton', 'torch._dynamo') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.slow
def test_commands_that_end_well_write_nothing_to_stderr(tmp_path: Path) -> None:
    environment = clean_environment()
    if os.environ.get("LPTUNE_TEST_INSTALLED") == "1":
        del environment["PYTHONPATH"]  # the wheel, not the source beside it
    job = ["--config", "llama3_2/1b", "model.path=model", "data.source=builtin", "data.seq_len=64"]
    job += ["data.max_rows=100", "data.eval_fraction=0.1", "global_batch_size=16", "num_steps=2"]
    job += ["precision.kind=int8_rowcol", "checkpoint.every_steps=1", "device=cpu", "num_samples=1"]
    for arguments in (
        ["--help"],
        ["ls"],
        ["cat", "llama3_2/1b"],
        ["validate", "llama3_2/1b"],
        ["new-checkpoint", "llama3_2/tiny", "model"],
        ["plan", "--world-size", "4", *job],
        ["run", "full_finetune", *job, "compile=block", "output_dir=compiled"],
        ["run", "full_finetune", *job, "compile=none", "output_dir=eager"],
        [
            "run",
            "--nproc-per-node",
            "2",
            "full_finetune",
            *job,
            "compile=none",
            "output_dir=two",
            "micro_batch_size=2",
        ],
        ["verify", "eager"],
        ["export", "eager", "exported"],
    ):
        command = [sys.executable, "-m", "lptune.cli.main", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (arguments, done.stderr)
        assert done.stderr == "", arguments
        assert done.stdout, arguments
