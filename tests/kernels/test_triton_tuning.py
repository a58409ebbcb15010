"""Autotuning: what is measured, what is remembered, and that a broken cache costs a measurement only."""

import functools
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from triton.runtime.errors import OutOfResources

from lptune.kernels.triton import launch
from lptune.kernels.triton.tuning import Tuner


class Config(NamedTuple):
    block: int
    num_warps: int


SLOW, FAST, BROKEN = Config(32, 4), Config(64, 4), Config(512, 8)


class Clock:
    """A timer that runs nothing on a device: a configuration takes 1000 / block."""

    def __init__(self) -> None:
        self.num_measured = 0
        self.last: Config | None = None

    def run(self, config: Config) -> None:
        if config == BROKEN:
            raise RuntimeError("out of resource: shared memory")
        self.last = config

    def __call__(self, run: Callable[[], object]) -> float:
        run()
        self.num_measured += 1
        assert self.last is not None
        return 1000 / self.last.block


def test_the_fastest_is_chosen_measured_once_and_found_again_by_the_next_process(tmp_path: Path) -> None:
    path, clock = tmp_path / "lptune" / "choices.json", Clock()
    tuner = Tuner(path, clock)
    assert tuner.choose("gemm M~64", (SLOW, FAST), clock.run) == FAST
    assert tuner.choose("gemm M~64", (SLOW, FAST), clock.run) == FAST
    assert clock.num_measured == 2
    assert Tuner(path, clock).choose("gemm M~64", (SLOW, FAST), clock.run) == FAST
    assert clock.num_measured == 2
    assert Tuner(path, clock).choose("gemm M~128", (SLOW, FAST), clock.run) == FAST
    assert clock.num_measured == 4
    assert [file.name for file in path.parent.iterdir()] == ["choices.json"]


def test_a_configuration_that_does_not_run_is_left_out(tmp_path: Path) -> None:
    clock = Clock()
    assert Tuner(tmp_path / "c.json", clock).choose("k", (BROKEN, SLOW), clock.run) == SLOW
    with pytest.raises(RuntimeError, match="out of resource"):
        Tuner(tmp_path / "d.json", clock).choose("k", (BROKEN,), clock.run)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b'{"k": [1, 2]}', b"[" * 100_000],
)
def test_a_damaged_file_costs_a_measurement_and_is_replaced(tmp_path: Path, content: bytes) -> None:
    path, clock = tmp_path / "c.json", Clock()
    path.write_bytes(content)
    assert Tuner(path, clock).choose("k", (SLOW, FAST), clock.run) == FAST
    assert json.loads(path.read_text())["k"] == list(FAST)


@pytest.mark.parametrize("what", ["a link", "a FIFO", "writable"])
def test_a_file_that_is_not_of_this_user_alone_costs_a_measurement_and_is_replaced(
    what: str, tmp_path: Path
) -> None:
    path, clock = tmp_path / "c.json", Clock()
    (tmp_path / "slow.json").write_text(json.dumps({"k": list(SLOW)}))
    (tmp_path / "slow.json").chmod(0o666)
    if what == "a link":
        path.symlink_to("slow.json")
    elif what == "a FIFO":
        os.mkfifo(path)
    else:
        (tmp_path / "slow.json").rename(path)
    assert Tuner(path, clock).choose("k", (SLOW, FAST), clock.run) == FAST
    assert stat.S_ISREG(path.lstat().st_mode)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_folder_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    (tmp_path / "file").write_text("")
    tuner = Tuner(tmp_path / "file" / "c.json", clock)
    for key in ("k", "l"):
        assert tuner.choose(key, (SLOW, FAST), clock.run) == FAST
    assert caplog.text.count("cannot be kept") == 1


@pytest.fixture
def no_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_fitting", {})


@pytest.mark.usefixtures("no_choices")
def test_without_measuring_the_first_configuration_that_fits_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device with 99 KB of shared memory, where the first would need 128."""
    launched: list[Config] = []

    def run(config: Config) -> None:
        launched.append(config)
        if config == BROKEN:
            raise OutOfResources(131096, 101376, "shared memory")

    monkeypatch.setenv("LPTUNE_AUTOTUNE", "0")
    cuda = torch.device("cuda")
    assert launch.tuned("k", (BROKEN, SLOW, FAST), run, cuda) == SLOW
    assert launch.tuned("k", (BROKEN, SLOW, FAST), run, cuda) == SLOW
    assert launched == [BROKEN, SLOW]
    # Where none does, the launch itself says what is missing.
    assert launch.tuned("l", (BROKEN,), run, cuda) == BROKEN


@pytest.mark.usefixtures("no_choices")
def test_under_capture_nothing_is_measured_and_what_was_measured_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = Clock()
    tuner = Tuner(tmp_path / "c.json", clock)
    tuner.choose("k", (SLOW, FAST), clock.run)
    monkeypatch.setattr(launch, "_tuner", lambda device: tuner)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    cuda = torch.device("cuda")
    assert launch.tuned("k", (SLOW, FAST), clock.run, cuda) == FAST
    assert launch.tuned("l", (SLOW, FAST), clock.run, cuda) == SLOW
    assert clock.num_measured == 2


def test_an_error_of_the_machine_comes_at_once_and_not_after_every_configuration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    tried = []

    def run(config: Config) -> None:
        tried.append(config)
        if config == BROKEN:
            raise OutOfResources(300_000, 232_448, "shared memory")
        raise RuntimeError("Failed to find C compiler")

    device = torch.device("cuda", 0)
    tuner = Tuner(tmp_path / "c.json", Clock(), functools.partial(launch.compile_together, device))
    with pytest.raises(RuntimeError, match="C compiler"):
        tuner.choose("k", (SLOW, FAST), run)
    assert tried == [SLOW]
    launch.compile_together(device, [functools.partial(run, BROKEN), functools.partial(run, FAST)])
    assert tried == [SLOW, BROKEN, FAST]
