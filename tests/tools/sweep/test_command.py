"""`lptune sweep`: the grid and its names, checks before the first run, failures, signals and continuing."""

import json
import os
import re
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from lptune.config import PRECISION_KINDS
from lptune.tools.sweep.grid import Grid, point_name, short_names, split_values
from lptune.tools.sweep.record import Outcome, table
from tests.cli.conftest import Command, Lptune, write_model
from tests.helpers import cold
from tests.tools.conftest import wait_for

CONFIG = """\
model: {path: tiny}
data: {source: builtin, seq_len: 64, eval_fraction: 0.02, max_rows: 200}
device: cpu
compute_dtype: float32
compile: none
activation_checkpointing: none
global_batch_size: 4
micro_batch_size: 4
num_steps: 4
eval_every_steps: 2
export: {enabled: false}
"""

RECIPE = '''"""A toy: what it does is its seed."""
import json
import os
import signal
import sys
import time
from pathlib import Path

from lptune.base.errors import DivergedError, UserError
from lptune.config import FinetuneConfig
from lptune.launch import preemption


def main(cfg: FinetuneConfig) -> None:
    folder = Path(cfg.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 1, "loss": 1.0, "eval_loss": 10.0 - cfg.seed}) + "\\n")
    (folder / "pid").write_text(str(os.getpid()))
    with open("ran", "a") as file:
        file.write(f"{cfg.seed}\\n")
    if cfg.seed == 2:
        raise UserError("rows.jsonl: line 3: not JSON; mend it")
    if cfg.seed == 3:
        raise DivergedError("step 3: loss nan")
    if cfg.seed == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    if cfg.seed == 5 and not Path("go").exists():
        preemption.requested()
        while not preemption.requested():
            time.sleep(0.05)
        (folder / "saved").touch()
        sys.exit(143)
'''


@pytest.fixture
def toy(tmp_path: Path) -> list[str]:
    """The arguments RECIPE --config CONFIG of a toy."""
    (tmp_path / "toy.py").write_text(RECIPE)
    (tmp_path / "toy.yaml").write_text("model: {path: a}\ndata: {source: builtin}\n")
    return ["--config", "toy.yaml", "toy.py"]


Start = Callable[..., cold.Process]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start("seed=1,2", …)` starts a sweep; it and its runs are killed at the end of the test."""
    processes = []

    def call(*arguments: str) -> cold.Process:
        process = cold.start(*cold.LPTUNE, "sweep", *arguments, folder=tmp_path, start_new_session=True)
        processes.append(process)
        return process

    yield call
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


KINDS_RECIPE = '''"""A toy whose loss is its seed, more or less by its kind, in a step of a second."""
import json
from pathlib import Path

from lptune.base.errors import UserError
from lptune.config import FinetuneConfig, to_yaml

MORE = {"none": 0.0, "int8_rowcol": 0.25, "mxfp8": -0.5}


def main(cfg: FinetuneConfig) -> None:
    if cfg.precision.kind == "int8_tensorwise":
        raise UserError("model.path: nothing | to convert; take another")
    folder = Path(cfg.output_dir)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(cfg))
    row = {"step": 1, "loss": 9.0, "eval_loss": cfg.seed + MORE[cfg.precision.kind], "step_time_s": 1.0}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\\n")
'''


# ---- the grid


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-5,3e-5", ["1e-5", "3e-5"]),
        ("[{source: a, weight: 2}, b],c", ["[{source: a, weight: 2}, b]", "c"]),
        ('"A, B","C"', ['"A, B"', '"C"']),
        ("it's,that's", ["it's", "that's"]),
        ("a, b", ["a", "b"]),
    ],
)
def test_commas_split_values_where_nothing_protects_them(text: str, values: list[str]) -> None:
    assert split_values("key", text) == values


def test_points_are_all_combinations_in_order_with_the_fixed_keys() -> None:
    grid = Grid(["optimizer.lr=1e-5,3e-5", "num_steps=3", "precision.kind=none,int8_rowcol"])
    assert [point.name for point in grid.points] == [
        "lr=1e-5,kind=none", "lr=1e-5,kind=int8_rowcol", "lr=3e-5,kind=none", "lr=3e-5,kind=int8_rowcol",
    ]  # fmt: skip
    assert grid.points[1].overrides == ("optimizer.lr=1e-5", "num_steps=3", "precision.kind=int8_rowcol")


def test_a_key_is_shortened_as_long_as_the_names_are_unique() -> None:
    assert short_names(["optimizer.lr", "seed"]) == {"optimizer.lr": "lr", "seed": "seed"}
    keys = ["optimizer.kind", "precision.kind", "kind"]
    assert short_names(keys) == dict(zip(keys, keys, strict=True))


@pytest.mark.parametrize(
    "value",
    ["../../etc", "a b", "$(touch x)", "ä" * 200, "", "~", "*.o_proj", "\n", "\udcff"],
)
def test_names_are_safe_in_shells_and_file_systems_and_unique(value: str) -> None:
    name = point_name([("key", value), ("b", "1")])
    assert shlex.quote(name).strip("'") == name
    assert not set(name) & set(" /$*?~&;<>|\\\"'`()[]{}!#\n")
    assert not name.startswith((".", "-"))
    assert 0 < len(os.fsencode(name)) <= 130
    assert name != point_name([("key", f"{value}."), ("b", "1")])
    assert name == point_name([("key", value), ("b", "1")])


def test_all_kinds_are_those_of_the_config_and_only_float8_is_emulated() -> None:
    points = Grid(["seed=1,2", "precision.kind=all", "precision.emulate=true"]).points
    kinds = {
        kind: [point for point in points if f"precision.kind={kind}" in point.overrides]
        for kind in PRECISION_KINDS
    }
    assert [len(found) for found in kinds.values()] == [2] * len(PRECISION_KINDS)
    assert len(points) == 2 * len(PRECISION_KINDS)
    emulated = {
        kind
        for kind, found in kinds.items()
        for point in found
        if "precision.emulate=true" in point.overrides
    }
    assert emulated == {kind for kind, keys in PRECISION_KINDS.items() if keys.needs_float8}
    assert points[0].name == "seed=1,kind=none"  # the baseline


# ---- the table


def test_the_table_is_sorted_by_the_last_held_out_loss_and_a_cut_row_is_passed_over(tmp_path: Path) -> None:
    rows = {
        "worse": [{"step": 0, "eval_loss": 1.0}, {"step": 2, "eval_loss": 3.5, "loss": 2.0}],
        "better": [{"step": 2, "eval_loss": 2.5, "loss": 2.0}, {"step": 3, "loss": None, "eval_loss": None}],
        "nan": [{"step": 2, "eval_loss": float("nan")}],
        "diverged": [{"step": 1, "eval_loss": 0.5}],
    }
    found: list[Outcome] = []
    for name, content in rows.items():
        (tmp_path / name).mkdir()
        text = "".join(f"{json.dumps(row)}\n" for row in content)
        (tmp_path / name / "metrics.jsonl").write_text(text + '{"step": 9, "eval_lo')
        found.append(Outcome(name, tmp_path / name, 3 if name == "diverged" else 0))
    found.append(Outcome("absent", tmp_path / "absent", None))
    lines = table(found).splitlines()[1:]
    assert [line.split()[-1] for line in lines] == ["better", "worse", "nan", "diverged", "absent"]
    assert lines[0].split() == ["2.5000", "2.0000", "3", "-", "done", "better"]
    assert lines[-1].split()[-3:] == ["not", "run", "absent"]


# ---- the command


def test_failed_runs_do_not_stop_the_others_and_only_they_are_tried_again(
    lptune: Lptune, toy: list[str], tmp_path: Path
) -> None:
    done = lptune("sweep", *toy, "seed=1,2,3,4,6")
    assert done.returncode == 2, done.stderr  # of the first failure
    assert "sweep: 2 of 5 runs failed" in done.stderr
    found = [line.split() for line in done.stdout.splitlines() if " seed=" in line and "/5]" not in line]
    assert [(row[-1], row[4]) for row in found[-5:]] == [
        ("seed=6", "done"),
        ("seed=1", "done"),
        ("seed=4", "failed"),
        ("seed=3", "diverged"),
        ("seed=2", "failed"),
    ]
    ended = json.loads((tmp_path / "sweeps/toy/sweep.json").read_text())["runs"]
    assert {name: each["exit_code"] for name, each in ended.items()} == {
        "seed=1": 0, "seed=2": 2, "seed=3": 3, "seed=4": 137, "seed=6": 0,
    }  # fmt: skip
    again = lptune("sweep", *toy, "seed=1,2,3,4,6")
    assert again.returncode == 2
    assert (tmp_path / "ran").read_text().split() == ["1", "2", "3", "4", "6", "2", "4"]
    # A sweep of fewer runs replaces the report, and says so once.
    fewer = lptune("sweep", *toy, "seed=1,6")
    assert (fewer.returncode, fewer.stderr.count("\n")) == (0, 1)
    assert fewer.stderr.startswith(
        "note: sweeps/toy: this sweep replaces the table and report.html of another, which has 3 run(s)"
    )
    assert lptune("sweep", *toy, "seed=1,6").stderr == ""
    # Runs of another recipe would be called finished: neither a run nor its config knows the recipe.
    (tmp_path / "other.py").write_text(RECIPE)
    refused = lptune("sweep", *toy[:-1], "other.py", "seed=1,6").stderr
    assert "sweeps/toy: holds a sweep of 'toy', not of 'other'; choose another --output-dir" in refused


def test_runs_of_several_seeds_are_one_row_and_its_difference_is_taken_seed_by_seed(
    lptune: Lptune, tmp_path: Path
) -> None:
    (tmp_path / "toy.py").write_text(KINDS_RECIPE)
    (tmp_path / "toy.yaml").write_text("model: {path: a}\ndata: {source: builtin}\nnum_steps: 1\n")
    kinds = "precision.kind=none,int8_rowcol,int8_tensorwise"
    done = lptune("sweep", "--config", "toy.yaml", "toy.py", "seed=1,5", kinds)
    assert done.returncode == 2, done.stderr
    folder = tmp_path / "sweeps/toy"
    rows = {each["name"]: each for each in json.loads((folder / "sweep.json").read_text())["rows"]}
    assert [(name, each["n"]) for name, each in rows.items()] == [
        ("kind=none", 2), ("kind=int8_rowcol", 2), ("kind=int8_tensorwise", 0),
    ]  # fmt: skip
    difference = rows["kind=int8_rowcol"]["measured"]["difference"]
    assert difference == {"mean": 0.25, "deviation": 0.0, "interval": 0.0, "n": 2}
    assert rows["kind=none"]["measured"]["loss"]["deviation"] == pytest.approx(8**0.5)
    # What the run said is the reason; a bar would end the cell.
    why = "failed (2): model.path: nothing / to convert; take another"
    table = (folder / "table.md").read_text()
    assert table in done.stdout
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]] == [
        ["kind=none (baseline)", "2", "3.0000 ± 2.8284", "", "1.0 s (2)", ""],
        ["kind=int8_rowcol", "2", "3.2500 ± 2.8284", "+0.25000 ± 0.00000", "", ""],
        ["kind=int8_tensorwise", "0", "", "", "", why],
    ]
    assert (folder / "differences.svg").read_text().startswith("<svg ")
    assert "By seed" in (folder / "report.html").read_text()
    assert not (folder / ".error").exists()


def test_a_stopped_repeat_still_shows_what_had_ended_and_a_failed_run_no_loss_of_another_config(
    toy: list[str], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []

    class Runner:
        stopped = threading.Event()

        def run(self, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
            folder = Path(arguments[-1].removeprefix("output_dir="))
            if (code := codes.pop(0)) == 0:
                folder.mkdir(parents=True)
                (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 1.5}\n')
                (folder / "config.yaml").write_text("num_steps: 7\n")
            return code

    monkeypatch.setattr("lptune.launch.bound.Runner", Runner)
    monkeypatch.setattr("lptune.launch.launcher.let_ranks_find_lptune", lambda: None)

    def words(*values: str) -> tuple[int, dict[str, tuple[str, str]]]:
        """The exit code; the loss and what became of each run."""
        code, stdout, _ = command("sweep", *toy, *values)
        lines = [line.split() for line in stdout.partition("held-out")[2].splitlines() if " seed=" in line]
        return code, {line[-1]: (line[1], line[4]) for line in lines}

    codes[:] = [0, 0, 0]
    assert words("seed=1,2,3")[0] == 0
    (Path("sweeps/toy/seed=1/metrics.jsonl")).unlink()
    codes[:] = [143]
    code, found = words("seed=1,2,3")
    assert code == 143
    assert found == {"seed=1": ("-", "stopped"), "seed=2": ("1.5000", "done"), "seed=3": ("1.5000", "done")}
    # With other keys, the first run does not even start, and the second one is the next sweep's.
    codes[:] = [2, 143]
    code, found = words("seed=2,3", "optimizer.lr=0.5")
    assert code == 143
    assert found == {"seed=2": ("-", "failed"), "seed=3": ("-", "stopped")}


def test_a_kind_that_cannot_run_here_has_a_reason_and_a_wrong_value_ends_the_sweep(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("my.yaml").write_text(CONFIG)
    write_model(Path("tiny"))
    started = list[str]()

    class Runner:
        stopped = threading.Event()

        def run(self, arguments: Sequence[str], _: Mapping[str, str]) -> int:
            started.extend(word for word in arguments if word.startswith("precision.kind="))
            return 2

    monkeypatch.setattr("lptune.launch.bound.Runner", Runner)
    monkeypatch.setattr("lptune.launch.launcher.let_ranks_find_lptune", lambda: None)
    sweep = ("sweep", "--config", "my.yaml", "precision.kind=all")
    _, stdout, _ = command(*sweep)
    left_out = [line for line in stdout.splitlines() if ": cannot run here: " in line]
    float8 = [kind for kind, keys in PRECISION_KINDS.items() if keys.needs_float8]
    assert [line.split()[1] for line in left_out] == [f"kind={kind}:" for kind in float8]
    assert all("needs a device with an 8-bit" in line for line in left_out)
    others = [kind for kind in PRECISION_KINDS if kind not in float8]
    assert started == [f"precision.kind={kind}" for kind in others]
    code, stdout, stderr = command(*sweep, "--dry-run", "precision.stochastic_rounding=true")
    assert (code, stderr) == (0, "")
    said = {line.split()[1]: line for line in stdout.splitlines() if line.startswith("# ")}
    able = {kind for kind, keys in PRECISION_KINDS.items() if keys.can_round_stochastically} | {"none"}
    assert said.keys() == {f"kind={kind}" for kind in PRECISION_KINDS.keys() - able}
    code, _, stderr = command(*sweep, "num_steps=0")
    assert (code, stderr.count("\n")) == (2, 1)
    assert stderr.startswith("error: ")
    assert "num_steps" in stderr


def test_a_signal_lets_the_run_save_and_the_same_command_goes_on_but_not_beside_it(
    toy: list[str], tmp_path: Path, lptune: Lptune, start: Start
) -> None:
    process = start(*toy, "seed=1,5,6")
    wait_for((tmp_path / "sweeps/toy/seed=5/pid").exists, process)
    time.sleep(0.3)
    done = lptune("sweep", *toy, "seed=1,5,6")
    assert (done.returncode, "another sweep runs there" in done.stderr) == (2, True)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 143, stderr
    assert "the same command goes on" in stderr
    assert (tmp_path / "sweeps/toy/seed=5/saved").exists()
    assert not (tmp_path / "sweeps/toy/seed=6").exists()
    (tmp_path / "go").touch()
    done = lptune("sweep", *toy, "seed=1,5,6")
    assert done.returncode == 0, done.stderr
    assert "[1/3] seed=1: already finished" in done.stdout
    assert (tmp_path / "ran").read_text().split() == ["1", "5", "5", "6"]


def test_a_killed_sweep_leaves_no_run_behind(toy: list[str], tmp_path: Path, start: Start) -> None:
    process = start(*toy, "seed=5,6")
    pid = tmp_path / "sweeps/toy/seed=5/pid"
    wait_for(lambda: pid.exists() and pid.read_text() != "", process)
    time.sleep(0.3)
    process.kill()
    process.communicate(timeout=120)
    wait_for((tmp_path / "sweeps/toy/seed=5/saved").exists)

    def is_gone() -> bool:
        stat = Path(f"/proc/{pid.read_text()}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"

    wait_for(is_gone)
    assert not (tmp_path / "sweeps/toy/seed=6").exists()


# ---- runs that another machine starts


def test_commands_for_slurm_are_printed_without_a_look_at_the_devices_here(
    command: Command, tmp_path: Path
) -> None:
    """Each is a job of examples/slurm, by the line of docs/sweep.md."""
    Path("my.yaml").write_text(CONFIG.replace("device: cpu", "device: cuda"))  # of other machines
    write_model(Path("tiny"))
    counts = ("--nnodes", "2", "--nproc-per-node", "1")
    values = ("precision.skip=[lm_head,a b],[]", "seed=1,2", "--dry-run")
    code, _, stderr = command("sweep", "--config", "my.yaml", *counts, *values)
    assert (code, "do not divide among 2" in stderr) == (2, True), "micro-batches of 4 rows"
    code, stdout, stderr = command("sweep", "--config", "my.yaml", *counts, "global_batch_size=8", *values)
    assert (code, stderr) == (0, "")
    assert not Path("sweeps").exists()
    lines = [shlex.split(line) for line in stdout.splitlines()[1:]]
    assert [command("validate", *words[2:])[0] for words in lines] == [0, 0, 0, 0]
    page = (cold.ROOT / "docs/sweep.md").read_text()
    (of_docs,) = re.findall(r"^  (sed .+) > jobs.sh$", page, re.MULTILINE)
    jobs = subprocess.run(["bash", "-c", of_docs], input=stdout, capture_output=True, text=True, check=True)
    fake = 'sbatch() { for each in "$@"; do printf "%s\\n" "$each"; done; echo; }\n'
    ran = subprocess.run(["bash", "-c", fake + jobs.stdout], capture_output=True, text=True, check=True)
    asked = [job.splitlines() for job in ran.stdout.strip().split("\n\n")]
    assert [words[words.index("examples/slurm/full_finetune.sbatch") + 1 :] for words in asked] == [
        words[2:] for words in lines
    ]


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("sweep.json", lambda path: path.write_text("[" * 100_000)),
        ("sweep.json", lambda path: path.write_text('{"runs": {"seed=1": [1]}}')),
        ("sweep.json", os.mkfifo),
        (".sweep.lock", lambda path: path.symlink_to("../elsewhere")),
    ],
)
def test_a_folder_that_somebody_prepared_is_one_line_before_the_first_run(
    toy: list[str], tmp_path: Path, command: Command, name: str, make: Callable[[Path], object]
) -> None:
    folder = tmp_path / "sweeps" / "toy"
    folder.mkdir(parents=True)
    make(folder / name)
    code, _, stderr = command("sweep", *toy, "seed=1,6")
    assert (code, stderr.count("\n")) == (2, 1)
    assert stderr.startswith(f"error: sweeps/toy/{name}: ")
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "sweeps" / "elsewhere").exists()
