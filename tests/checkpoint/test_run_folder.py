"""A run's folder: one run at a time, whatever others put there, and however it goes away."""

import errno
import fcntl
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from torch import nn

from lptune import checkpoint, distributed, training
from lptune.base.errors import UserError
from lptune.base.files import MEBI, write_text
from lptune.checkpoint import save
from lptune.checkpoint.files import publish_folder
from lptune.checkpoint.manifest import Manifest
from lptune.checkpoint.run_folder import RunFolder, open_run_folder, write_launch, write_samples
from lptune.config import (
    RUN_FILES,
    RUN_FOLDERS,
    CheckpointConfig,
    DataConfig,
    ExportConfig,
    FinetuneConfig,
    LoggingConfig,
    ModelConfig,
)
from lptune.distributed import World
from lptune.launch import log
from lptune.linear import Plan
from tests.helpers.ranks import Ranks

MAKE = {
    "a link": lambda path, victim: path.symlink_to(victim),
    "a pipe": lambda path, victim: os.mkfifo(path),
    "a folder": lambda path, victim: path.mkdir(),
    "a file": lambda path, victim: path.write_text("kept"),
}


def _config(folder: Path, **keys: Any) -> FinetuneConfig:
    return FinetuneConfig(
        model=ModelConfig(path="none"), data=DataConfig(source="builtin"), output_dir=str(folder), **keys
    )


def _refuse(line: str) -> None:
    raise AssertionError(line)


def _tree(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text() if path.is_file() else ""
        for path in folder.rglob("*")
        if path.name != ".lock"
    }


@pytest.fixture
def world() -> Any:
    with distributed.session("cpu") as world:
        yield world


@pytest.mark.parametrize("is_there", [False, True])
def test_a_run_that_another_overtook_on_its_way_to_a_new_folder_touches_nothing(
    tmp_path: Path, world: World, is_there: bool
) -> None:
    folder = tmp_path / "run"
    if is_there:
        folder.mkdir()
    cfg = _config(folder)
    with open_run_folder(cfg, world) as slow:
        with open_run_folder(cfg, world) as fast:
            fast.create(None, _refuse)
            fast.write_config(cfg)
            write_text(fast.metrics, '{"step": 1}\n')
            for path in (fast.checkpoints / "step-00000001", fast.export):
                path.mkdir()
        before = _tree(folder)
        with pytest.raises(UserError, match=r"another run has written to .*run since this one started"):
            slow.create(None, _refuse)
        assert _tree(folder) == before
    with open_run_folder(_config(tmp_path / "alone"), world) as run:
        run.create(None, _refuse)


@pytest.mark.parametrize("found", MAKE)
@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "export.json", "checkpoints", "export", "logs"])
def test_what_is_neither_file_nor_folder_as_a_run_has_it_is_refused_before_anything_is_written(
    tmp_path: Path, world: World, name: str, found: str
) -> None:
    folder, victim = tmp_path / "run", tmp_path / "victim"
    folder.mkdir()
    (victim / "step-00000001").mkdir(parents=True)
    MAKE[found](folder / name, victim if name in RUN_FOLDERS else victim / "file")
    if found == ("a file" if name in RUN_FILES else "a folder"):
        return
    with (
        pytest.raises(UserError, match=f"output_dir: .*/{name} is {found}, where a run has"),
        open_run_folder(_config(folder), world),
    ):
        pass
    assert [path.name for path in folder.iterdir()] == [name]
    assert [path.name for path in victim.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("found", ["a link", "a pipe"])
def test_a_log_is_written_to_a_regular_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    victim, temporary = tmp_path / "victim", tmp_path / "temporary"
    victim.write_text("kept")
    temporary.mkdir()
    (temporary / "rank-1.log").write_text("header\nsaid\n")
    monkeypatch.setenv(log.LOGS, str(temporary))
    monkeypatch.setenv("RANK", "1")
    (tmp_path / "logs").mkdir()
    MAKE[found](tmp_path / "logs" / "rank-1.log", victim)
    log.keep_log(tmp_path / "logs")
    assert log.move_logs(temporary, tmp_path / "logs") == temporary
    (tmp_path / "linked").symlink_to(tmp_path / "logs")
    assert log.move_logs(temporary, tmp_path / "linked") == temporary
    assert victim.read_text() == "kept"
    assert log.move_logs(temporary, tmp_path / "other") == tmp_path / "other"
    assert (tmp_path / "other" / "rank-1.log").read_text() == "header\nsaid\n"


def test_a_new_run_sets_aside_what_another_tool_left_and_an_export(tmp_path: Path, world: World) -> None:
    (tmp_path / "export").mkdir()
    for name in ("config.yaml", "metrics.jsonl", "export/mine", "notes.txt"):
        (tmp_path / name).write_text("mine")
    said: list[str] = []
    for number in (1, 2):
        with open_run_folder(_config(tmp_path), world) as run:
            run.create(None, said.append)
        assert [line.rpartition(" ")[2] for line in said] == [
            "old-export-1", "old-config.yaml-1", "old-metrics.jsonl-1"
        ]  # fmt: skip
        assert (tmp_path / "old-export-1" / "mine").read_text() == "mine", number
        assert (tmp_path / "old-config.yaml-1").read_text() == "mine"
        assert (tmp_path / "notes.txt").read_text() == "mine"


RESULTS = ("config.yaml", "export.json", "metrics.jsonl", "precision_plan.json")


def _saved(folder: Path) -> Manifest:
    folder.mkdir(parents=True, exist_ok=True)
    return Manifest(folder, int(folder.name.rpartition("-")[2]), 1, {}, {})


def _start(folder: Path, world: World, resumed: Manifest | None = None) -> list[str]:
    """What a start says that comes as far as its config, under which it writes `new` everywhere."""
    said: list[str] = []
    with open_run_folder(_config(folder), world) as run:
        run.create(resumed, said.append)
        for name in RESULTS:
            write_text(folder / name, "new")
    return sorted(line.rpartition(" ")[2] for line in said)


def test_a_start_that_failed_leaves_a_foreign_folder_as_it_was_and_the_next_renames(
    tmp_path: Path, world: World
) -> None:
    for name in RESULTS[::2]:
        (tmp_path / name).write_text("mine")
    with pytest.raises(UserError, match="bad input"), open_run_folder(_config(tmp_path), world):
        raise UserError("bad input")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(RESULTS[::2])
    assert _start(tmp_path, world) == ["old-config.yaml-1", "old-metrics.jsonl-1"]
    assert (tmp_path / "old-metrics.jsonl-1").read_text() == "mine"
    assert (tmp_path / "old-config.yaml-1").read_text() == "mine"


def test_a_run_that_continues_another_folders_checkpoint_renames_what_it_finds(
    tmp_path: Path, world: World
) -> None:
    saved, folder = _saved(tmp_path / "a/checkpoints/step-00000100"), tmp_path / "notes"
    _saved(folder / "checkpoints/step-00000050")
    for name in RESULTS:
        (folder / name).write_text("mine")
    old = sorted([*(f"old-{name}-1" for name in RESULTS), "old-step-00000050-1"])
    assert _start(folder, world, saved) == old
    assert all((folder / f"old-{name}-1").read_text() == "mine" for name in RESULTS)
    assert saved.folder.is_dir()


@pytest.mark.parametrize("link", ["none", "of the checkpoint", "to the checkpoint", "to the run"])
def test_a_run_that_continues_its_own_checkpoint_goes_on_in_its_files(
    tmp_path: Path, world: World, link: str
) -> None:
    folder = tmp_path / "run"
    path = folder / "checkpoints/step-00000002"
    saved = _saved(path)
    if link == "of the checkpoint":
        path.rename(tmp_path / "step-00000002")
        path.symlink_to(tmp_path / "step-00000002")
    elif link == "to the checkpoint":
        (tmp_path / "step-00000002").symlink_to(path)
        saved = _saved(tmp_path / "step-00000002")
    elif link == "to the run":
        (tmp_path / "alias").symlink_to(folder)
        saved = _saved(tmp_path / "alias/checkpoints/step-00000002")
    (folder / "metrics.jsonl").write_text('{"step": 2}\n{"step": 3}\n')
    (folder / "config.yaml").write_text("mine")
    with open_run_folder(_config(folder), world) as run:
        run.create(saved, _refuse)
        assert run.metrics.read_text() == '{"step": 2}\n'
    assert path.is_dir()


def test_where_nothing_can_be_locked_a_note_says_so_and_the_run_goes_on(
    tmp_path: Path,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def flock(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with open_run_folder(_config(tmp_path / "run"), world) as run:
        run.create(None, _refuse)
    said = capsys.readouterr().out
    assert said.count("do not start a second run in that folder") == 1
    assert os.strerror(errno.ENOLCK) in said


def test_a_start_that_cannot_lock_is_one_line(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".lock").touch()
    codes = [errno.EAGAIN, errno.EIO]

    def flock(descriptor: int, how: int) -> None:
        raise OSError(code := codes.pop(), os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    for line in (r"\.lock: Input/output error", "another run is writing"):
        with pytest.raises(UserError, match=line), open_run_folder(_config(tmp_path), world):
            pass


@pytest.mark.parametrize("name", [None, 7, b"/tmp/kernel.so"])
def test_an_error_of_a_disk_elsewhere_is_not_blamed_on_the_runs_folder(
    tmp_path: Path, world: World, name: Any
) -> None:
    with pytest.raises(OSError, match="No space left") as caught, open_run_folder(_config(tmp_path), world):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
    assert caught.value.filename == name
    for inside in (str(tmp_path / "a"), tmp_path / "a", os.fsencode(tmp_path / "a")):
        line = re.escape(f"output_dir: {tmp_path}: {tmp_path / 'a'}: No space left on device; make room")
        with pytest.raises(UserError, match=line), open_run_folder(_config(tmp_path), world):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), inside)


def test_a_lack_of_descriptors_is_no_lack_of_room(tmp_path: Path, world: World) -> None:
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(tmp_path / "a"))
    line = re.escape(
        f"{tmp_path / 'a'}: Too many open files; raise the limit of open files (`ulimit -n`), and run"
    )
    with pytest.raises(UserError, match=line), open_run_folder(_config(tmp_path), world):
        raise error


def test_metrics_that_find_no_room_name_their_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = training.MetricsWriter(path, LoggingConfig(), enabled=True, first_step=0, num_steps=1)
    assert metrics._file is not None
    with open("/dev/full", "w") as full:
        os.dup2(full.fileno(), metrics._file.fileno())
    for call in (lambda: metrics.write({"step": 1}), lambda: metrics.__exit__(None, None, None)):
        with pytest.raises(OSError, match="No space left") as caught:
            call()
        assert caught.value.filename == str(path)


def test_metrics_of_later_steps_and_a_torn_last_line_are_dropped(tmp_path: Path, world: World) -> None:
    run = checkpoint.RunFolder(tmp_path, world)
    kept = '{"step": 1, "loss": null}\n{"step": 2}\n'
    run.metrics.write_text(kept + '{"step": 3}\ntorn {"ste')
    run.keep_metrics_until(2, _refuse)
    assert run.metrics.read_text() == kept
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    "odd",
    [b'{"step": "1"}', b'{"step": true}', b"[1]", b"torn {", b"\xff\xfe", 100_000 * b"["],
    ids=lambda odd: odd[:12],
)
def test_metrics_with_lines_that_no_run_writes_are_set_aside_with_a_line(
    tmp_path: Path, world: World, odd: bytes
) -> None:
    run = checkpoint.RunFolder(tmp_path, world)
    kept = b'{"step": 1, "loss": null}\n{"step": 2}\n'
    before = odd + b"\n" + kept + b'{"step": 3}\n' + odd + b"\ntorn {"
    run.metrics.write_bytes(before)
    said: list[str] = []
    run.keep_metrics_until(2, said.append)
    assert run.metrics.read_bytes() == kept
    assert (tmp_path / "old-metrics.jsonl-1").read_bytes() == before
    assert said == [
        f"set aside: {run.metrics} -> old-metrics.jsonl-1: 2 of its lines are no metrics of a run"
    ]


def test_metrics_with_a_line_without_an_end_are_set_aside_unread(tmp_path: Path, world: World) -> None:
    run = checkpoint.RunFolder(tmp_path, world)
    first = '{"step": 1, "loss": 2.0}\n'
    run.metrics.write_text(first + '{"step": 2, "eval_loss": 1.0' + 2 * MEBI * "0" + "}\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl: a line of it is longer than 1,048,576 bytes"):
        run.has_evaluation(2)
    said: list[str] = []
    run.keep_metrics_until(9, said.append)
    assert len(said) == 1
    assert said[0].endswith("old-metrics.jsonl-1: a line of it is longer than 1,048,576 bytes")
    assert run.metrics.read_text() == first
    assert not run.has_evaluation(2)


def test_only_a_runs_own_leftovers_are_removed(tmp_path: Path, world: World) -> None:
    folder = tmp_path / "checkpoints"
    for name in (".tmp-step-00000001", ".tmp-removed-step-00000002", ".tmp-Llama", ".tmp-step-by-step"):
        (folder / name).mkdir(parents=True)
    (tmp_path / "theirs").mkdir()
    (folder / ".tmp-step-00000003").symlink_to(tmp_path / "theirs")
    with open_run_folder(_config(tmp_path), world) as run:
        run.create(None, _refuse)
    assert sorted(path.name for path in folder.iterdir()) == [".tmp-Llama", ".tmp-step-by-step"]
    assert (tmp_path / "theirs").is_dir()


@pytest.mark.parametrize("name", [".lock", *RUN_FOLDERS, "checkpoints/.tmp-step-00000001", "logs/rank-1.log"])
def test_leftovers_of_another_user_are_told_at_the_start(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    theirs = tmp_path / name
    if name in RUN_FILES or theirs.suffix == ".log":
        theirs.parent.mkdir(exist_ok=True)
        theirs.touch()
    else:
        theirs.mkdir(parents=True)
    # The tests may run as root, who may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != theirs)
    with (
        pytest.raises(UserError, match=rf"{name} may not be written to, it belongs to \w+; make it yours"),
        open_run_folder(_config(tmp_path), world),
    ):
        pass


@pytest.mark.parametrize("how", ["removed", "renamed", "replaced"])
def test_a_run_whose_folder_vanishes_ends_with_one_line_and_makes_no_other(
    tmp_path: Path, world: World, how: str
) -> None:
    folder, model, cfg = tmp_path / "mount" / "run", nn.Linear(2, 2), CheckpointConfig()
    line = "was removed, renamed or unmounted while the run was writing there; put it back and run again"
    with open_run_folder(_config(folder), world) as run:
        run.create(None, _refuse)
        optimizer = training.AdamW(model.parameters())
        with (
            checkpoint.CheckpointWriter(run.checkpoints, model, optimizer, world, cfg) as writer,
            training.MetricsWriter(
                run.metrics, LoggingConfig(), enabled=True, first_step=0, num_steps=2
            ) as metrics,
        ):
            metrics.write({"step": 1})
            writer.save(1, {}, wait=True)
            (tmp_path / "mount").rename(tmp_path / "away")
            if how == "replaced":
                run.checkpoints.mkdir(parents=True)
            elif how == "removed":
                (tmp_path / "away/run/checkpoints/step-00000001").rename(tmp_path / "gone")
            with pytest.raises(UserError, match=line):
                metrics.write({"step": 2})
            with pytest.raises(UserError, match=line):
                writer.save(2, {}, wait=True)
            with pytest.raises(UserError, match=line):
                run.on_main(lambda: run.write_config(_config(folder)))
    assert not any(path.is_file() for path in (tmp_path / "mount").rglob("*"))


# ---- run.json and samples.jsonl


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def test_a_run_keeps_its_id_and_lists_its_launches(tmp_path: Path, world: World) -> None:
    path = tmp_path / "run.json"
    write_launch(path, "abc", 0, 10, world)
    write_launch(path, "abc", 4, 20, world)
    found = _read(path)
    assert [(launch["step"], launch["num_steps"]) for launch in found["launches"]] == [(0, 10), (4, 20)]
    assert found["data_digest"] == "abc"
    assert len(found["id"]) == 8
    first = found["id"]
    write_launch(path, "abc", 8, 20, world)
    assert _read(path)["id"] == first
    write_launch(tmp_path / "other.json", "abc", 0, 10, world)
    assert _read(tmp_path / "other.json")["id"] != first


@pytest.mark.parametrize("text", ["", "{", "[]", '{"id": 3, "launches": {}}', "[" * 100_000])
def test_a_broken_file_is_written_anew(tmp_path: Path, world: World, text: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text, encoding="utf-8")
    write_launch(path, "abc", 0, 10, world)
    found = _read(path)
    assert len(found["launches"]) == 1
    assert isinstance(found["id"], str)


def test_samples_of_another_time_stay(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"

    def sample(when: str, answer: str) -> dict[str, object]:
        return {"step": 0, "when": when, "answer": answer}

    write_samples(path, [sample("before training", "a"), sample("before training", "b")])
    with path.open("a", encoding="utf-8") as file:
        file.write("no JSON\n[1]\n")
    write_samples(path, [sample("after training", "c")])
    write_samples(path, [sample("after training", "d\u2028e")])
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [(row["when"], row["answer"]) for row in rows] == [
        ("before training", "a"),
        ("before training", "b"),
        ("after training", "d\u2028e"),
    ]


# ---- several ranks: what the main rank finds, all of them end with


def _is_exported(rank: int, num_ranks: int, folder: str) -> bool:
    """Each rank has a view of its own of the folder."""
    with distributed.session("cpu") as world:
        return RunFolder(Path(folder, f"seen-by-{rank}"), world).is_exported(4, ExportConfig())


@pytest.mark.parametrize("rank", [0, 1])
def test_whether_a_run_is_exported_is_what_the_main_rank_sees(
    tmp_path: Path, ranks: Ranks, world: World, rank: int
) -> None:
    run = RunFolder(tmp_path / f"seen-by-{rank}", world)
    run.export.mkdir(parents=True)
    run.write_exported(4, ExportConfig())
    assert ranks.run(_is_exported, 2, str(tmp_path)) == [rank == 0, rank == 0]


def _begin(run: checkpoint.Run) -> None:
    run.begin(Plan("none"), [])


def _moved_away(run: checkpoint.Run) -> None:
    if run.world.is_main:
        run.path.rename(run.path.with_name("away"))


def _go(case: str, run: checkpoint.Run) -> None:
    """What fails on the main rank alone."""
    model = nn.Linear(2, 2)
    if case == "begin":
        _moved_away(run)
        _begin(run)
    _begin(run)
    if case == "writer":
        _moved_away(run)
        state = SimpleNamespace(model=model, optimizer=training.AdamW(model.parameters()))
        run.open_writer(state)  # type: ignore[arg-type]
    if case == "export":
        _moved_away(run)
        run._newest = Path("step-00000001")
        with mock.patch("lptune.checkpoint.run.export_hf"):
            run.export(SimpleNamespace(index=None))  # type: ignore[arg-type]
    if case == "metrics":
        if run.world.is_main:
            run.metrics.unlink()
            run.metrics.mkdir()
        run.folder.has_evaluation(1)
    if case == "retention":

        def publish(partial: Path, final: Path) -> None:
            publish_folder(partial, final)
            final.rename(final.with_name("taken"))

        optimizer = training.AdamW(model.parameters())
        with (
            mock.patch.object(save, "publish_folder", publish),
            checkpoint.CheckpointWriter(
                run.folder.checkpoints, model, optimizer, run.world, CheckpointConfig()
            ) as writer,
        ):
            writer.save(1, {}, wait=True)


def _fails(rank: int, num_ranks: int, folder: str, case: str) -> str:
    with distributed.session("cpu") as world:
        try:
            with checkpoint.open_run(_config(Path(folder, "run")), world) as run:
                _go(case, run)
        except UserError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("case", "line"),
    [
        ("open", "run is a file; choose another folder"),
        ("begin", "run was removed, renamed or unmounted"),
        ("writer", "run was removed, renamed or unmounted"),
        ("export", "run was removed, renamed or unmounted"),
        ("metrics", "metrics.jsonl: is a folder, where a regular file is needed"),
        ("retention", "step-00000001: is gone, it was removed or renamed while the run was writing"),
    ],
)
def test_what_fails_on_the_main_rank_ends_all_ranks_with_the_same_line(
    tmp_path: Path, ranks: Ranks, case: str, line: str
) -> None:
    if case == "open":
        (tmp_path / "run").touch()
    else:
        (tmp_path / "run").mkdir()
    first, second = ranks.run(_fails, 2, str(tmp_path), case, timeout_s=120.0)
    assert line in first
    assert second == first
