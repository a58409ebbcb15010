"""The copy of a run in object storage: whole or without a seal, and what goes on from it is the same run."""

import errno
import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lptune import checkpoint, distributed
from lptune.base.errors import UnavailableError, UserError
from lptune.base.step_folders import list_checkpoints, step_folder_name, step_of
from lptune.base.storage import Storage
from lptune.checkpoint import run_copy
from lptune.checkpoint.run_copy import RunCopy
from lptune.checkpoint.run_folder import open_run_folder, write_launch
from lptune.cli.verify import verify
from lptune.config import CheckpointConfig, DataConfig, ExportConfig, FinetuneConfig, ModelConfig
from lptune.distributed import World
from tests.faults.runs import prepare, run_part, uninterrupted
from tests.faults.state import FACTS, State, digests, stored_tensors
from tests.helpers import faulty_storage, warm
from tests.helpers.cold import Finished
from tests.helpers.faulty_storage import Faulty
from tests.helpers.ranks import Ranks
from tests.helpers.s3 import accept_keys

SEAL = "manifest.json"


class Killed(BaseException):
    """Ends a run as a kill does: nothing that handles errors sees it."""


@pytest.fixture
def world() -> Iterator[World]:
    with distributed.session("cpu") as world:
        yield world


@pytest.fixture(autouse=True)
def no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Faulty, "fault", staticmethod(faulty_storage.none))
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # no machine loses power here


def nothing(step: int) -> None:
    """For runs in which nothing happens before a step."""


def train(
    folder: Path,
    address: str,
    world: World,
    steps: int,
    *,
    resume: str = "auto",
    before_step: Callable[[int], None] = nothing,
    averaged: int = 1,
    **keys: Any,
) -> int:
    """What a run does with its folder, with a state of which every element is known. Returns the step from
    which it went on.
    """
    cfg = FinetuneConfig(
        model=ModelConfig(path="none"),
        data=DataConfig(source="builtin", eval_fraction=0.1),
        output_dir=str(folder),
        resume=resume,
        eval_every_steps=1,
        checkpoint=CheckpointConfig(copy_to=address, **keys),
        export=ExportConfig(average_checkpoints=averaged),
    )
    with open_run_folder(cfg, world) as run:
        copy = RunCopy(address, run, cfg, world)
        found = copy.find(resume)
        state = State(world)
        if found is not None:
            state.load(found)
        first = state.step
        is_own = found is not None and found.folder.parent == run.steps
        run.create(found, world.print)
        if world.is_main:
            write_launch(folder / "run.json", "rows", first, steps, world)
        if run.own_disks:
            run.name_run()
        copy.begin(found if is_own else None)
        with checkpoint.CheckpointWriter(
            run.steps,
            state.model,
            state.optimizer,
            world,
            cfg.checkpoint,
            metrics=run.metrics,
            send=copy.send,
            own_disks=run.own_disks,
        ) as writer:
            while state.step < steps:
                before_step(state.step + 1)
                step = state.advance()
                if world.is_main:
                    with run.metrics.open("a") as file:
                        file.write(json.dumps({"step": step, "eval_loss": float(abs(step - 2))}) + "\n")
                writer.save(
                    step, FACTS, state.replicated(), eval_loss=float(abs(step - 2)), wait=step % 2 == 0
                )
    return first


def copied(place: Path) -> list[int]:
    """The steps of the checkpoints that have their seal."""
    return sorted(step_of(path.parent) for path in place.glob(f"checkpoints/step-*/{SEAL}"))


def metrics(folder: Path) -> list[int]:
    """The steps in metrics.jsonl."""
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("keys", "kept"),
    [({}, [4, 5]), ({"keep_last": 1, "keep_every": 3}, [3, 5]), ({"keep_last": 1, "keep_best": 1}, [2, 5])],
)
def test_the_copy_keeps_what_the_run_keeps_and_goes_on_elsewhere(
    tmp_path: Path, world: World, keys: dict[str, Any], kept: list[int]
) -> None:
    place, address = tmp_path / "copy", f"file://{tmp_path}/copy"
    train(tmp_path / "1", address, world, 3, **keys)
    # On another disk, which has the newest checkpoint alone.
    assert train(tmp_path / "2", address, world, 5, **keys) == 3
    assert copied(place) == kept
    assert sorted(path.name for path in (place / "checkpoints").iterdir()) == [*map(step_folder_name, kept)]
    for step in kept:
        State().load(checkpoint.verify(place / "checkpoints" / step_folder_name(step)))
    assert metrics(tmp_path / "2") == metrics(place) == [1, 2, 3, 4, 5]
    ids = {json.loads((folder / "run.json").read_text())["id"] for folder in (tmp_path / "1", tmp_path / "2")}
    assert len(ids) == 1


@pytest.mark.parametrize(
    ("keys", "fetched"),
    [({"keep_last": 3}, [4]), ({"keep_best": 1}, [2, 4]), ({"keep_last": 3, "averaged": 2}, [3, 4])],
)
def test_what_the_export_will_need_is_fetched_as_well(
    tmp_path: Path, world: World, keys: dict[str, Any], fetched: list[int]
) -> None:
    keys = {"every_steps": 1} | keys
    address = f"file://{tmp_path}/copy"
    train(tmp_path / "1", address, world, 4, **keys)
    for _ in range(2):  # also what a kill kept from being fetched
        assert train(tmp_path / "2", address, world, 4, **keys) == 4
        here = list_checkpoints(tmp_path / "2/checkpoints")
        assert sorted(map(step_of, here)) == fetched
        for path in here[1:]:
            State().load(checkpoint.verify(path))
            shutil.rmtree(path)


def test_a_kill_at_any_call_leaves_whole_checkpoints_and_such_that_have_no_seal(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sealed one is loaded and compared; the newest is never older than the one before the kill."""
    calls = list[str]()
    for number in itertools.count():
        place, run = tmp_path / f"copy-{number}", tmp_path / f"run-{number}"
        left = itertools.count(number, -1)

        def fault(call: str, path: str, left: Iterator[int] = left) -> None:
            if next(left) == 0:
                calls.append(f"{call} {path}")
                raise Killed

        monkeypatch.setattr(Faulty, "fault", staticmethod(fault))
        address = f"faulty://{place}"
        try:
            train(run, address, world, 2, keep_last=1)
            break
        except Killed:
            pass
        monkeypatch.setattr(Faulty, "fault", staticmethod(faulty_storage.none))
        sealed = copied(place)
        for step in sealed:
            State().load(checkpoint.verify(place / "checkpoints" / step_folder_name(step)))
        newest = max(map(step_of, list_checkpoints(run / "checkpoints")), default=0)
        assert newest - max(sealed, default=0) in (0, 1), (calls[-1], sealed, newest)
        # A new machine goes on from there, and what the kill has left is gone.
        assert train(tmp_path / f"other-{number}", address, world, 3, keep_last=1) == max(sealed, default=0)
        assert [path.name for path in (place / "checkpoints").iterdir()] == ["step-00000003"]
        assert copied(place) == [3]
        for path in (run, place, tmp_path / f"other-{number}"):
            shutil.rmtree(path, ignore_errors=True)
    assert len(calls) > 30
    assert {call.split()[0] for call in calls} == {"list", "put", "mv", "rm"}


def test_a_broken_copy_is_one_line_and_the_next_checkpoint_is_copied(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fault(call: str, path: str) -> None:
        if call == "put" and path.endswith("step-00000002/optimizer-00000.safetensors"):
            raise PermissionError(errno.EACCES, "The provided token has expired.")

    monkeypatch.setattr(Faulty, "fault", staticmethod(fault))
    place = tmp_path / "copy"
    train(tmp_path / "run", f"faulty://{place}", world, 2)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert line == (
        f"warning: step-00000002 is not copied: faulty://{place}/checkpoints/step-00000002/"
        "optimizer-00000.safetensors: The provided token has expired; tried again with the next checkpoint, "
        "or when the run starts again"
    )
    assert copied(place) == [1]
    assert train(tmp_path / "run", f"faulty://{place}", world, 3) == 2
    assert "warning: step-00000002 is not copied" in capsys.readouterr().out  # it was tried at the start
    assert copied(place) == [1, 3]
    assert sorted(path.name for path in (place / "checkpoints").iterdir()) == [
        "step-00000001",
        "step-00000003",
    ]


def test_what_a_kill_kept_from_the_copy_is_copied_when_the_run_starts_again(
    tmp_path: Path, world: World
) -> None:
    place = tmp_path / "copy"
    train(tmp_path / "run", f"file://{place}", world, 3)
    (place / "checkpoints/step-00000003" / SEAL).unlink()
    assert train(tmp_path / "run", f"file://{place}", world, 3) == 3
    assert copied(place) == [2, 3]
    State().load(checkpoint.verify(place / "checkpoints/step-00000003"))


REFUSED, BUSY = PermissionError(errno.EACCES, "Access Denied"), OSError(errno.EBUSY, "Slow Down")


@pytest.mark.parametrize("call", ["list", "put"])
@pytest.mark.parametrize(
    ("error", "exit_code"), [(REFUSED, 2), (BUSY, 1), (TimeoutError("no answer"), 1)], ids=type
)
def test_storage_that_fails_before_the_first_step_ends_the_run(
    tmp_path: Path,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    error: OSError,
    exit_code: int,
) -> None:
    def fault(made: str, path: str) -> None:
        if made == call:
            raise error

    monkeypatch.setattr(Faulty, "fault", staticmethod(fault))
    todo = "mend it" if exit_code == 2 else "wait for it"
    line = rf"^checkpoint.copy_to: faulty:///.*: {error.strerror or error}; {todo}, or leave the key out$"
    with pytest.raises(UserError, match=line) as raised:
        train(tmp_path / "run", f"faulty://{tmp_path}/copy", world, 1)
    assert raised.value.exit_code == exit_code


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "with another byte": _flip,
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-1]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_copy_is_passed_over_with_a_line_and_the_one_before_is_taken(
    tmp_path: Path, world: World, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    good, place = tmp_path / "good", tmp_path / "copy"
    address = f"file://{place}"
    train(tmp_path / "run", f"file://{good}", world, 3)
    names = sorted(path.name for path in (good / "checkpoints/step-00000003").iterdir())
    assert len(names) == 5
    for name in names:
        if (name, damage) == (SEAL, "missing"):
            continue  # it is not whole, and there is no line
        shutil.copytree(good, place)
        DAMAGES[damage](place / "checkpoints/step-00000003" / name)
        assert train(tmp_path / "other", address, world, 4) == 2
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
        assert f"checkpoint passed over: {address}/checkpoints/step-00000003/{name}" in line
        assert copied(place) == [3, 4]  # made anew
        State().load(checkpoint.verify(place / "checkpoints/step-00000003"))
        # Of which none is intact.
        for step in (3, 4):
            _flip(place / "checkpoints" / step_folder_name(step) / "state.json")
        shutil.rmtree(tmp_path / "other")
        with pytest.raises(UserError, match=f"{address}: none of its 2 checkpoints is intact"):
            train(tmp_path / "other", address, world, 4)
        capsys.readouterr()
        shutil.rmtree(place)
        shutil.rmtree(tmp_path / "other")


def test_a_damaged_checkpoint_on_the_disk_is_replaced_from_the_copy(
    tmp_path: Path, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    run, place = tmp_path / "run", tmp_path / "copy"
    train(run, f"file://{place}", world, 3)
    for step in (2, 3):
        _flip(run / "checkpoints" / step_folder_name(step) / "model-00000.safetensors")
    assert train(run, f"file://{place}", world, 4) == 3
    assert "step-00000003 -> old-step-00000003-1" in capsys.readouterr().out
    assert copied(place) == [3, 4]


def test_the_disk_wins_unless_the_copy_is_newer(tmp_path: Path, world: World) -> None:
    place = tmp_path / "copy"
    train(tmp_path / "1", f"file://{place}", world, 2)
    shutil.copytree(tmp_path / "1", tmp_path / "2")
    for path in place.rglob("*.safetensors"):
        path.unlink()  # equal: nothing of it is read
    assert train(tmp_path / "1", f"file://{place}", world, 4) == 2
    assert train(tmp_path / "2", f"file://{place}", world, 5) == 4
    assert metrics(tmp_path / "2") == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("how", ["planned", "while fetching"])
def test_a_full_disk_ends_the_run_before_it_begins_and_leaves_no_part(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    place = tmp_path / "copy"
    train(tmp_path / "run", f"file://{place}", world, 2)

    def fault(call: str, path: str) -> None:
        if call == "get" and "model" in path:
            raise OSError(errno.ENOSPC, "No space left on device")

    if how == "planned":
        monkeypatch.setattr(run_copy, "free_bytes", lambda folder: 10_000)
        line = r"^output_dir: .*step-00000002 needs 151.4 kB, 10.0 kB are free; make room there"
    else:
        monkeypatch.setattr(Faulty, "fault", staticmethod(fault))
        file = f"{tmp_path}/other/.*/model-00000.safetensors"
        line = f"^output_dir: {file}: No space left on device; make room there"
    with pytest.raises(UserError, match=line):
        train(tmp_path / "other", f"faulty://{place}", world, 2)
    assert not [*(tmp_path / "other/checkpoints").iterdir()]


def test_an_address_has_one_run(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place, address = tmp_path / "copy", f"file://{tmp_path}/copy"
    train(tmp_path / "run", address, world, 3, keep_last=3)
    train(tmp_path / "other", f"file://{tmp_path}/other-copy", world, 2)
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
    refused = f"checkpoint.copy_to: {address}: has another run, until step 3; choose another"
    with pytest.raises(UserError, match=f"{refused}, or continue that one with resume=auto$"):
        train(tmp_path / "new", address, world, 1, resume="none")
    with pytest.raises(UserError, match=f"{refused}$"):
        train(tmp_path / "other", address, world, 5)
    with pytest.raises(UserError, match=f"{refused}$"):
        train(tmp_path / "new", address, world, 5, resume=str(tmp_path / "run/checkpoints/step-00000002"))
    with pytest.raises(UserError, match="is output_dir itself"):
        train(tmp_path / "other", f"file://{tmp_path}/other", world, 5)
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*")} == before
    # The run itself may go back. What it had done since is no past of what it does now.
    step = "run/checkpoints/step-00000001"
    monkeypatch.setitem(FACTS, "started_on", "2026-01-02")
    assert train(tmp_path / "run", address, world, 2, resume=str(tmp_path / step), keep_last=3) == 1
    said = capsys.readouterr().out
    for step in ("step-00000002", "step-00000003"):
        assert f"set aside: {address}/checkpoints/{step}/{SEAL} -> old-{SEAL}" in said
    assert copied(place) == [1, 2]
    assert (place / "checkpoints/step-00000003/model-00000.safetensors").exists()
    # What was set aside on the disk is another past of the same step.
    state, old = "step-00000002/state.json", tmp_path / "run/checkpoints/old-step-00000002-1"
    assert "2026-01-02" in (place / "checkpoints" / state).read_text()
    assert train(tmp_path / "run", address, world, 3, resume=str(old), keep_last=3) == 2
    assert "2026-01-01" in (place / "checkpoints" / state).read_text()
    assert copied(place) == [1, 2, 3]
    State().load(checkpoint.verify(place / "checkpoints/step-00000002"))


def test_of_two_runs_that_begin_at_an_empty_address_the_second_copies_nothing(
    tmp_path: Path, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    place, address = tmp_path / "copy", f"file://{tmp_path}/copy"

    def another(step: int) -> None:
        if step == 1:
            train(tmp_path / "first", address, world, 3)

    train(tmp_path / "second", address, world, 2, before_step=another)
    assert copied(place) == [2, 3]
    assert metrics(place) == [1, 2, 3]
    refused = f"is not copied: {address}: has another run; choose another address; tried again"
    assert [refused in line for line in capsys.readouterr().out.splitlines() if "warning" in line] == [
        True
    ] * 2


def test_an_export_is_replaced_and_has_its_digests_when_it_is_whole(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fault(call: str, path: str) -> None:
        if call == "put" and path.endswith("model-00002-of-00002.safetensors"):
            raise OSError(errno.ENOSPC, "No space left on device")

    place = tmp_path / "copy/export"
    cfg = FinetuneConfig(
        model=ModelConfig(path="none"), data=DataConfig(source="builtin"), output_dir=str(tmp_path / "run")
    )
    with open_run_folder(cfg, world) as run:
        copy = RunCopy(f"faulty://{tmp_path}/copy", run, cfg, world)
        for weights in (["model.safetensors"], [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]):
            names = {"SHA256SUMS", "additional_chat_templates/tool.jinja", *weights}
            shutil.rmtree(run.export, ignore_errors=True)
            (run.export / "additional_chat_templates").mkdir(parents=True)
            for name in names:
                (run.export / name).write_text(name)
            if len(weights) == 2:
                monkeypatch.setattr(Faulty, "fault", staticmethod(fault))
                copy.send_export()
                assert "warning: the export is not copied: faulty:///" in capsys.readouterr().out
                assert not (place / "SHA256SUMS").exists()
                monkeypatch.setattr(Faulty, "fault", staticmethod(faulty_storage.none))
            copy.send_export()
            assert {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()} == names


def _job(rank: int, num_ranks: int, folder: str, address: str, steps: int, failing: str) -> tuple[int, str]:
    def fault(call: str, path: str) -> None:
        if call == "put" and rank == 1 and failing and failing in path:
            raise TimeoutError("no answer")

    Faulty.fault = staticmethod(fault)
    said = list[str]()
    with distributed.session("cpu") as world, pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "print", lambda self, text: said.append(text))
        return train(Path(folder), address, world, steps), "\n".join(said)


def test_ranks_copy_their_files_and_the_seal_waits_for_all(tmp_path: Path, ranks: Ranks) -> None:
    place, address = tmp_path / "copy", f"faulty://{tmp_path}/copy"
    found = ranks.run(_job, 2, str(tmp_path / "1"), address, 3, "step-00000002/model-00001")
    for _, said in found:
        assert f"{address}/checkpoints/step-00000002/model-00001.safetensors: no answer" in said
    assert copied(place) == [1, 3]
    names = {path.name for path in (place / "checkpoints/step-00000003").iterdir()}
    assert {"model-00000.safetensors", "model-00001.safetensors", "state.json", SEAL} <= names
    # On other disks, with one rank and with two.
    shutil.copytree(place, tmp_path / "copy-2")
    assert [first for first, _ in ranks.run(_job, 2, str(tmp_path / "2"), address, 4, "")] == [3, 3]
    assert ranks.run(_job, 1, str(tmp_path / "3"), f"{address}-2", 4, "")[0][0] == 3


def _launch(arguments: list[str], ranks: int, folder: Path, extra: dict[str, str]) -> Finished:
    return warm.lptune(["run", *arguments], folder=folder, environment=extra, ranks=ranks, timeout_s=120)


def test_a_run_that_is_killed_while_it_copies_goes_on_in_an_empty_folder_bitwise(tmp_path: Path) -> None:
    inputs = prepare(tmp_path, _launch)
    text = inputs.recipe.read_text(encoding="utf-8")
    faulty = "from tests.helpers import faulty_storage\n"
    inputs.recipe.write_text(text.replace("from tests.faults import", f"{faulty}from tests.faults import"))
    expected = uninterrupted(inputs, "whole", 1)
    place, folder = tmp_path / "copy", tmp_path / "run"
    overrides = [f"output_dir={folder}", f"checkpoint.copy_to=faulty://{place}"]
    kills = {
        "SIGKILL:put:step-00000006/optimizer": [3],
        "SIGKILL:mv:step-00000009/manifest": [3, 6],
        # While it is fetched: a file of the checkpoint, one beside it.
        "SIGKILL:get:step-00000006/optimizer": [3, 6],
        "SIGKILL:get:copy/run.json": [3, 6],
    }
    for plan, steps in kills.items():
        arguments = [str(inputs.recipe), "--config", str(inputs.config), *overrides]
        done = _launch(arguments, 1, tmp_path, {faulty_storage.PLAN: plan})
        assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
        assert copied(place) == steps
        if "get" not in plan:
            shutil.rmtree(folder)
    assert run_part(inputs, folder, 1, *overrides) is None
    assert copied(place) == [3, 6, 9, 12]
    last = "checkpoints/step-00000012"
    assert digests(stored_tensors(folder / last)) == digests(stored_tensors(expected / last))
    assert _values(folder) == _values(expected)


def _values(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what a clock decides."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    kept = {"step", "loss", "eval_loss", "lr", "grad_norm", "num_target_tokens"}
    return [{key: value for key, value in json.loads(line).items() if key in kept} for line in lines]


def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "adlfs", None)
    with pytest.raises(UserError, match=r"^abfs://bucket/run: needs adlfs; run: .* install .*adlfs$"):
        Storage("abfs://bucket/run")


@pytest.mark.filterwarnings("default")  # of these packages, which are not ours to mend
def test_an_s3_server_holds_a_run_that_goes_on_elsewhere(
    tmp_path: Path,
    world: World,
    s3_server: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import s3fs

    storage, address = s3fs.S3FileSystem(), "s3://bucket/runs/1"
    train(tmp_path / "1", address, world, 3)
    assert train(tmp_path / "2", address, world, 5) == 3
    assert metrics(tmp_path / "2") == [1, 2, 3, 4, 5]
    storage.invalidate_cache()
    there = {Path(path).name for path in storage.ls("bucket/runs/1/checkpoints")}
    assert there == {"step-00000004", "step-00000005"}
    newest = "bucket/runs/1/checkpoints/step-00000005/model-00000.safetensors"
    storage.rm(newest)
    capsys.readouterr()
    with pytest.raises(UserError, match=f"^{address}: 1 of 2 are bad"):
        verify.main([address], standalone_mode=False)
    said = capsys.readouterr().out
    assert f"ok: {address}/checkpoints/step-00000004: step 4, " in said
    assert f"bad: s3://{newest}: is missing" in said
    assert train(tmp_path / "3", address, world, 5) == 4
    assert f"passed over: s3://{newest}: is missing" in capsys.readouterr().out

    def expire(step: int) -> None:
        if step == 7:
            accept_keys(s3_server, 0)

    assert train(tmp_path / "4", address, world, 7, before_step=expire) == 5
    unknown = "The AWS Access Key Id you provided does not exist in our records"
    lines = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert len(lines) == 1
    refused = f"{address}/run.json: {unknown}"
    assert lines[0].startswith(f"warning: step-00000007 is not copied: {refused}; tried again")
    refused = f"{address}/checkpoints: {unknown}"
    with pytest.raises(UserError, match=f"^checkpoint.copy_to: {refused}; mend it"):
        train(tmp_path / "5", address, world, 6)
    accept_keys(s3_server, 10**9)
    with pytest.raises(
        UserError, match=r"^checkpoint.copy_to: s3://none/1.*: The specified bucket does not exist"
    ):
        train(tmp_path / "6", "s3://none/1", world, 1)
    assert train(tmp_path / "5", address, world, 6) == 6
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nobody listens there
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(UnavailableError, match=r"^checkpoint.copy_to: s3://bucket/.*; wait for it"):
        train(tmp_path / "7", address, world, 6)
