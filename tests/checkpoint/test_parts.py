"""Machines with a disk each: the run is whole at `checkpoint.copy_to`, and goes on there with any of them."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from lptune import checkpoint, distributed
from lptune.base.errors import UserError
from lptune.base.step_folders import list_checkpoints
from lptune.checkpoint import parts, run_folder
from lptune.checkpoint.run_copy import RunCopy
from lptune.checkpoint.run_folder import RunFolder
from lptune.checkpoint.sums import verify_sums
from lptune.cli import catalog
from lptune.cli.recipe import load_main
from lptune.cli.verify import verify
from lptune.config import DataConfig, FinetuneConfig, ModelConfig, load_config
from lptune.distributed import World
from lptune.launch.rendezvous import done
from tests.checkpoint.test_run_copy import copied, metrics, train
from tests.faults.state import State
from tests.helpers import faulty_storage
from tests.helpers.faulty_storage import Faulty
from tests.helpers.ranks import Ranks
from tests.helpers.tiny_recipe import make_checkpoint, write_config, write_rows

SEAL = "manifest.json"


def _job(
    rank: int,
    num_ranks: int,
    folders: list[str],
    address: str,
    steps: int,
    failing: str = "",
    full_at: str = "",
) -> tuple[object, list[str], str]:
    """Ranks of as many machines, each with its folder. Returns the first step, or the error; the files of
    checkpoints that were fetched; and what was printed.
    """
    os.environ |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    fetched, said = list[str](), list[str]()

    def fault(call: str, path: str) -> None:
        if call == "get" and "checkpoints" in path:
            fetched.append("/".join(Path(path).parts[-2:]).removeprefix("step-0000000"))
        if call == "put" and failing and path.endswith(failing):
            raise TimeoutError("no answer")

    Faulty.fault = staticmethod(fault)
    try:
        os.makedirs(folders[rank], exist_ok=True)
        with (
            chdir(folders[rank]),
            distributed.session("cpu") as world,
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setattr(World, "print", lambda self, text: said.append(text))
            patch.setattr(run_folder, "_PATIENCE_S", 0.0)
            if rank == 1 and full_at:
                patch.setattr(parts, "publish", _full_at(full_at))
            try:
                first: object = train(Path("run"), address, world, steps)
            except UserError as error:
                first = str(error)
    finally:
        Faulty.fault = staticmethod(faulty_storage.none)
    return first, sorted(fetched), "\n".join(said)


def _full_at(name: str) -> Callable[[Path, Path], None]:
    def publish(written: Path, final: Path, as_it_is: Callable[[Path, Path], None] = parts.publish) -> None:
        if final.name == name:
            raise OSError(errno.ENOSPC, "No space left on device")
        as_it_is(written, final)

    return publish


class Machines:
    """Disks of machines, and an address that all reach."""

    def __init__(self, place: Path, ranks: Ranks) -> None:
        self.place, self.copy, self._ranks = place, place / "copy", ranks
        self.fetched = list[list[str]]()
        self.said = ""

    def disk(self, number: int) -> Path:
        return self.place / f"disk-{number}" / "run"

    def lose(self, number: int) -> None:
        shutil.rmtree(self.disk(number))

    def run(self, steps: int, *numbers: int, failing: str = "", full_at: str = "") -> object:
        """Trains on the machines `numbers`; returns the step from which they went on, or the error of all."""
        folders = [str(self.disk(number).parent) for number in numbers]
        address = f"faulty://{self.copy}"
        found = self._ranks.run(_job, len(numbers), folders, address, steps, failing, full_at)
        self.fetched, self.said = [each[1] for each in found], found[0][2]
        assert len({str(first) for first, _, _ in found}) == 1, found
        for path in self.copy.glob(f"checkpoints/step-*/{SEAL}"):
            State().load(checkpoint.verify(path.parent))  # whole, and right to the bit
        return found[0][0]

    def parts(self, number: int) -> dict[str, list[str]]:
        """The names in each folder of parts."""
        folder = self.disk(number) / "parts"
        names = {path.name: [each.name for each in path.glob("*.safetensors")] for path in folder.iterdir()}
        return {step: sorted(each) for step, each in names.items()}


@pytest.fixture
def machines(tmp_path: Path, ranks: Ranks) -> Machines:
    return Machines(tmp_path, ranks)


def _of(step: int, *ranks: int) -> list[str]:
    """What these ranks wrote of a step: the state has tensors that rank 0 alone stores."""
    names = [f"{step}/{kind}-0000{rank}.safetensors" for rank in ranks for kind in ("model", "optimizer")]
    return sorted([*names, *[f"{step}/replicated-00000.safetensors"] * (0 in ranks)])


def test_a_machine_has_its_part_and_an_empty_one_fetches_what_it_lost(machines: Machines) -> None:
    assert machines.run(3, 0, 1) == 0
    assert "so checkpoints and the export are whole at checkpoint.copy_to alone" in machines.said
    assert copied(machines.copy) == [2, 3]
    for number in (0, 1):
        assert not list_checkpoints(machines.disk(number) / "checkpoints"), "none is whole here"
        part = machines.parts(number)
        assert [f"3/{name}" for name in part.pop("step-00000003")] == _of(3, number)
        assert not part
    # All disks are there: nothing but what only rank 0 had written, and all need, comes from the address.
    assert machines.run(4, 0, 1) == 3
    shared = ["3/manifest.json", "3/replicated-00000.safetensors", "3/state.json"]
    assert machines.fetched == [["3/manifest.json"], shared]
    machines.lose(1)
    assert machines.run(5, 0, 1) == 4
    lost = [*_of(4, 1), *(name.replace("3", "4", 1) for name in shared)]
    assert machines.fetched == [["4/manifest.json"], sorted(lost)]
    machines.lose(0)
    assert machines.run(6, 0, 1) == 5
    assert machines.fetched[0] == sorted(["5/manifest.json", "5/state.json", *_of(5, 0)])
    assert metrics(machines.disk(0)) == metrics(machines.copy) == [1, 2, 3, 4, 5, 6]
    ids = [json.loads((place / "run.json").read_text())["id"] for place in (machines.disk(1), machines.copy)]
    assert len(set(ids)) == 1


def test_it_goes_on_with_one_machine_with_three_and_with_others(machines: Machines) -> None:
    assert machines.run(2, 0, 1) == 0
    assert machines.run(3, 0) == 2
    # One machine has all: of what it needs it had its own part.
    assert not set(machines.fetched[0]) & set(_of(2, 0))
    assert not any((machines.disk(0) / "parts").iterdir())
    assert machines.run(4, 2, 0, 1) == 3
    assert machines.run(5, 1, 3) == 4
    assert metrics(machines.disk(1)) == [1, 2, 3, 4, 5]


def test_what_a_disk_has_never_wins_over_what_is_sealed(machines: Machines) -> None:
    assert machines.run(2, 0, 1) == 0
    old = {number: machines.place / f"old-{number}" for number in (0, 1)}
    for number, path in old.items():
        shutil.copytree(machines.disk(number), path)
    assert machines.run(4, 0, 1) == 2
    # Machine 1 has an older disk again, and one with a later step that was never sealed.
    machines.lose(1)
    shutil.copytree(old[1], machines.disk(1))
    later = machines.disk(1) / "parts/step-00000007"
    shutil.copytree(machines.disk(1) / "parts/step-00000002", later)
    assert machines.run(5, 0, 1) == 4
    assert set(_of(4, 1)) <= set(machines.fetched[1])
    assert list(machines.parts(1)) == ["step-00000005"]
    # Another byte, and the file of another step under this one's name.
    part = machines.disk(0) / "parts/step-00000005"
    shutil.copy(old[0] / "parts/step-00000002/model-00000.safetensors", part)
    content = bytearray((part / "optimizer-00000.safetensors").read_bytes())
    content[-3] ^= 1
    (part / "optimizer-00000.safetensors").write_bytes(content)
    elsewhere = machines.place / "elsewhere"
    elsewhere.write_text("not the run's")
    (part / SEAL).unlink()
    (part / SEAL).symlink_to(elsewhere)
    assert machines.run(6, 0, 1) == 5
    assert elsewhere.read_text() == "not the run's", "no link is followed"
    names = ("manifest.json", "model-00000.safetensors", "optimizer-00000.safetensors")
    assert machines.fetched[0] == [f"5/{name}" for name in names]
    # The disk of machine 0 has the newest whole one, which nobody has copied.
    assert machines.run(7, 0, failing="step-00000007/state.json") == 6
    assert "step-00000007, which is not at faulty://" in str(machines.run(8, 0, 1))


def test_a_step_that_one_machine_could_not_copy_is_copied_by_the_next_start(machines: Machines) -> None:
    assert machines.run(3, 0, 1, failing="step-00000003/model-00001.safetensors") == 0
    assert (
        "step-00000003/model-00001.safetensors: no answer; the disks keep it until a later" in machines.said
    )
    assert copied(machines.copy) == [1, 2]
    assert [list(machines.parts(number)) for number in (0, 1)] == [["step-00000003"]] * 2
    assert machines.run(3, 0, 1) == 3
    assert copied(machines.copy) == [1, 2, 3]
    assert not any(machines.place.rglob("*uncopied")), "no mark is left"


@pytest.mark.parametrize("before", [0, 2])
def test_a_storage_that_fails_for_long_costs_no_step(machines: Machines, before: int) -> None:
    """Also one that has never taken a checkpoint."""
    if before:
        assert machines.run(before, 0, 1) == 0
    assert machines.run(5, 0, 1, failing="model-00001.safetensors") == before
    assert "warning: step-00000004 is not copied" in machines.said
    assert copied(machines.copy) == [1, 2][:before]
    assert [list(machines.parts(number)) for number in (0, 1)] == [["step-00000005"]] * 2, "the newest alone"
    failed = str(machines.run(6, 0, 1, failing="model-00001.safetensors"))
    assert "step-00000005 is on the machines' disks alone and is not copied: faulty://" in failed
    assert machines.run(6, 0, 1) == 5
    assert machines.fetched[0] == ["5/manifest.json"], "the disks had it"
    assert copied(machines.copy) == [5, 6]
    assert metrics(machines.disk(0)) == metrics(machines.copy) == [1, 2, 3, 4, 5, 6]
    # And a storage that comes back while the run goes on.
    assert machines.run(8, 0, 1, failing="step-00000007/model-00001.safetensors") == 6
    assert copied(machines.copy) == [6, 8]
    assert list(machines.parts(1)) == ["step-00000008"]


def test_a_part_that_one_disk_does_not_take_leaves_the_one_before_it(machines: Machines) -> None:
    assert machines.run(3, 0, 1, failing="model-00001.safetensors", full_at="step-00000003") == 0
    assert "warning: step-00000003 is not copied: No space left on device" in machines.said
    assert [list(machines.parts(number)) for number in (0, 1)] == [["step-00000002"]] * 2
    assert machines.run(3, 0, 1) == 2


def test_an_uncopied_step_that_is_not_whole_is_passed_over(machines: Machines) -> None:
    def goes_on_from_2(steps: int, lost: str, *numbers: int) -> None:
        assert machines.run(steps, *numbers) == 2
        line = f"warning: checkpoint passed over: step-00000004 was not copied before, and {lost} not on"
        assert line in machines.said

    assert machines.run(2, 0, 1) == 0
    assert machines.run(4, 0, 1, failing="model-00001.safetensors") == 2
    for number in (0, 1):
        shutil.copytree(machines.disk(number), machines.place / f"old-{number}")
    shutil.copytree(machines.copy, machines.place / "old-copy")

    def restore() -> None:
        for number in (0, 1):
            machines.lose(number)
            shutil.copytree(machines.place / f"old-{number}", machines.disk(number))
        shutil.rmtree(machines.copy)
        shutil.copytree(machines.place / "old-copy", machines.copy)

    goes_on_from_2(3, "2 of its 6 files are", 0)
    restore()
    machines.lose(1)
    goes_on_from_2(3, "2 of its 6 files are", 0, 1)
    restore()
    file = machines.disk(1) / "parts/step-00000004/model-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    goes_on_from_2(3, "1 of its 6 files are", 0, 1)
    restore()
    (machines.disk(0) / "parts/step-00000004" / SEAL).write_text("{}")
    goes_on_from_2(3, "its manifest is", 0, 1)
    restore()
    machines.lose(0)  # the parts of the others wait for nothing
    assert machines.run(3, 0, 1) == 2
    assert copied(machines.copy) == [2, 3]


def test_without_machine_0_a_run_that_was_never_copied_begins_again(machines: Machines) -> None:
    assert machines.run(2, 0, 1, failing="model-00001.safetensors") == 0
    machines.lose(0)
    assert machines.run(3, 0, 1) == 0
    assert copied(machines.copy) == [2, 3]
    assert metrics(machines.disk(0)) == [1, 2, 3]


def test_damage_at_the_address_is_passed_over_unless_a_disk_has_the_file(machines: Machines) -> None:
    assert machines.run(3, 0, 1) == 0
    file = machines.copy / "checkpoints/step-00000003/model-00001.safetensors"
    content = file.read_bytes()
    file.write_bytes(b"\0" * len(content))
    machines.lose(1)
    folders = [str(machines.disk(number).parent) for number in (0, 1)]
    found = machines._ranks.run(_job, 2, folders, f"faulty://{machines.copy}", 4)
    assert [first for first, _, _ in found] == [2, 2]
    said = found[0][2]
    assert f"passed over: faulty://{file}: its content does not match" in said


def test_a_disk_with_another_run_is_refused_and_stays(machines: Machines) -> None:
    assert machines.run(2, 0, 1) == 0
    other = Machines(machines.place / "other", machines._ranks)
    assert other.run(2, 0, 1) == 0
    machines.lose(1)
    shutil.copytree(other.disk(1), machines.disk(1))
    before = sorted(machines.disk(1).rglob("*"))
    assert ": output_dir: run has another run" in str(machines.run(3, 0, 1))
    assert sorted(machines.disk(1).rglob("*")) == before
    machines.lose(0)  # also with a new machine 0, which knows the run from the address alone
    assert "has another run" in str(machines.run(3, 0, 1))
    # And one that was never whole is none.
    shutil.rmtree(machines.disk(1) / "parts")
    assert machines.run(3, 0, 1) == 2
    machines.copy = machines.place / "another"
    assert "has part of a run of which faulty://" in str(machines.run(4, 0, 1))


def test_a_folder_of_the_user_called_parts_stays(machines: Machines) -> None:
    own = machines.disk(0) / "parts" / "mine" / "notes.txt"
    own.parent.mkdir(parents=True)
    own.write_text("of the user")
    assert machines.run(2, 0) == 0
    assert machines.run(3, 0, 1) == 2
    assert machines.run(4, 0) == 3
    assert own.read_text() == "of the user"
    assert [path.name for path in own.parent.parent.iterdir()] == ["mine"]


def test_results_of_another_run_on_a_disk_are_set_aside(machines: Machines) -> None:
    for number in (1, 2):
        machines.disk(number).mkdir(parents=True)
        (machines.disk(number) / "metrics.jsonl").write_text('{"step": 99, "loss": 1}\n')
        (machines.disk(number) / "run.json").write_text('{"id": "aaaaaaaa"}')
    assert machines.run(2, 0, 1) == 0
    assert machines.run(3, 2, 1) == 2
    assert metrics(machines.disk(2)) == [1, 2, 3]
    assert not (machines.disk(1) / "metrics.jsonl").exists()
    for number in (1, 2):
        old = [machines.disk(number) / f"old-{name}-1" for name in ("metrics.jsonl", "run.json")]
        assert "99" in old[0].read_text()
        assert "aaaaaaaa" in old[1].read_text()


def test_a_link_in_a_part_is_no_damage_at_the_address(machines: Machines) -> None:
    assert machines.run(3, 0, 1) == 0
    file = machines.disk(1) / "parts/step-00000003/model-00001.safetensors"
    moved = file.rename(machines.place / "moved")
    file.symlink_to(moved)
    assert machines.run(4, 0, 1) == 3
    assert moved.is_file()


def test_without_its_address_a_run_does_not_begin_again(machines: Machines) -> None:
    assert machines.run(3, 0, 1) == 0
    with distributed.session("cpu") as world:
        with pytest.raises(UserError, match="has part of step 3 of a run that is whole at its"):
            RunFolder(machines.disk(0), world).check("auto")
        RunFolder(machines.disk(0), world, has_copy=True).check("auto")


def test_no_checkpoint_is_the_best_of_none(tmp_path: Path) -> None:
    cfg = FinetuneConfig(
        model=ModelConfig(path="none"), data=DataConfig(source="builtin"), output_dir=str(tmp_path)
    )
    address = f"file://{tmp_path}/copy"
    with distributed.session("cpu") as world:
        copy = RunCopy(address, RunFolder(tmp_path, world, has_copy=True), cfg, world)
        with pytest.raises(UserError, match="has no checkpoint to export; run again"):
            copy.best()


def test_two_of_three_machines_may_share_a_disk(machines: Machines) -> None:
    machines.disk(0).parent.mkdir()
    machines.disk(1).parent.symlink_to(machines.disk(0).parent)
    assert machines.run(3, 0, 1, 2) == 0
    assert [f"3/{name}" for name in machines.parts(0)["step-00000003"]] == _of(3, 0, 1)
    assert machines.run(4, 2, 1, 0) == 3
    machines.lose(2)
    assert machines.run(5, 1, 0, 2) == 4


def _recipe(rank: int, num_ranks: int, folders: list[str], config: str, overrides: list[str]) -> str:
    os.environ |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    cfg = load_config(FinetuneConfig, Path(config), overrides)
    with chdir(folders[rank]), pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folder, "_PATIENCE_S", 0.0)
        patch.setattr(run_folder, "PATIENCE_S", 0.0)
        try:
            load_main(catalog.recipes()["full_finetune"])(cfg)
        except UserError as error:
            return str(error)
    return ""


def _prepared(tmp_path: Path, **keys: Any) -> tuple[Path, str, str, str]:
    """A config with these keys, and folders: one that ranks share, and two that are disks of their own."""
    data = {"source": str(write_rows(tmp_path / "rows.jsonl", 40)), "seq_len": 128}
    config = write_config(
        tmp_path / "c.yaml", make_checkpoint(tmp_path / "m"), Path("run"), data=data, **keys
    )
    folders = [tmp_path / name for name in ("shared", "one", "two")]
    for folder in folders:
        folder.mkdir()
    shared, one, two = map(str, folders)
    return config, shared, one, two


def test_losses_and_export_are_those_of_a_run_on_a_shared_disk(tmp_path: Path, ranks: Ranks) -> None:
    config, shared, one, two = _prepared(
        tmp_path,
        num_steps=4,
        checkpoint={"every_steps": 2},
        export={"average_checkpoints": 2, "max_shard_gib": 0.0001},
    )
    assert ranks.run(_recipe, 2, [shared, shared], str(config), []) == ["", ""]
    copy = [f"checkpoint.copy_to=file://{tmp_path}/copy"]
    for line in ranks.run(_recipe, 2, [one, two], str(config), []):
        assert "choose a folder in a file system that all machines share, or set checkpoint.copy_to" in line
    shutil.rmtree(Path(one, "run"), ignore_errors=True)
    assert ranks.run(_recipe, 2, [one, two], str(config), [*copy, "export.enabled=false"]) == ["", ""]
    shutil.rmtree(Path(two, "run"))
    assert ranks.run(_recipe, 2, [one, two], str(config), copy) == ["", ""]
    export = Path(shared, "run/export")
    sums = (export / "SHA256SUMS").read_text()
    assert sums.count("model-") == 4
    assert (tmp_path / "copy/export/SHA256SUMS").read_text() == sums
    assert verify_sums(tmp_path / "copy/export") == len(sums.splitlines()) - 1
    assert not Path(one, "run/export").exists(), "no machine has it whole"
    with pytest.raises(UserError, match=r"nor an export here: they are at its checkpoint.copy_to"):
        verify.main([str(Path(one, "run"))], standalone_mode=False)
    assert _losses(Path(one, "run")) == _losses(Path(shared, "run"))
    written = (tmp_path / "copy/export/SHA256SUMS").stat().st_mtime_ns
    assert ranks.run(_recipe, 2, [one, two], str(config), copy) == ["", ""], "already finished"
    assert (tmp_path / "copy/export/SHA256SUMS").stat().st_mtime_ns == written
    assert [_is_done(folder, config, *copy) for folder in (one, two)] == [True, True]
    assert [_is_done(folder, config, *copy, "num_steps=5") for folder in (one, two)] == [False, False]
    assert ranks.run(_recipe, 2, [one, two], str(config), [*copy, "num_steps=6"]) == ["", ""]
    assert [_is_done(folder, config, *copy) for folder in (one, two)] == [False, False], "of another config"


def test_what_was_not_copied_is_not_said_to_be_there(tmp_path: Path, ranks: Ranks) -> None:
    config, shared, one, two = _prepared(
        tmp_path,
        num_steps=2,
        checkpoint={"every_steps": 1, "copy_to": f"file://{tmp_path}/copy"},
    )
    assert ranks.run(_recipe, 2, [shared, shared], str(config), []) == ["", ""]
    # A disk each from here on. The export on the disk is not what export.json then tells of.
    Path(shared, "run").rename(Path(one, "run"))
    assert ranks.run(_recipe, 2, [one, two], str(config), ["num_steps=3"]) == ["", ""]
    assert not Path(one, "run/export").exists()
    assert Path(one, "run/old-export-1/SHA256SUMS").is_file()
    assert list_checkpoints(Path(one, "run/checkpoints")), "of the shared disk, and older"
    with pytest.raises(UserError, match=r"of step 3, is whole at checkpoint.copy_to alone"):
        checkpoint.newest_of_run(Path(one, "run"), print)
    # Nothing can be copied to step 4, a file.
    (tmp_path / "copy/checkpoints/step-00000004").write_text("")
    for line in ranks.run(_recipe, 2, [one, two], str(config), ["num_steps=4", "export.enabled=false"]):
        assert "step 4 is not copied (see above), and the newest checkpoint is of step 3; run again" in line
    with pytest.raises(UserError, match=r"of step 4, is not copied to checkpoint.copy_to yet; run again"):
        checkpoint.newest_of_run(Path(one, "run"), print)
    (tmp_path / "copy/checkpoints/step-00000004").unlink()
    assert ranks.run(_recipe, 2, [one, two], str(config), ["num_steps=4"]) == ["", ""]
    assert json.loads((tmp_path / "copy/export.json").read_text())["step"] == 4


def _is_done(folder: str, config: Path, *overrides: str) -> bool:
    with chdir(folder):
        return bool(done(load_config(FinetuneConfig, config, overrides)))


def _losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]
