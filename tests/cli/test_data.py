"""`lptune data`: what it prints, by which order of rows, and that it needs neither weights nor torch."""

import json
from pathlib import Path

import pytest

from lptune import data, models
from lptune.cli.new_checkpoint import train_tokenizer
from lptune.config import DataConfig
from tests.cli.conftest import Command
from tests.helpers import cold


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and a config.json, without weights."""
    folder = tmp_path_factory.mktemp("model")
    train_tokenizer(iter(["two plus two is four", "the capital of France is Paris"]), 512).save(
        str(folder / "tokenizer.json")
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "config.json").write_text(json.dumps(models.PRESETS["llama3_2"]["tiny"] | {"vocab_size": 512}))
    return folder


@pytest.fixture
def keys(model: Path, tmp_path: Path) -> list[str]:
    """--config and overrides for 20 pairs in rows of 32 tokens."""
    rows = [{"prompt": f"two plus {n}", "response": f"is {n} \x1b[2J"} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "c.yaml").write_text(f"model: {{path: {model}}}\ndata: {{seq_len: 64, cache: none}}\n")
    return ["--config", "c.yaml", "data.source=rows.jsonl"]


def test_it_prints_report_histogram_and_the_first_rows_of_training(
    command: Command, keys: list[str], model: Path
) -> None:
    code, stdout, stderr = command("data", *keys, "--rows", "2", "seed=3")
    assert (code, stderr) == (0, "")
    tokenizer = data.load_tokenizer(model)
    cfg = DataConfig(source="rows.jsonl", seq_len=64, cache="none")
    train, _, report = data.prepare(cfg, tokenizer, seed=3, vocab_size=512)
    assert stdout.startswith("\n".join([*report, "training documents by length:"]) + "\n")
    first = [f"=== row {train.row_at(sample, 3)} of {train.num_rows}" for sample in (0, 1)]
    assert [line.partition(":")[0] for line in stdout.splitlines() if line.startswith("===")] == first
    assert "⟦is" in stdout
    assert "\x1b" not in stdout
    assert r"\x1b[2J" in stdout


def test_a_row_a_document_and_held_out_rows_can_be_chosen(command: Command, keys: list[str]) -> None:
    for arguments, starts in (
        (["--row", "0"], ["=== row 0 of"]),
        (["--document", "7"], ["--- document 7: "]),
        (["--held-out", "data.eval_fraction=0.5", "--rows", "1"], ["=== row 0 of"]),
        (["--rows", "0"], []),
    ):
        code, stdout, stderr = command("data", "full_finetune", *keys, *arguments)
        assert (code, stderr) == (0, ""), arguments
        shown = [line for line in stdout.splitlines() if line.startswith(("===", "---"))]
        assert len([line for line in shown if line.startswith("===")]) <= 1
        assert all(shown[i].startswith(start) for i, start in enumerate(starts)), (arguments, shown)
        assert bool(shown) == bool(starts)
    _, one, _ = command("data", *keys, "--document", "7", "--ids")
    assert sum(" target " in line for line in one.splitlines()) == int(
        one.partition("--- document 7: ")[2].split()[2]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--row", "99"], "--row: 99 is not there; they are numbered 0 to "),
        (["--document", "20"], "--document: 20 is not there; they are numbered 0 to 19"),
        (["--row", "1", "--document", "1"], "exclude each other"),
        (["--held-out"], "--held-out: nothing is held out; set data.eval_fraction or data.eval_source"),
    ],
)
def test_a_mistake_is_one_line(command: Command, keys: list[str], arguments: list[str], message: str) -> None:
    code, _, stderr = command("data", *keys, *arguments)
    assert (code, stderr.count("\n")) == (2, 1)
    assert message in stderr


def test_without_torch_a_terminal_gets_colours_and_no_escape(keys: list[str], tmp_path: Path) -> None:
    for variables, is_coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        code = (
            "import sys; sys.stdout.isatty = lambda: True\nfrom lptune.cli.main import main\n"
            "try:\n    main(sys.argv[1:])\nfinally:\n    print('TORCH', 'torch' in sys.modules)\n"
        )
        done = cold.run("-c", code, "data", *keys, folder=tmp_path, **variables)
        shown, _, imports_torch = done.stdout.rpartition("TORCH ")
        assert (done.returncode, imports_torch) == (0, "False\n"), done.stderr
        assert ("\x1b[32m" in shown, "\x1b[2J" in shown, r"\x1b[2J" in shown) == (is_coloured, False, True)
