"""Loading: what a file holds is held against what its manifest says before any of it is used."""

import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lptune import distributed, training
from lptune.base.cores import in_threads
from lptune.base.errors import UserError
from lptune.checkpoint.load import StoredFiles
from lptune.checkpoint.manifest import read_manifest
from lptune.distributed import whole_piece
from tests.helpers.saving import save

NAME = "weight"


def _saved(folder: Path) -> Path:
    model = nn.Linear(8, 5)
    with distributed.session("cpu") as world:
        return save(folder, 1, model, training.AdamW(model.parameters()), world)


def _read(path: Path) -> Tensor:
    values = torch.full((5, 8), torch.nan)
    StoredFiles(read_manifest(path)).read(NAME, [whole_piece(values)], values.shape, torch.float32)
    return values


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NAME), "holds no readable tensor 'weight'"),
        (lambda t: t.update(weight=t[NAME].double()), r"as float64 \[5, 8\], where float32 "),
        (lambda t: t.update(weight=t[NAME][:4].clone()), r"\[4, 8\], where float32 \[5, 8\] is needed"),
        (lambda t: t.update(weight=t[NAME][:, 1:].clone()), r"as float32 \[5, 7\]"),
        (lambda t: t.update(weight=t[NAME].flatten()), r"as float32 \[40\]"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_hold_what_its_manifest_says_is_one_line(
    tmp_path: Path, change: object, message: str
) -> None:
    path = _saved(tmp_path)
    file = path / "model-00000.safetensors"
    tensors = load_file(file)
    assert torch.equal(_read(path), tensors[NAME])
    change(tensors)  # type: ignore[operator]
    save_file(tensors, file)
    with pytest.raises(UserError, match=message) as error:
        _read(path)
    assert str(error.value).startswith(str(file))
    assert "\n" not in str(error.value)


def test_a_file_that_is_gone_or_no_safetensors_is_one_line(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    (path / "model-00000.safetensors").write_bytes(b"something else")
    with pytest.raises(UserError, match=r"model-00000\.safetensors: holds no readable tensor 'weight'"):
        _read(path)
    (path / "model-00000.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-00000\.safetensors: holds no readable tensor 'weight'"):
        _read(path)


def test_the_first_error_in_threads_is_raised_and_what_waits_is_not_begun() -> None:
    begun = []

    def call(number: int) -> None:
        begun.append(number)
        if number == 0:
            raise UserError("the first")
        time.sleep(0.002)

    with pytest.raises(UserError, match="the first"):
        in_threads([lambda n=n: call(n) for n in range(1000)], 1)
    assert len(begun) < 100
