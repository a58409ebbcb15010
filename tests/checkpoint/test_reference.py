"""reference.safetensors: what is not this run's is said in one line and computed again."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lptune.checkpoint.reference import read_reference, write_reference

MADE_WITH = {"data": "abc"}
SHAPES = {"train": (3,), "held_out": (2,)}


def tensors() -> dict[str, Tensor]:
    return {"train": torch.tensor([-1.0, -2.0, -3.0]), "held_out": torch.tensor([-4.0, -5.0])}


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "reference.safetensors"
    assert read_reference(path, MADE_WITH, SHAPES) == ""
    write_reference(path, tensors(), MADE_WITH)
    found = read_reference(path, MADE_WITH, SHAPES)
    assert isinstance(found, dict)
    assert all(torch.equal(found[name], each) for name, each in tensors().items())
    assert found.keys() == SHAPES.keys()


@pytest.mark.parametrize(
    "changed",
    [
        {"train": torch.zeros(3, dtype=torch.bfloat16)},
        {"train": torch.zeros(3).to(torch.float8_e4m3fn)},
        {"train": torch.zeros(2)},
        {"train": torch.zeros(3, 2)},
        {"train": torch.tensor([0.0, float("nan"), 0.0])},
        {"other": torch.zeros(3)},
    ],
)
def test_numbers_of_another_run_are_refused_in_one_line(tmp_path: Path, changed: dict[str, Tensor]) -> None:
    """Also with the metadata of this run, as somebody may have written them."""
    path = tmp_path / "reference.safetensors"
    try:
        write_reference(path, tensors() | changed, MADE_WITH)
    except TypeError:  # numpy has no such dtype, so their digest is anybody's
        about = {"digest": "0", "made_with": MADE_WITH}
        save_file(tensors() | changed, path, {"lptune": json.dumps(about)})
    found = read_reference(path, MADE_WITH, SHAPES)
    assert isinstance(found, str)
    assert found
    assert "\n" not in found


@pytest.mark.parametrize(
    "about", ["[" * 100_000, '{"digest": ' + "[" * 900 + "]" * 900 + "}", "[]", "7", "x"]
)
def test_metadata_that_no_run_wrote_are_refused_in_one_line(tmp_path: Path, about: str) -> None:
    path = tmp_path / "reference.safetensors"
    save_file(tensors(), path, {"lptune": about})
    assert str(read_reference(path, MADE_WITH, SHAPES)).startswith("it cannot be read")
