"""What a user sees beside the output: nothing, where all is well.

`make test-wheel` and `make test-newest` run this with the newest versions of everything and the installed
wheel (LPTUNE_TEST_INSTALLED: the interpreter of its environment): what a newer torch or Triton has to say
about us it says on stderr, after every command.
"""

import os
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import CONFIG
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


@pytest.mark.parametrize("when", ["with the recipe", "after it, with an error"])
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


NOTE = "note: stdout cannot be written ({}); lptune goes on without it\n"
FULL, GONE = "No space left on device", "Broken pipe"


@pytest.mark.parametrize(
    ("arguments", "where", "code", "stderr"),
    [
        # A print that fails ends no run.
        ("run talks.py --config quickstart", "no reader", 143, NOTE.format(GONE) + "fd True 0\n"),
        ("run talks.py --config quickstart", "full", 143, NOTE.format(FULL) + "fd True 0\n"),
        ("run talks.py --config quickstart", "ascii", 143, "fd True 0\n"),
        # A command that only prints ends with at most one line.
        ("ls", "no reader", 141, ""),
        ("ls", "full", 2, f"error: stdout: cannot be written: {FULL}\n"),
        # A check answers by its exit code, and a command that works does so.
        ("validate good.yaml", "full", 0, NOTE.format(FULL)),
        ("cp full_finetune mine.yaml", "full", 0, NOTE.format(FULL)),
        # `lptune migrate theirs.yaml > mine.yaml` on a full disk: no config that is cut.
        ("migrate theirs.yaml", "full", 2, f"error: stdout: cannot be written: {FULL}\n"),
        ("migrate theirs.yaml --output mine.yaml", "full", 0, NOTE.format(FULL)),
        # No escape of a file reaches the terminal.
        ("cat odd.yaml", "ascii", 0, ""),
    ],
)
def test_a_print_that_fails_ends_a_command_only_if_it_prints_and_does_nothing_else(
    arguments: str, where: str, code: int, stderr: str, tmp_path: Path
) -> None:
    for name, text in {
        "talks.py": TALKS,
        "good.yaml": CONFIG,
        "theirs.yaml": "base_model: /m\ndatasets: [{path: a.jsonl}]\n",
        "odd.yaml": "# \u202egnp\x9b2J\n",
    }.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    # click has a stream of its own in place of one in ASCII.
    encoding = "ascii" if arguments.startswith("run") else "utf-8"
    done = _with_output(where, *arguments.split(), cwd=tmp_path, PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr[-len(stderr) :] if stderr else done.stderr) == (code, stderr)
    assert (tmp_path / "saved").exists() == arguments.startswith("run")
    assert (tmp_path / "mine.yaml").exists() == ("mine.yaml" in arguments)
    if where == "ascii":
        assert ("\nstep \\u2026 0\n" if code else "# \\u202egnp\\x9b2J\n") in done.stdout


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
        ["run", "--nproc-per-node=2", "full_finetune", *job, "compile=none", "output_dir=two"],
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
