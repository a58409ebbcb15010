"""The first lines of a run: before torch is imported, and once for a launch."""

import hashlib
import json
from pathlib import Path

import pytest

from lptune.cli import banner, catalog
from lptune.config import FinetuneConfig, load_config
from tests.helpers import cold

RECIPE = """
from lptune.config import FinetuneConfig

def main(cfg: FinetuneConfig) -> None:
    pass
"""

# Ends the process where the first library is imported that takes long.
STOPS_AT_THE_FIRST_SLOW_IMPORT = """
import os, sys

class Stop:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "tokenizers", "safetensors", "transformers", "tqdm"):
            print(f"imports {name}", flush=True)
            os._exit(0)

sys.meta_path.insert(0, Stop())
from lptune.cli.main import main
main()
"""


def _lines(config: Path, *overrides: str) -> list[str]:
    cfg: FinetuneConfig = load_config(FinetuneConfig, config, overrides)
    return banner.lines(cfg, "full_finetune", "llama3_2/1b")


def test_the_first_lines_come_before_anything_slow_is_imported(tmp_path: Path) -> None:
    # A copy: of an installed recipe, model.path would have to exist.
    (tmp_path / "own.py").write_bytes(catalog.find_recipe("full_finetune").read_bytes())
    arguments = ("run", "own.py", "--config", "quickstart")
    done = cold.run("-c", STOPS_AT_THE_FIRST_SLOW_IMPORT, *arguments, folder=tmp_path)
    assert done.stdout.splitlines() == [
        "recipe     own.py, config quickstart",
        "model      checkpoints/quickstart",
        "data       builtin",
        "precision  int8_rowcol, the rest in float32",
        "output     runs/quickstart",
        "loading torch ...",
        "imports torch",
    ], done.stderr


def test_the_banner_fits_80_columns_whatever_the_number_of_sources() -> None:
    config = catalog.find_config("llama3_2/1b")
    sources = ", ".join(f"data-{number}.jsonl" for number in range(20))
    lines = _lines(config, f"data.source=[{sources}]", "precision.kind=none")
    assert lines[2].startswith("data       data-0.jsonl, data-1.jsonl, ")
    assert lines[2].endswith(", ...")
    assert lines[3] == "precision  bfloat16"
    assert max(map(len, lines)) <= 80


def test_under_plain_torchrun_rank_0_prints_the_banner(tmp_path: Path, toy: list[str]) -> None:
    torchrun = (*cold.TORCHRUN, "--nproc-per-node=2", *cold.LPTUNE)
    done = cold.run(*torchrun, "run", *toy, folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line[:6] for line in done.stdout.splitlines()].count("recipe") == 1
    assert done.stdout.startswith("recipe")
    assert done.stdout.count("loading torch ...") == 1


@pytest.mark.parametrize(
    ("recipe", "note"),
    [
        ("toy", "another version of this recipe (toy, sha256 00000000)"),
        ("other", "another recipe (other, sha256 00000000)"),
    ],
)
def test_a_folder_of_another_recipe_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recipe: str, note: str
) -> None:
    file = tmp_path / "toy.py"
    file.write_text(RECIPE)
    (tmp_path / "run").mkdir()
    config = catalog.find_config("llama3_2/1b")
    overrides = ["data.source=a.jsonl", f"output_dir={tmp_path / 'run'}"]
    cfg = load_config(FinetuneConfig, config, overrides)
    banner.note_other_recipe(cfg, file)
    about = json.dumps({"recipe": recipe, "recipe_sha256": "0" * 64})
    (tmp_path / "run" / "run.json").write_text(about)
    banner.note_other_recipe(cfg, file)
    said = capsys.readouterr().out
    assert said == f"note: {tmp_path / 'run'} was begun with {note}\n"
    same = hashlib.sha256(file.read_bytes()).hexdigest()
    for nothing_to_say in (json.dumps({"recipe": "toy", "recipe_sha256": same}), "[" * 100_000):
        (tmp_path / "run" / "run.json").write_text(nothing_to_say)
        banner.note_other_recipe(cfg, file)
        assert capsys.readouterr().out == ""
