"""`lptune plan`: a run that nobody here could start, told beforehand."""

import re
import time
from collections import Counter
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from lptune import models
from lptune.cli import catalog, plan, planned_model, recipe
from lptune.config import DataConfig, FinetuneConfig, ModelConfig
from lptune.hardware.devices import named_device
from lptune.plan import fit
from tests.base.test_progress import terminal
from tests.cli.conftest import Command

LARGE = ("--world-size", "512", "global_batch_size=512", "micro_batch_size=1", "precision.kind=int8_rowcol")
TINY = ("--config", "llama3_2/1b", "--preset", "llama3_2/tiny", "data.seq_len=64")


def _megabytes(number: str, unit: str) -> float:
    return float(number.replace(",", "")) * {"B": 1e-6, "kB": 1e-3, "MB": 1.0, "GB": 1e3}[unit]


@pytest.mark.parametrize(
    ("size", "billions", "blocks", "hidden", "mlp"),
    [
        ("8b", "8.03", 32, 4096, 14336),
        # The same of more and larger blocks, in three times the time.
        pytest.param("70b", "70.55", 80, 8192, 28672, marks=pytest.mark.slow),
    ],
)
def test_512_ranks_of_llama_are_planned_within_two_minutes(
    size: str, billions: str, blocks: int, hidden: int, mlp: int, command: Command
) -> None:
    started = time.process_time()
    code, out, err = command("plan", "--config", f"llama3_1/{size}", *LARGE)
    assert (code, err) == (0, "")
    assert time.process_time() - started < 120  # of one core, whatever else runs on it
    assert f"512 x H100 80GB HBM3, mesh fsdp 512; {billions} billion parameters;" in out
    assert max(map(len, out.splitlines())) <= 80
    found = {
        (operation, dtype): (int(calls), _megabytes(number, unit))
        for operation, dtype, calls, number, unit in re.findall(
            r"^(\w+) +(\w+) +fsdp \(512\) +(\d+) +([\d.,]+) (\w+)$", out, flags=re.MULTILINE
        )
    }
    kv = 1024
    # Blocks, gathered for forward and for backward; sizes are multiples of 512, so no row is padded.
    rows = {hidden: hidden + kv + kv + hidden + mlp + mlp, mlp: hidden}  # q, k, v, o, gate, up; down
    low = sum(n * (16 + k) for k, n in rows.items()) + 2 * 2 * hidden  # and two norms in bfloat16
    numbers = sum(n * k for k, n in rows.items()) + 2 * hidden
    root_numbers = 2 * 251 * 512 * hidden + hidden  # embedding and head: 128,256 words are 250.5 a rank
    expected = {
        ("all_gather", "uint8"): (2 * blocks, 2 * blocks * low / 1e6),
        ("all_gather", "bfloat16"): (1, 2 * root_numbers / 1e6),
        ("reduce_scatter", "float32"): (blocks + 1, 4 * (blocks * numbers + root_numbers) / 1e6),
        ("all_reduce", "float64"): (1, 0.0),  # of the update: losses and squares of gradients
    }
    assert found.keys() == expected.keys()
    for key, (calls, megabytes) in expected.items():
        assert found[key][0] == calls
        # Printed as tenths of a gigabyte. Bytes are counted in tests/plan/test_dry_run.py.
        assert found[key][1] == pytest.approx(megabytes, abs=51), key


def test_a_head_that_is_not_tied_after_all_is_planned_as_one(
    command: Command, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command("new-checkpoint", "llama3_2/tiny", "new")[0] == 0
    weights = Path("new/model.safetensors")
    tensors = load_file(weights)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] * 2}, weights)
    cfg = FinetuneConfig(model=ModelConfig(path="new"), data=DataConfig(source="builtin"))
    found, where, _ = planned_model.of_config(cfg, Path("llama3_2/1b.yaml"), None)
    assert (found.tied, where) == (False, "new/config.json")
    assert "lm_head.weight differs from model.embed_tokens.weight" in capfd.readouterr().out


def test_the_device_that_was_asked_for_is_named_with_whether_the_run_fits_and_its_disk(
    command: Command,
) -> None:
    tiny = models.config_from_dict(models.PRESETS["llama3_2"]["tiny"], "test")
    num_parameters = models.num_parameters(models.build_on_meta(tiny))
    for name, found in (
        ("4090", r"^1 x GeForce RTX 4090, mesh"),
        ("NVIDIA A100-SXM4-40GB", r"^1 x A100-SXM4-40GB, mesh"),
    ):
        code, out, err = command("plan", *TINY, "--device", name, "precision.kind=int8_rowcol")
        assert (code, err) == (0, "")
        assert re.search(found, out, flags=re.MULTILINE)
        words = " ".join(out.split())
        assert re.search(r"^fits .* \((24|40) GB\): the peak is [\d.]+ MB", out, flags=re.MULTILINE)
        assert (
            f"3 checkpoints of {12 * num_parameters / 1e6:.1f} MB (checkpoint.keep_last=2, one being written)"
            in words
        )
        assert f"an export of {2 * num_parameters / 1e3:.1f} kB in bfloat16" in words


def test_on_a_terminal_a_dry_run_says_that_it_is_at_work() -> None:
    with terminal() as screen:
        plan.plan.main([*TINY], standalone_mode=False)
    assert "loading torch ..." in screen.getvalue()
    assert "planning a step of 2 blocks ..." in screen.getvalue()
    assert not [line for line in screen.lines() if line.endswith("...")]
    assert screen.lines()[0].startswith("plan of ")


def test_a_plan_fits_a_terminal_and_names_the_precision_of_each_layer(command: Command) -> None:
    for keys in (
        ["precision.kind=int8_rowcol", "--nproc-per-node", "2", "--nnodes=1"],
        [
            "precision.kind=float8_delayed",
            "precision.skip=[lm_head,k_proj]",
            "freeze=[embed_tokens,'*.o_proj']",
        ],
    ):
        code, out, err = command("plan", *TINY, *keys)
        assert (code, err) == (0, "")
        assert max(map(len, out.splitlines())) <= 80, out
        if "int8_rowcol" in keys[0]:
            assert "mesh fsdp 2;" in out
            assert "output int8 row, grad_input int8 folded, grad_weight int8 column," in out
            assert re.search(r"^  128 x 64 +2 gate_proj, 2 up_proj$", out, re.MULTILINE)
            assert re.search(r"^high precision, (tied to|precision.skip).*:$", out, re.MULTILINE)


def _fits_below(num_bytes: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """An H100 of which a run may take no more."""
    monkeypatch.setattr(fit, "HEADROOM", 1 - num_bytes / named_device("h100").memory_bytes)


def test_a_config_that_fits_is_written_as_it_is_and_never_over_a_file(command: Command) -> None:
    code, out, err = command("plan", *TINY, "precision.kind=int8_rowcol", "--write", "my.yaml")
    assert (code, err) == (0, "")
    words = " ".join(out.split())
    assert words.endswith(
        "my.yaml is written; its run: lptune run full_finetune --config my.yaml data.source=rows.jsonl"
    )
    text = Path("my.yaml").read_text()
    assert text.startswith("# llama3_2/1b for 1 x H100 80GB HBM3, as it is: fits ")
    assert "precision: {kind: int8_rowcol}" in text
    assert "data: {seq_len: 64}" in text  # and no source, which nobody named
    code, out, err = command("plan", "--config", "my.yaml")  # of the same model, which is not here
    assert (code, err) == (0, "")
    assert "plan of my.yaml for the preset llama3_2/tiny" in out
    code, out, err = command("plan", *TINY, "--write", "my.yaml")
    assert (code, out) == (2, "")
    assert "--write: my.yaml: exists; choose another name" in err
    assert Path("my.yaml").read_text() == text


def test_what_is_written_fits(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    _fits_below(1.2e6, monkeypatch)  # as it is, 1.7 MB
    keys = ("micro_batch_size=1", "global_batch_size=1", "activation_checkpointing=full")
    code, out, err = command("plan", *TINY, "data.source=builtin", *keys, "--write", "my.yaml")
    assert (code, err) == (0, "")
    assert "does not fit" in out or "may not fit" in out
    words = " ".join(out.split())
    assert words.endswith("my.yaml is written; its run: lptune run full_finetune --config my.yaml")
    comment = " ".join(Path("my.yaml").read_text().replace("#", "").split())
    (change,) = re.findall(r"changed to fit: (.*?): a peak of [\d.]+ \wB a rank, fits", comment)
    cfg = recipe.load(catalog.find_recipe("full_finetune"), Path("my.yaml"), ())
    for key, value in (each.split("=") for each in change.split()):
        assert str(attrgetter(key)(cfg)).lower() == value, change
    code, out, err = command("plan", "--config", "my.yaml", "--preset", "llama3_2/tiny")
    assert re.search("^fits H100", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        pytest.param([], 1, id="the first that fits"),
        pytest.param(["--host-memory", "1"], 32, id="in memory that is known"),
        pytest.param(["--host-memory", "0.5"], 1, id="in too little of it"),
    ],
)
def test_a_config_keeps_the_rows_of_a_step_where_the_host_is_known_to_have_room(
    words: list[str], rows: int, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks = {"forward": Counter[str](), "update": Counter[str]()}

    def planned(cfg: Any, *given: Any, **keys: Any) -> Any:
        offloads = cfg.parallel.cpu_offload
        peak = 10 if cfg.optimizer.in_backward or offloads else 10**12
        return SimpleNamespace(peak_bytes=peak, host_bytes=6e8 * offloads, peaks=peaks)

    _fits_below(1e3, monkeypatch)  # not as it is
    monkeypatch.setattr(fit, "dry_run", planned)
    keys = ("data.source=builtin", "global_batch_size=32", "micro_batch_size=1")
    code, out, _ = command("plan", *TINY, *keys, *words, "--write", "my.yaml")
    assert code == 0
    assert recipe.load(catalog.find_recipe("full_finetune"), Path("my.yaml"), ()).global_batch_size == rows
    assert "a step has 1 row and not 32" in " ".join(out.split())
    assert ("`--host-memory GB` looks for" in out) == (not words)


def test_with_nothing_that_fits_nothing_is_written(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    _fits_below(1e3, monkeypatch)
    # Of what is tried after the plan itself only the peak is asked.
    tried = SimpleNamespace(peak_bytes=10**6, host_bytes=0, peaks={"forward": Counter(), "update": Counter()})
    monkeypatch.setattr(fit, "dry_run", lambda *_, **__: tried)
    code, _, err = command("plan", *TINY, "micro_batch_size=1", "global_batch_size=1", "--write", "my.yaml")
    assert code == 2
    assert err.splitlines()[-1:] == [err.strip()]
    assert "--write: nothing that was planned fits 1 x H100 80GB HBM3" in err
    assert not Path("my.yaml").exists()


def test_a_gpu_that_is_named_is_planned_for_whatever_the_file_trains_on(command: Command) -> None:
    Path("cpu.yaml").write_text(
        catalog.find_config("llama3_2/1b").read_text() + "\ndevice: cpu\n", encoding="utf-8"
    )
    words = ["--config", "cpu.yaml", *TINY[2:], "--device", "h100", "--write", "my.yaml"]
    code, out, err = command("plan", *words)
    assert (code, err) == (0, "")
    assert re.search(r"^1 x H100", out, re.MULTILINE)
    assert "device: cpu" not in Path("my.yaml").read_text()
    assert command("plan", *words[:-2], "device=cpu")[0] == 2


def test_write_plans_for_gpus(command: Command) -> None:
    code, _, err = command("plan", *TINY, "device=cpu", "--write", "my.yaml")
    assert (code, Path("my.yaml").exists()) == (2, False)
    assert "device=cpu plans for CPUs" in err
