"""What a user sees beside the output: nothing, where all is well.

`make test-wheel` and `make test-newest` run this with the newest versions of everything and the installed
wheel (LPTUNE_TEST_INSTALLED: the interpreter of its environment): what a newer torch or Triton has to say
about us it says on stderr, after every command.
"""

import os
import subprocess
from pathlib import Path

import pytest

from tests.helpers import cold
from tests.helpers.cold import Finished


def test_loading_a_recipe_imports_neither_the_compiler_nor_triton() -> None:
    """Half of the time to the first line; and Triton 3.8 reports at exit what the collector was kept from."""
    code = (
        "import sys; from pathlib import Path; from lptune.cli import recipe\n"
        "recipe.load_main(Path('recipes/full_finetune.py'))\n"
        "print([name for name in ('triton', 'torch._dynamo') if name in sys.modules])"
    )
    done = cold.run("-c", code)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("when", ["with the recipe", "after it", "after it, with an error"])
def test_what_triton_made_is_collected_at_exit_whenever_it_was_imported(tmp_path: Path, when: str) -> None:
    """As nanobind's leak report needs it (Triton 3.8): that reports at exit what the collector was kept from,
    for example what hangs on a cycle that was there before the freeze.
    """
    imports = "sys.modules['triton'] = None"
    (tmp_path / "recipe.py").write_text(
        f"""import sys
class Bound:
    def __del__(self):
        print("freed")
class Cycle:
    pass
{imports if when == "with the recipe" else ""}
cycle = Cycle()
cycle.itself = cycle
sys.cycle = cycle  # as caches are, that no module owns
def main(cfg):
    {imports}
    cycle.bound = Bound()
    del sys.cycle
    del sys.modules[__name__]
""",
        encoding="utf-8",
    )
    code = (
        "from pathlib import Path; from lptune.cli import recipe; recipe.load_main(Path('recipe.py'))(None)"
    )
    code += "; raise ValueError" * when.endswith("error")
    done = cold.run("-c", code, folder=tmp_path)
    assert done.returncode == (1 if when.endswith("error") else 0), done.stderr
    assert done.stdout == "freed\n"


TALKS = """
import subprocess
import sys
from pathlib import Path
from lptune.config import FinetuneConfig

def main(cfg: FinetuneConfig) -> None:
    for step in range(3):
        print("step …", step, flush=True)
    file = open("saved", "w")
    child = subprocess.run([sys.executable, "-c", "import os; os.fstat(1)"])
    print("fd", file.fileno() > 2, child.returncode, file=sys.stderr, flush=True)
    sys.exit(143)
"""


def _with_output(where: str, *arguments: str, cwd: Path, **variables: str) -> Finished:
    shell = {"no reader": 'sleep 0.2; "$@"; echo $? >code', "full": '"$@" >/dev/full; echo $? >code'}
    shell |= {"ascii": '"$@"; echo $? >code'}
    command = ["bash", "-c", shell[where], "-", *cold.command(*cold.LPTUNE, *arguments)]
    environment = cold.environment() | variables
    process = subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    if where == "no reader":
        process.stdout.close()
        process.stdout = None
    stdout, stderr = process.communicate(timeout=60)
    code = int((cwd / "code").read_text(encoding="utf-8"))
    return Finished(command, code, stdout or "", stderr)


@pytest.mark.parametrize(
    ("where", "note"),
    [
        ("no reader", "note: stdout cannot be written (Broken pipe); lptune goes on without it\n"),
        ("full", "note: stdout cannot be written (No space left on device); lptune goes on without it\n"),
        ("ascii", ""),
    ],
)
def test_a_print_that_fails_ends_no_run(where: str, note: str, tmp_path: Path) -> None:
    (tmp_path / "talks.py").write_text(TALKS, encoding="utf-8")
    arguments = ("run", "talks.py", "--config", "quickstart")
    done = _with_output(where, *arguments, cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (143, f"{note}fd True 0\n")
    assert (tmp_path / "saved").exists()
    if where == "ascii":
        assert "\nstep \\u2026 0\n" in done.stdout


def test_a_line_of_an_error_is_text_and_of_a_file_no_escape_reaches_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "odd.yaml").write_text("# \u202egnp\x9b2J\n", encoding="utf-8")
    missing = "error: run: no recipe given; `lptune ls` shows what there is\n"
    for arguments, code, stdout, stderr in (
        (["cat", "odd.yaml"], 0, "# \\u202egnp\\x9b2J\n", ""),
        (["run"], 2, "", missing),
    ):
        done = cold.run(*cold.LPTUNE, *arguments, folder=tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (code, stdout, stderr)


@pytest.mark.parametrize(
    ("where", "code", "stderr"),
    [
        ("no reader", 141, ""),
        ("full", 2, "error: stdout: cannot be written: No space left on device\n"),
    ],
)
def test_a_command_that_cannot_print_ends_with_at_most_one_line(
    where: str, code: int, stderr: str, tmp_path: Path
) -> None:
    done = _with_output(where, "ls", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (code, stderr)


@pytest.mark.parametrize("where", ["no reader", "full"])
def test_a_check_answers_by_its_exit_code_though_it_cannot_print(where: str, tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text("model: {path: a}\ndata: {source: builtin}\n", encoding="utf-8")
    note = "; lptune goes on without it\n"
    good = _with_output(where, "validate", "good.yaml", cwd=tmp_path)
    assert (good.returncode, good.stderr.endswith(note), good.stderr.count("\n")) == (0, True, 1)
    bad = _with_output(where, "validate", "good.yaml", "sed=1", cwd=tmp_path)
    assert (bad.returncode, "unknown key 'sed'" in bad.stderr) == (2, True)


@pytest.mark.parametrize(("where", "code"), [("no reader", 141), ("full", 2)])
def test_a_config_that_is_printed_is_not_cut_without_an_error(where: str, code: int, tmp_path: Path) -> None:
    """`lptune migrate theirs.yaml > mine.yaml` on a full disk."""
    (tmp_path / "theirs.yaml").write_text("base_model: /m\ndatasets: [{path: a.jsonl}]\n", encoding="utf-8")
    done = _with_output(where, "migrate", "theirs.yaml", cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert "goes on without it" not in done.stderr
    done = _with_output(where, "migrate", "theirs.yaml", "--output", "mine.yaml", cwd=tmp_path)
    assert (done.returncode, (tmp_path / "mine.yaml").is_file()) == (0, True)


def test_a_command_that_works_does_so_though_it_cannot_print(tmp_path: Path) -> None:
    done = _with_output("full", "cp", "full_finetune", "mine.py", cwd=tmp_path)
    assert (tmp_path / "mine.py").exists()
    assert done.returncode == 0
    assert (
        done.stderr == "note: stdout cannot be written (No space left on device); lptune goes on without it\n"
    )


@pytest.mark.slow
def test_commands_write_nothing_to_stderr_but_the_line_of_an_error(tmp_path: Path) -> None:
    environment, (python,) = cold.environment(), cold.command()
    if installed := os.environ.get("LPTUNE_TEST_INSTALLED"):
        python = str(Path(installed).absolute())
        del environment["PYTHONPATH"]  # the wheel, not the source beside it
    # Set for the suite alone (tests/conftest.py): torch then warns of tensor subclasses.
    environment.pop("TORCHINDUCTOR_AUTOGRAD_CACHE_ALLOW_CUSTOM_AUTOGRAD", None)
    job = ["--config", "llama3_2/1b", "model.path=model", "data.source=builtin", "data.seq_len=64"]
    job += ["data.max_rows=100", "data.eval_fraction=0.1", "global_batch_size=16", "num_steps=2"]
    job += ["precision.kind=int8_rowcol", "checkpoint.every_steps=1", "device=cpu", "num_samples=1"]
    for arguments in (
        ["--help"],
        ["ls"],
        ["cat", "llama3_2/1b"],
        ["validate", "llama3_2/1b", "data.source=builtin"],
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
        command = [python, "-m", "lptune.cli.main", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (arguments, done.stderr)
        # torch's word on a machine with nvcc and no GPU; right, and not about us.
        lines = [line for line in done.stderr.splitlines() if "No CUDA runtime is found" not in line]
        assert not lines, arguments
        assert done.stdout, arguments
    for arguments in (
        ["run", "full_finetune", *job, "compile=block", "output_dir=compiled", "seed=3"],
        ["run", "full_finetune", *job, "model.path=nowhere", "output_dir=none"],
        ["plan", *job, "--device", "h1OO"],
    ):
        command = [python, "-m", "lptune.cli.main", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 2, (arguments, done.stderr)
        assert done.stderr.startswith("error: "), arguments
        assert done.stderr.count("\n") == 1, (arguments, done.stderr)
