"""Saving in the background: what is saved is the step's state, and no failure is lost."""

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lptune import checkpoint, distributed, training
from lptune.base.errors import UserError
from lptune.base.step_folders import list_checkpoints
from lptune.checkpoint import save as saving
from lptune.checkpoint.retention import steps_to_keep
from lptune.config import CheckpointConfig
from lptune.distributed import World
from tests.helpers.ranks import run_ranks

Values = dict[str, Tensor]


class Run:
    """A tiny model, its optimizer, and a writer of its checkpoints."""

    def __init__(self, folder: Path, world: World, **keys: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3)).to(world.device)
        if world.size > 1:
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.model, mesh=world.mesh)
        self.optimizer = training.AdamW(self.model.parameters(), fused=True)
        self.folder = folder
        cfg = CheckpointConfig(**({"keep_last": 9} | keys))
        self.writer = checkpoint.CheckpointWriter(folder, self.model, self.optimizer, world, cfg)

    def train(self) -> None:
        device = next(self.model.parameters()).device
        self.model(torch.ones(4, 8, device=device)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> Values:
        values = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        for moment in ("exp_avg", "exp_avg_sq"):
            for name, parameter in self.model.named_parameters():
                values[f"{moment}/{name}"] = self.optimizer.state[parameter][moment].clone()
        return values

    def save(self, step: int, **keys: Any) -> None:
        self.writer.save(step, {"fingerprint": {}}, **keys)

    def saved(self, step: int) -> Values:
        """What the checkpoint of `step` loads as."""
        manifest = checkpoint.verify(self.folder / f"step-{step:08d}")
        checkpoint.load_state(manifest, self.model, self.optimizer)
        return self.values()


@pytest.fixture
def world() -> Iterator[World]:
    with distributed.session("cpu") as world:
        yield world


@pytest.fixture
def may_write(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Files are written once it is set."""
    event, save_tensors = threading.Event(), saving.save_tensors

    def slow(path: Path, tensors: Values) -> None:
        assert event.wait(60)
        save_tensors(path, tensors)

    monkeypatch.setattr(saving, "save_tensors", slow)
    return event


def _equal(a: Values, b: Values) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_training_goes_on_while_files_are_written_and_the_checkpoint_is_that_of_its_step(
    tmp_path: Path, world: World, may_write: threading.Event
) -> None:
    run = Run(tmp_path, world)
    run.train()
    expected = run.values()
    run.save(1)
    for _ in range(3):
        run.train()
        run.writer.check()
    assert not (tmp_path / "step-00000001").exists()
    assert not _equal(run.values(), expected)
    may_write.set()
    assert run.writer.wait() == tmp_path / "step-00000001"
    assert _equal(run.saved(1), expected)


def test_the_optimizer_waits_for_a_copy_that_is_not_done(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, world)
    run.train()
    expected = run.values()
    may_copy, copied, stepped = threading.Event(), saving._copied, threading.Event()

    def slow(*arguments: Any, **keys: Any) -> Tensor:
        assert may_copy.wait(60)
        return copied(*arguments, **keys)

    monkeypatch.setattr(saving, "_copied", slow)
    run.save(1)
    training = threading.Thread(target=lambda: (run.train(), stepped.set()))
    training.start()
    assert not stepped.wait(0.3)  # backward is done long since
    assert all(torch.equal(p, expected[name]) for name, p in run.model.named_parameters())
    may_copy.set()
    training.join()
    run.writer.wait()
    assert not _equal(run.values(), expected)
    assert _equal(run.saved(1), expected)


def _save_by_the_clock(rank: int, num_ranks: int, folder: str) -> None:
    """Eight steps of ten minutes by the main rank's clock, of 100 by the others', as the recipe does them."""
    now_s = 0.0
    with distributed.session("cpu") as world:
        run = Run(Path(folder), world)
        cfg = CheckpointConfig(every_minutes=30, keep_last=9)
        with checkpoint.CheckpointWriter(
            run.folder, run.model, run.optimizer, world, cfg, clock=lambda: now_s
        ) as writer:
            for step in range(1, 9):
                run.train()
                now_s += 600 if world.is_main else 6000
                stopped, is_save_due = world.at_boundary(writer.is_overdue())
                assert stopped is None
                if is_save_due:  # a collective: ranks that did not agree would hang
                    writer.save(step, {"fingerprint": {}}, wait=True)
        assert [path.name for path in list_checkpoints(run.folder)] == [
            "step-00000006",
            "step-00000003",
        ]


def test_every_minutes_saves_by_the_main_ranks_clock_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(2, _save_by_the_clock, str(tmp_path))


@pytest.mark.parametrize(
    ("keys", "is_overdue"),
    [
        ({}, True),
        ({"every_steps": 100}, True),
        ({"every_minutes": 61}, False),
        ({"every_minutes": 0}, False),
        ({"at_end": False}, False),  # a trial run that leaves no weights behind
        ({"at_end": False, "every_steps": 100}, True),
    ],
    ids=str,
)
def test_an_hour_without_a_save_is_overdue_unless_no_checkpoint_is_wanted(
    tmp_path: Path, world: World, keys: dict[str, Any], is_overdue: bool
) -> None:
    run, now_s = Run(tmp_path, world), 0.0
    cfg = CheckpointConfig(**keys)
    writer = checkpoint.CheckpointWriter(tmp_path, run.model, run.optimizer, world, cfg, clock=lambda: now_s)
    assert not writer.is_overdue()
    now_s = 3600.0
    assert writer.is_overdue() == is_overdue


def test_a_save_that_is_still_being_written_is_not_overdue_again(
    tmp_path: Path, world: World, may_write: threading.Event
) -> None:
    run, now_s = Run(tmp_path, world), 0.0
    run.train()
    cfg = CheckpointConfig(every_minutes=30)
    with checkpoint.CheckpointWriter(
        tmp_path, run.model, run.optimizer, world, cfg, clock=lambda: now_s
    ) as writer:
        writer.save(1, {"fingerprint": {}})
        now_s = 3600.0
        assert not writer.is_overdue()  # the next save would wait for it, and training with it
        may_write.set()
        writer.wait()
        assert writer.is_overdue()


def test_buffers_of_an_earlier_save_hold_nothing_of_it(tmp_path: Path, world: World) -> None:
    run = Run(tmp_path, world)
    expected = {}
    for step in (1, 2, 3):
        run.train()
        expected[step] = run.values()
        run.save(step)
    run.writer.wait()
    for step, values in expected.items():
        assert _equal(run.saved(step), values)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_that_goes_on_at_once_does_not_overtake_its_copy(tmp_path: Path) -> None:
    with distributed.session("cuda") as world:
        run = Run(tmp_path, world)
        expected = {}
        for step in range(1, 9):
            run.train()
            expected[step] = run.values()
            run.save(step)
        run.writer.wait()
        for step, values in expected.items():
            assert _equal(run.saved(step), values)


@pytest.mark.parametrize(
    ("background", "code", "todo"),
    [(True, errno.ENOSPC, "make room in"), (False, errno.EMFILE, "raise the limit of open files")],
)
def test_a_full_disk_is_one_line_and_the_last_checkpoint_stays(
    tmp_path: Path,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    background: bool,
    code: int,
    todo: str,
) -> None:
    run = Run(tmp_path, world, async_save=background, keep_last=1)
    run.train()
    run.save(1, wait=True)
    full = OSError(code, os.strerror(code))
    with monkeypatch.context() as patch:
        patch.setattr(saving, "save_tensors", lambda *_: (_ for _ in ()).throw(full))
        line = (
            rf"^checkpoint of step 2 could not be written: .*{os.strerror(code)}; step-00000001 is intact; "
            rf"{todo} .*, and run again$"
        )
        if background:
            run.save(2)
            assert run.writer._thread is not None
            run.writer._thread.join()
            run.train()
            with pytest.raises(UserError, match=line):
                run.writer.check()
            run.writer.check()  # once is enough
        else:
            with pytest.raises(UserError, match=line):
                run.save(2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    checkpoint.verify(tmp_path / "step-00000001")
    run.save(2, wait=True)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_free_space_is_looked_at_before_anything_is_written(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, world)
    run.train()
    num_bytes = sum(value.numel() * 4 for value in run.values().values())
    monkeypatch.setattr(saving, "free_bytes", lambda _: num_bytes - 1)
    monkeypatch.setattr(saving, "save_tensors", lambda *_: pytest.fail("it writes"))
    with pytest.raises(
        UserError, match=r"needs [1-9]\S* k?M?B, [1-9]\S* k?M?B are free; there is no earlier one"
    ):
        run.save(1, wait=True)
    assert not any(tmp_path.iterdir())


def test_an_error_that_is_ours_keeps_its_traceback(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, world)
    run.train()
    monkeypatch.setattr(saving, "save_tensors", lambda *_: {}["a bug"])
    run.save(1)
    with pytest.raises(KeyError, match="a bug"):
        run.writer.wait()


def test_large_states_are_written_in_parts(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "_SMALLEST_PART", 100)
    run = Run(tmp_path, world)
    run.train()
    expected = run.values()
    run.save(1, wait=True)
    names = sorted(path.name for path in (tmp_path / "step-00000001").glob("*.safetensors"))
    assert names == [
        "model-00000-000.safetensors",
        "model-00000-001.safetensors",
        *(f"optimizer-00000-{part:03d}.safetensors" for part in range(4)),
    ]
    assert _equal(run.saved(1), expected)


def _one_rank_fails(rank: int, num_ranks: int, folder: str) -> None:
    with distributed.session("cpu") as world:
        run = Run(Path(folder), world)
        run.train()
        run.save(1)
        run.writer.wait()
        save_tensors = saving.save_tensors
        if rank == 1:
            broken = OSError(errno.EIO, os.strerror(errno.EIO), "a disk")
            saving.save_tensors = lambda *_: (_ for _ in ()).throw(broken)  # type: ignore[assignment]
        run.save(2)
        with pytest.raises(UserError, match=r"^rank 1: checkpoint of step 2 .*a disk: Input/output error"):
            run.writer.wait()
        saving.save_tensors = save_tensors
        run.save(3, wait=True)
        manifest = checkpoint.find_checkpoint(Path(folder), "auto", world, print)
        assert manifest is not None
        assert manifest.step == 3
        world.barrier()
        if rank == 0:
            damaged = Path(folder, "step-00000003", "optimizer-00001.safetensors")
            damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
        world.barrier()
        warnings: list[str] = []
        manifest = checkpoint.find_checkpoint(Path(folder), "auto", world, warnings.append)
        assert manifest is not None
        assert manifest.step == 1
        assert len(warnings) == 1
        assert "step-00000003/optimizer-00001.safetensors: its content does not match" in warnings[0]


def test_an_error_of_one_rank_and_a_damage_that_one_rank_sees_are_known_to_all(tmp_path: Path) -> None:
    run_ranks(2, _one_rank_fails, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


_LOSSES = st.dictionaries(st.integers(1, 60), st.none() | st.floats(-10, 10), min_size=1)


@given(_LOSSES, st.integers(1, 4), st.integers(0, 5), st.integers(0, 3))
def test_the_newest_always_stays_and_every_key_keeps_what_it_says(
    losses: dict[int, float | None], keep_last: int, keep_every: int, keep_best: int
) -> None:
    cfg = CheckpointConfig(keep_last=keep_last, keep_every=keep_every, keep_best=keep_best)
    keep = steps_to_keep(losses, cfg)
    steps = sorted(losses)
    assert set(steps[-keep_last:]) <= keep <= set(steps)
    known = sorted(loss for loss in losses.values() if loss is not None)
    if keep_every:
        assert {step for step in steps if step % keep_every == 0} <= keep
    kept = sorted(loss for step in keep if (loss := losses[step]) is not None)
    assert kept[:keep_best] == known[:keep_best]
    others = [step for step in steps[:-keep_last] if not keep_every or step % keep_every]
    assert sum(step in keep for step in others) <= keep_best


def test_the_best_and_the_even_checkpoints_stay(tmp_path: Path, world: World) -> None:
    run = Run(tmp_path, world, keep_last=1, keep_every=4, keep_best=1)
    for step, eval_loss in enumerate((3.0, 1.0, 2.0, None, float("nan"), 1.5, None), start=1):
        run.train()
        run.save(step, eval_loss=eval_loss)
    run.writer.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{n:08d}" for n in (2, 4, 7)]


def test_an_evaluation_that_was_made_up_for_after_the_save_counts_for_the_best(
    tmp_path: Path, world: World
) -> None:
    metrics, folder = tmp_path / "metrics.jsonl", tmp_path / "checkpoints"
    run, cfg = Run(folder, world), CheckpointConfig(keep_last=1, keep_best=1)
    with checkpoint.CheckpointWriter(folder, run.model, run.optimizer, world, cfg, metrics=metrics) as writer:
        for step, eval_loss in ((1, 3.0), (2, None), (3, 2.0), (4, 2.5)):
            writer.save(step, {}, eval_loss=eval_loss, wait=True)
            if step == 2:
                lines = ['{"step": 1, "eval_loss": 9.0}', '{"step": 2, "eval_loss": 1.0}', "[", '"eval_loss"']
                metrics.write_text("\n".join([*lines, '{"step": 2, "eval_lo']))
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000002", "step-00000004"]


def test_a_damaged_checkpoint_is_not_the_best_one_by_its_line_in_the_metrics(
    tmp_path: Path, world: World
) -> None:
    metrics, folder = tmp_path / "metrics.jsonl", tmp_path / "checkpoints"
    run, cfg = Run(folder, world), CheckpointConfig(keep_last=2, keep_best=1)
    with checkpoint.CheckpointWriter(folder, run.model, run.optimizer, world, cfg, metrics=metrics) as writer:
        for step, eval_loss in ((1, 2.0), (2, 1.0), (3, 3.0), (4, 3.0)):
            if step == 3:
                metrics.write_text('{"step": 1, "eval_loss": 2.0}\n{"step": 2, "eval_loss": 1.0}\n')
                state = folder / "step-00000002" / "state.json"
                state.write_bytes(state.read_bytes()[:-3] + b"???")
            writer.save(step, {}, eval_loss=eval_loss, wait=True)
    assert sorted(path.name for path in folder.iterdir()) == [f"step-{n:08d}" for n in (1, 3, 4)]


def test_of_a_checkpoint_that_goes_the_files_of_others_stay(
    tmp_path: Path, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoints").mkdir()
    run = Run(tmp_path / "checkpoints", world, keep_last=1)
    run.train()
    run.save(1, wait=True)
    old = run.folder / "step-00000001"
    (old / "notes.txt").write_text("mine")
    (old / "plots").mkdir()
    (old / "plots" / "loss.json").write_text("{}")
    run.save(2, wait=True)
    assert sorted(path.name for path in run.folder.iterdir()) == ["old-step-00000001-1", "step-00000002"]
    aside = run.folder / "old-step-00000001-1"
    kept = {path.relative_to(aside).as_posix() for path in aside.rglob("*")}
    assert kept == {"notes.txt", "plots", "plots/loss.json"}
    assert "-> old-step-00000001-1: notes.txt, plots is not of a checkpoint" in capsys.readouterr().out
