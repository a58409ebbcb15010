"""The calls for a borrowed GPU: they run, they end on time, and a cut loses only the rest."""

import argparse
import importlib.util
import itertools
import json
import os
import random
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.helpers import cold, fork_server
from tests.helpers.tiny_recipe import make_checkpoint

Load = Callable[[str], ModuleType]
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_results_are_whole_after_every_row(load: Load, tmp_path: Path) -> None:
    harness: ModuleType = load("harness")
    path = tmp_path / "folder" / "r.json"

    def content() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    with harness.Results(path, preset="x") as results:
        assert content()["rows"] == []
        results.add(a=1, b=float("nan"))
        assert content()["rows"] == [{"a": 1, "b": None}]
        assert content()["complete"] is False
    assert content()["complete"] is True
    assert content()["preset"] == "x"
    with pytest.raises(RuntimeError), harness.Results(path):
        raise RuntimeError("no device")
    assert content()["complete"] is False
    assert content()["failed"] == "RuntimeError: no device"


def test_falling_back_to_eager_is_an_error(load: Load) -> None:
    import torch

    strict, config = load("harness").strict_compilation, torch._dynamo.config
    names = (
        "recompile_limit", "accumulated_recompile_limit", "fail_on_recompile_limit_hit", "suppress_errors"
    )  # fmt: skip
    with config.patch({name: getattr(config, name) for name in names}):
        strict(2)
        torch._dynamo.reset()

        @torch.compile(dynamic=False)
        def doubled(x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        doubled(torch.zeros(2))
        doubled(torch.zeros(3))
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            doubled(torch.zeros(4))
    torch._dynamo.reset()


def _adds_rows_until_killed(folder: Path) -> None:
    sys.path.insert(0, str(BENCHMARKS))
    from harness import Results

    told = os.open(folder / "told", os.O_CREAT | os.O_WRONLY)
    with Results(folder / "r.json") as results:
        for number in itertools.count():
            results.add(number=number, text="x" * 5_000)
            os.write(told, b"1")


def test_a_kill_at_any_second_loses_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCHMARK_PART", "kernels")
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.setenv("BENCHMARK_ROWS", str(folder / "rows.jsonl"))
        process = fork_server.process(_adds_rows_until_killed, folder)
        while not (folder / "told").exists() and process.is_alive():
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.5))
        process.kill()
        process.join()
        num_told = len((folder / "told").read_bytes())
        rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text("utf-8").splitlines()]
        for found in (rows, json.loads((folder / "r.json").read_text("utf-8"))["rows"]):
            assert [row["number"] for row in found] == list(range(len(found)))
            assert len(found) >= num_told
        assert all(row["part"] == "kernels" for row in rows)


@pytest.mark.parametrize("card_gib", [79.0, 79.6, 139.8])
def test_no_label_is_run_that_is_not_planned_to_fit(load: Load, tmp_path: Path, card_gib: float) -> None:
    suite, planned = load("gpu_suite"), load("planned")
    args = argparse.Namespace(small=False, work=tmp_path, card_gib=card_gib)
    for name in suite.STEPS:
        if suite.why_not(name, args) is not None:
            assert (name, card_gib < 100) == ("8b", True)
            assert len(list(suite.unfit(name, card_gib))) == len(planned.LABELS_8B)
            continue
        command = suite.part(name, args, tmp_path / "r.json", 5.0).command
        options = list(itertools.pairwise(command))
        overrides = tuple(value for option, value in options if option == "--override")
        setting = planned.Setting(dict(options)["--preset"], overrides)
        assert ("micro_batch_size=3" in overrides) == (card_gib < 100 and "3b" in setting.preset)
        labels = [value for option, value in options if option == "--label"]
        assert labels
        for label in labels:  # of each the plan is known
            assert planned.peak_gib(setting, label) <= card_gib - planned.RESERVE_GIB, label


def test_the_table_of_planned_peaks_is_the_planners(load: Load, tmp_path: Path) -> None:
    planned = load("planned")
    make_checkpoint(tmp_path / "tokenizer")  # in a fork; else a program of its own starts for it
    setting = planned.Setting("llama3_2/1b")
    peak = planned.plan(setting, "int8_rowcol", tmp_path)
    assert round(peak, 1) == planned.peak_gib(setting, "int8_rowcol")


def test_a_missing_package_is_named_and_stops_only_what_needs_it(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite, find_spec = load("gpu_suite"), importlib.util.find_spec
    args = argparse.Namespace(small=False, work=tmp_path, card_gib=140.0)

    def without(*modules: str) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n in modules else find_spec(n))

    without("hypothesis", "pytest")
    assert ["hypothesis" in line or "pytest" in line for line in suite.lacks()] == [True, True]
    assert "pytest" in suite.why_not("tests", args)
    assert suite.why_not("kernels", args) is None
    without("omegaconf")
    assert all("omegaconf" in suite.why_not(name, args) for name in suite.LIMITS_S)
    files = []
    for missing in ((), ("hypothesis",)):
        without(*missing)
        command = suite.part("tests", args, tmp_path / "r.json", 5.0).command
        files.append({Path(word).name for word in command if word.endswith(".py")})
    assert files[0] - files[1] == {"test_save.py"}


def test_tests_are_collected_without_hypothesis(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoHypothesis:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == "hypothesis":
                raise ModuleNotFoundError(name)

    monkeypatch.setattr(sys, "meta_path", [NoHypothesis, *sys.meta_path])
    monkeypatch.delitem(sys.modules, "hypothesis", raising=False)
    runpy.run_path(str(BENCHMARKS.parent / "tests" / "conftest.py"))


def test_clocks_are_read_while_something_runs(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, tool = load("first"), tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for said, expected in (("1500, 690.5, 61", [1500, 690.5, 61]), ("[N/A], 1, 1", [])):
        tool.write_text(f"#!/bin/sh\necho '{said}'; touch {tmp_path}/read\n", encoding="utf-8")
        tool.chmod(0o755)
        with first.clocks() as medians:
            deadline = time.monotonic() + 30
            while not (tmp_path / "read").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
        assert list(medians.values()) == expected
        (tmp_path / "read").unlink()


def test_an_op_with_one_wrong_value_is_found(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    first, harness = load("first"), load("harness")
    from lptune import kernels

    right = kernels.quantize_rows

    def wrong(*args: Any, **keys: Any) -> Any:
        rows = right(*args, **keys)
        if os.environ.get("LPTUNE_KERNELS") != "reference" and rows.q_MK.dtype.is_floating_point is False:
            rows.q_MK[3, 5] += 1
        return rows

    monkeypatch.setattr(kernels, "quantize_rows", wrong)
    monkeypatch.setattr(first, "CHECKED", (64, 64, 64))
    results = harness.Results(None)
    first.check(results)
    said = {row["check"] for row in results.rows if not row["agrees"]}
    assert {"int8 quantize_rows", "int8 scaled_mm, output", "int8 scaled_mm, grad_input"} == said


PART = """
import json, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("measured 1", flush=True)
open({path!r}, "w").write(json.dumps({{"rows": [1], "complete": False}}))
time.sleep({seconds})
open({path!r}, "w").write(json.dumps({{"rows": [1, 2], "complete": True}}))
"""


@pytest.fixture
def call(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A call whose parts print a line, start a process that stays, write a row and take 1 or 60 s."""
    suite = load("gpu_suite")
    seconds = {"quick": 1, "slow": 60}

    def part(name: str, args: argparse.Namespace, path: Path, minutes: float) -> Any:
        code = PART.format(path=str(path), seconds=seconds[name])
        return suite.Part(cold.command("-c", code), {})

    monkeypatch.setattr(suite, "part", part)
    return suite.Call("call-1", argparse.Namespace(out=tmp_path, work=tmp_path, small=True))


def _left_of(group_of: str) -> list[str]:
    """Processes of the parts above that are still there."""
    done = subprocess.run(["pgrep", "-f", group_of], capture_output=True, text=True, check=False)
    return [line for line in done.stdout.split() if int(line) != os.getpid()]


@pytest.mark.slow
def test_a_part_that_takes_too_long_ends_with_its_children_and_leaves_its_rows(call: Any) -> None:
    started = time.monotonic()
    assert call.run("slow", 3) == 124
    assert time.monotonic() - started < 20
    assert call.run("quick", 30) == 0
    call.finish()
    assert not _left_of("import time; time.sleep.600.")
    content = json.loads(call.json_file.read_text(encoding="utf-8"))
    assert content["complete"] is True
    assert content["parts"]["slow"]["exit"] == 124
    assert content["parts"]["slow"]["results"] == {"rows": [1], "complete": False}
    assert content["parts"]["quick"]["results"] == {"rows": [1, 2], "complete": True}
    log = call.log.read_text(encoding="utf-8")
    assert log.splitlines().count("measured 1") == 2
    assert "=== slow: exit 124" in log


def test_results_of_an_earlier_call_are_kept(load: Load, tmp_path: Path) -> None:
    suite = load("gpu_suite")
    args = argparse.Namespace(out=tmp_path, work=tmp_path, small=True)
    for number in range(3):
        call = suite.Call("call-1", args)
        call.say(f"call number {number}")
        call.finish()
    said = {path.name: path.read_text(encoding="utf-8").splitlines()[0] for path in tmp_path.glob("*.txt")}
    assert said == {
        "call-1.before-1.txt": "call number 0",
        "call-1.before-2.txt": "call number 1",
        "call-1.txt": "call number 2",
    }
    assert len(list(tmp_path.glob("call-1*.json"))) == 3


def test_a_checkpoint_without_weights_on_disk_is_read_as_one(load: Load, tmp_path: Path) -> None:
    from lptune import checkpoint, models

    steps = load("steps")
    model = models.build_on_meta(models.config_from_dict(models.PRESETS["llama3_2"]["1b"], "test"))
    steps._write_hollow(model, tmp_path / "model.safetensors")
    index = checkpoint.read_index(tmp_path)
    checkpoint.match_tensors(model, index)
    size = (tmp_path / "model.safetensors").stat()
    assert size.st_size > 2.4e9
    assert size.st_blocks * 512 < 1e6


@pytest.mark.parametrize(
    ("label", "overrides"),
    [
        ("none", ["precision.kind=none", "precision.emulate=false"]),
        ("torchao float8_rowwise", []),
        (
            "int8_rowcol + deterministic=true",
            ["deterministic=true", "precision.kind=int8_rowcol", "precision.emulate=false"],
        ),
    ],
)
def test_a_label_says_what_a_run_overrides(load: Load, label: str, overrides: list[str]) -> None:
    assert load("steps").overrides_of(label) == overrides


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>", "bf16 GEMM"),
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT", "bf16 GEMM"),
        ("scaled_mm_kernel", "8-bit GEMM"),
        ("rows_kernel", "quantizer"),
        ("quantize_blocks_kernel", "quantizer"),
        ("triton_poi_fused_add_mul_1", "compiled"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...FusedAdam...>", "optimizer"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
    ],
)
def test_kernels_are_counted_for_what_they_are_for(load: Load, name: str, group: str) -> None:
    assert load("steps").group_of(name) == group


@pytest.mark.slow
def test_all_calls_run_on_a_cpu_and_leave_whole_results(tmp_path: Path) -> None:
    script = BENCHMARKS / "gpu_first.sh"
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHON": cold.command()[0],
        "LPTUNE_LOGS": "",
    }
    command = ["bash", str(script), "--small", "--out", str(tmp_path), "--work", str(tmp_path / "work")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    for number in (1, 2, 3, 4, 5):
        content = json.loads((tmp_path / f"call-{number}.json").read_text(encoding="utf-8"))
        assert content["complete"]
        for name, part in content["parts"].items():
            assert part["exit"] == 0, name
            assert part["results"]["complete"], name
            assert part["results"]["rows"], name
            assert not [row for row in part["results"]["rows"] if "failed" in row], name
