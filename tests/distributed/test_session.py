"""The mesh that ranks form, what a rank draws, which signals ask it to stop, and work of one for all."""

import dataclasses
import importlib
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lptune import distributed, launch
from lptune.base.errors import UnavailableError, UserError
from lptune.config import ParallelConfig, mesh_axes
from lptune.distributed import World
from tests.helpers.launch import free_port
from tests.helpers.ranks import Ranks, run_ranks

session = importlib.import_module("lptune.distributed.session")  # the package's `session` is the function


@pytest.mark.parametrize(
    ("parallel", "num_ranks", "axes"),
    [
        ({}, 1, {"fsdp": 1}),
        ({}, 6, {"fsdp": 6}),
        ({"replicate": 2}, 6, {"replicate": 2, "fsdp": 3}),
        ({"tensor": 2}, 2, {"fsdp": 1, "tensor": 2}),
        ({"replicate": 2, "tensor": 8}, 64, {"replicate": 2, "fsdp": 4, "tensor": 8}),
    ],
    ids=str,
)
def test_what_replicas_and_tensor_parallelism_leave_is_the_fsdp_axis(
    parallel: dict[str, int], num_ranks: int, axes: dict[str, int]
) -> None:
    assert mesh_axes(ParallelConfig(**parallel), num_ranks) == axes  # type: ignore[arg-type]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what a launcher leaves in the environment: of so many ranks, this one is the first."""

    def set_variables(num_ranks: int, port: int | str | None) -> None:
        monkeypatch.delenv(launch.LAUNCHER, raising=False)
        left = {"RANK": "0", "WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in left.items():
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, str(value))

    return set_variables


@pytest.mark.parametrize(
    ("port", "line"),
    [(None, "environment variable MASTER_PORT expected, but not set"), ("abc", "invalid literal for int")],
)
def test_what_a_launcher_left_and_is_no_process_group_is_one_line(
    launched: Callable[..., None], port: str | None, line: str
) -> None:
    launched(1, port)
    with (
        pytest.raises(UserError, match=f"RANK=0 in the environment, but .*{line}.*; unset what is left"),
        distributed.session("cpu"),
    ):
        pass


@pytest.mark.parametrize(("name", "value"), [("RANK", "abc"), ("WORLD_SIZE", "")])
def test_a_rank_that_is_no_number_is_one_line(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    for key, text in ({"RANK": "0", "WORLD_SIZE": "1"} | {name: value}).items():
        monkeypatch.setenv(key, text)
    with pytest.raises(UserError, match=r"^RANK or WORLD_SIZE in the environment: invalid"):
        distributed.session("cpu").__enter__()


def test_a_world_size_without_a_rank_is_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with distributed.session("cpu") as world:
        assert (world.rank, world.size) == (0, 1)


@pytest.mark.parametrize("launcher", [None, "1"])
def test_a_rank_that_waits_for_others_says_so_and_names_the_variables(
    launched: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    launcher: str | None,
) -> None:
    port = free_port()
    launched(2, port)
    if launcher:
        monkeypatch.setenv(launch.LAUNCHER, launcher)
    monkeypatch.setattr(session, "_HINT_S", 0.1)
    init = dist.init_process_group
    brief = timedelta(seconds=0.5)
    monkeypatch.setattr(dist, "init_process_group", lambda backend: init(backend, timeout=brief))
    with pytest.raises(dist.DistError if launcher else UserError), distributed.session("cpu"):
        pass
    todo = "" if launcher else "; if no launcher started it, unset RANK and WORLD_SIZE"
    line = f"rank 0 of 2 is waiting for the other ranks at 127.0.0.1:{port}{todo}\n"
    assert capfd.readouterr().err.count(line) == 1


def test_a_port_that_another_program_uses_is_one_line(launched: Callable[..., None]) -> None:
    with socket.socket(socket.AF_INET6) as taken:
        taken.bind(("::", 0))
        taken.listen()
        port = taken.getsockname()[1]
        launched(2, port)
        line = (
            rf"^rank 0 of 2 cannot meet the others at 127.0.0.1:{port}: .*address already in use; if no "
            "launcher started it, unset RANK and WORLD_SIZE$"
        )
        with pytest.raises(UserError, match=line), distributed.session("cpu"):
            pass


def test_a_rank_whose_peers_come_in_time_is_quiet(
    launched: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    launched(1, free_port())
    monkeypatch.setattr(session, "_HINT_S", 0.1)
    with distributed.session("cpu"):
        time.sleep(0.2)
    assert "waiting" not in capfd.readouterr().err


def test_ranks_that_do_not_divide_are_one_line() -> None:
    message = r"parallel: replicate=2 x tensor=3 needs a multiple of 6 ranks, found 4"
    with pytest.raises(UserError, match=message):
        mesh_axes(ParallelConfig(replicate=2, tensor=3), 4)
    with (
        pytest.raises(UserError, match="needs a multiple of 2 ranks, found 1"),
        distributed.session("cpu", ParallelConfig(tensor=2)),
    ):
        pass


def test_cpu_offload_on_a_cpu_is_one_line() -> None:
    with (
        pytest.raises(UserError, match=r"parallel\.cpu_offload: moves weights out of a GPU's memory"),
        distributed.session("cpu", ParallelConfig(cpu_offload=True)),
    ):
        pass


def draws(world: World, seed: int, step: int = 0) -> tuple[float, ...]:
    world.seed(seed, step)
    return (*torch.rand(3).tolist(), *np.random.rand(3), random.random())


def test_what_a_rank_draws_is_a_function_of_seed_step_and_rank() -> None:
    with distributed.session("cpu", seed=7) as world:
        at_start = (*torch.rand(3).tolist(), *np.random.rand(3), random.random())
        assert at_start == draws(world, 7) == draws(world, 7)
        other = dataclasses.replace(world, rank=1)
        # seed + rank would make rank 1 of seed 7 and rank 0 of seed 8 the same.
        streams = [draws(w, seed, step) for w in (world, other) for seed in (7, 8) for step in (0, 1)]
        values = [value for stream in streams for value in stream]
        assert len(set(values)) == len(values)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_after_the_first_question_asks_to_stop_until_the_session_ends(
    number: signal.Signals,
) -> None:
    handler, mask = signal.getsignal(number), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with distributed.session("cpu") as world:
        assert signal.getsignal(number) == handler  # a session of which nobody asks leaves the signals alone
        assert world.stop_requested() is None
        for _ in range(2):
            os.kill(os.getpid(), number)
        deadline_s = time.monotonic() + 10
        while (asked := world.stop_requested()) is None:
            assert time.monotonic() < deadline_s
        assert asked == number
    assert (signal.getsignal(number), signal.pthread_sigmask(signal.SIG_BLOCK, ())) == (handler, mask)


def test_deterministic_algorithms_are_on_within_the_session_and_off_after_it() -> None:
    import torch._inductor.config as inductor

    def state() -> tuple[bool, bool, bool]:
        fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        return torch.are_deterministic_algorithms_enabled(), inductor.deterministic, fills

    before = state()
    assert before[0] is False
    with distributed.session("cpu", deterministic=True):
        assert state() == (True, True, False)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert state() == before
    with distributed.session("cpu"):
        assert state() == before


def gathered(rank: int, size: int) -> list[object]:
    with distributed.session("cpu") as world:
        return world.gather(
            {"rank": rank, "text": "x" * (100 * rank) + "\ud800é", "sum": 0.1 + rank, "no": None}
        )


def test_every_rank_gets_the_values_of_all_in_their_order(ranks: Ranks) -> None:
    values = [{"rank": r, "text": "x" * (100 * r) + "\ud800é", "sum": 0.1 + r, "no": None} for r in range(3)]
    assert ranks.run(gathered, 3) == [values] * 3


def _in_turn(rank: int, num_ranks: int, folder: str) -> list[str]:
    with distributed.session("cpu") as world, distributed.machine_first(world):
        found = sorted(os.listdir(folder))
        Path(folder, str(rank)).touch()
        return found


def _refused(rank: int, num_ranks: int) -> tuple[str, bool]:
    entered = False
    with distributed.session("cpu") as world:
        try:
            with distributed.machine_first(world):
                entered = True
                if rank == 0:
                    raise UserError("rows.jsonl line 7: not valid JSON")
        except UserError as error:
            return str(error), entered
    return "", entered


def test_the_first_rank_of_a_machine_goes_ahead(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(_in_turn, 2, str(tmp_path)) == [[], ["0"]]


def test_its_error_reaches_the_others_in_place_of_their_turn(ranks: Ranks) -> None:
    line = "rows.jsonl line 7: not valid JSON"
    assert ranks.run(_refused, 2) == [(line, True), (line, False)]
    assert ranks.run(_refused, 1) == [(line, True)]


def _raise(error: UserError | None) -> None:
    if error is not None:
        raise error


def _fail_together(rank: int, num_ranks: int) -> list[tuple[int, str]]:
    away, lasting = UnavailableError("no answer; wait for it"), UserError("no such folder")
    found = []
    with distributed.session("cpu") as world, distributed.side_group(world) as group:
        for errors in ((away, None), (away, lasting), (lasting, away)):
            with pytest.raises(UserError) as raised, group.together((UserError,), str):
                _raise(errors[rank])
            found.append((raised.value.exit_code, str(raised.value)))
    return found


def test_a_lasting_error_of_any_rank_is_the_one_that_all_raise() -> None:
    away, lasting = (1, "no answer; wait for it"), (2, "no such folder")
    assert run_ranks(2, _fail_together) == [[away, lasting, lasting]] * 2
