"""`lptune verify s3://…`: each damaged file gets its line, and only what may be whole is read."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lptune import distributed
from lptune.base.errors import UserError
from lptune.checkpoint import sums
from lptune.cli.verify import verify
from lptune.distributed import World
from tests.checkpoint.test_run_copy import train
from tests.helpers import faulty_storage
from tests.helpers.faulty_storage import Faulty

SEAL = "manifest.json"


@pytest.fixture
def world() -> Iterator[World]:
    with distributed.session("cpu") as world:
        yield world


@pytest.fixture
def copy(tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The copy of a run with two checkpoints and an export."""
    monkeypatch.setattr(Faulty, "fault", staticmethod(faulty_storage.none))
    place = tmp_path / "copy"
    train(tmp_path / "run", f"file://{place}", world, 2)
    export = place / "export"
    export.mkdir()
    for name in ("README.md", "config.json", "model.safetensors"):
        (export / name).write_text(f"this is {name}")
    sums.write_sums(export, [])
    return place


@pytest.fixture
def verified(capsys: pytest.CaptureFixture[str]) -> Callable[[Path], tuple[list[str], str]]:
    """The lines that are printed, and the error."""

    def call(place: Path) -> tuple[list[str], str]:
        error = ""
        capsys.readouterr()
        try:
            verify.main([f"faulty://{place}"], standalone_mode=False)
        except UserError as raised:
            error = str(raised)
        return capsys.readouterr().out.splitlines(), error

    return call


def test_a_whole_run_a_checkpoint_and_an_export(
    copy: Path, verified: Callable[[Path], tuple[list[str], str]]
) -> None:
    lines, error = verified(copy)
    steps = [f"ok: faulty://{copy}/checkpoints/step-0000000{step}: step {step}, " for step in (1, 2)]
    export = f"ok: faulty://{copy}/export: 2 files as they were exported"
    assert [line.startswith(each) for line, each in zip(lines, [*steps, export], strict=True)] == [True] * 3
    assert lines[0].endswith(" tensors of 1 rank(s), all bytes as saved")
    assert not error
    for place, line in (("checkpoints/step-00000002", lines[1]), ("export", lines[2])):
        assert verified(copy / place) == ([line], "")
    # What is being copied, or was left by a broken copy, has no seal.
    (copy / f"checkpoints/step-00000001/{SEAL}").unlink()
    assert verified(copy) == (lines[1:], "")


def test_each_damaged_file_has_its_line(
    copy: Path, verified: Callable[[Path], tuple[list[str], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (copy / f"checkpoints/step-0000000{step}" for step in (1, 2))
    (first / "state.json").unlink()
    with (first / "optimizer-00000.safetensors").open("ab") as file:
        file.write(b"x")
    content = bytearray((first / "model-00000.safetensors").read_bytes())
    content[-3] ^= 1
    (first / "model-00000.safetensors").write_bytes(content)
    (second / SEAL).write_bytes((second / SEAL).read_bytes().replace(b'"step": 2', b'"step": 3'))
    (copy / "export/config.json").write_text("that is config.json")
    (copy / "export/model.safetensors").unlink()
    read = list[str]()
    opened = Faulty._open

    def note(self: Faulty, path: str, *args: object, **options: object) -> object:
        read.append("/".join(Path(path).parts[-2:]))
        return opened(self, path, *args, **options)

    monkeypatch.setattr(Faulty, "_open", note)
    lines, error = verified(copy)
    where = f"bad: faulty://{first}"
    size = (first / "optimizer-00000.safetensors").stat().st_size
    export = f"bad: faulty://{copy}/export"
    assert sorted(lines) == sorted(
        [
            f"{where}/model-00000.safetensors: its content does not match its sha256",
            f"{where}/optimizer-00000.safetensors: has {size} bytes instead of {size - 1}",
            f"{where}/state.json: is missing",
            f"bad: faulty://{second}/{SEAL}: its own digest does not match; the file was changed",
            f"{export}/config.json: its content does not match its sha256",
            f"{export}/model.safetensors: is missing",
        ]
    )
    assert error == f"faulty://{copy}: 3 of 3 are bad; see above"
    assert sorted(name for name in read if SEAL not in name and sums.NAME not in name) == [
        "export/config.json",
        "step-00000001/model-00000.safetensors",
        "step-00000001/replicated-00000.safetensors",
    ]


def test_what_the_run_removes_meanwhile_is_no_damage(
    copy: Path, verified: Callable[[Path], tuple[list[str], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def removed(call: str, path: str) -> None:
        if call == "get" and path.endswith(f"step-00000001/{SEAL}"):
            shutil.rmtree(copy / "checkpoints/step-00000001", ignore_errors=True)

    monkeypatch.setattr(Faulty, "fault", staticmethod(removed))
    lines, error = verified(copy)
    assert [line.split("/")[-1].split(":")[0] for line in lines] == ["step-00000002", "export"]
    assert not error


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("file:///no/such/place", "has neither a checkpoint with a manifest.json nor an export"),
        ("nothing://a/b", "nothing://a/b: "),
        ("zip://a::file:///b", "expected an address like s3://bucket/runs/my-run"),
    ],
)
def test_an_address_without_anything_is_one_line(address: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        verify.main([address], standalone_mode=False)
