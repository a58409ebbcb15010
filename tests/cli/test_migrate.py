"""`lptune migrate` as a command; what it makes of each key is tested in tests/migrate."""

from pathlib import Path

from tests.cli.conftest import Command
from tests.helpers import cold

CONFIGS = Path(__file__).parents[1] / "migrate/configs"
TORCHTUNE = str(CONFIGS / "torchtune_llama3_3_70b_full_multinode.yaml")


def test_the_config_that_it_writes_passes_validate(command: Command) -> None:
    code, stdout, stderr = command("migrate", TORCHTUNE, "--world-size", "16", "--output", "new/my.yaml")
    assert (code, stderr) == (0, "")
    assert "next: lptune validate new/my.yaml" in stdout
    assert [path.name for path in Path("new").iterdir()] == ["my.yaml"]
    code, stdout, _ = command("validate", "new/my.yaml")
    assert code == 0
    assert stdout.startswith("ok: new/my.yaml fits full_finetune")
    assert "model.path: /tmp/Llama-3.3-70B-Instruct/ does not exist here yet" in stdout


def test_without_an_output_the_config_goes_to_stdout_and_the_report_to_stderr(command: Command) -> None:
    code, stdout, stderr = command("migrate", TORCHTUNE, "--world-size", "16")
    assert code == 0
    assert stdout.startswith("# Migrated by")
    assert "global_batch_size: 8   #" in stdout
    assert "no equivalent" in stderr
    Path("my.yaml").write_text(stdout)
    assert command("validate", "my.yaml")[0] == 0


def test_what_the_recipe_would_refuse_is_in_the_report(command: Command) -> None:
    text = Path(TORCHTUNE).read_text(encoding="utf-8").replace("lr: 2e-5", "lr: 0.0")
    Path("theirs.yaml").write_text(text)
    code, stdout, _ = command("migrate", "theirs.yaml", "--world-size", "16", "--output", "my.yaml")
    assert code == 0
    assert "config: optimizer.lr: must be greater than 0" in stdout


def test_an_existing_file_and_a_wrong_file_are_one_line_and_nothing_is_written(command: Command) -> None:
    Path("my.yaml").write_text("mine")
    Path("lora.yml").write_text("base_model: a/b\nadapter: lora\n")
    for arguments, message in (
        (["migrate", TORCHTUNE, "--output", "my.yaml"], "my.yaml: exists"),
        (["migrate", TORCHTUNE, "--world-size", "3", "--output", "b.yaml"], "do not divide among 8"),
        (["migrate", "lora.yml", "--output", "b.yaml"], "adapter: lora trains adapters"),
        (["migrate", "nothing.yaml"], "no such config file"),
        (["migrate", TORCHTUNE, "--output", "b.txt"], "ends in .yaml"),
    ):
        code, stdout, stderr = command(*arguments)
        assert (code, stdout) == (2, "")
        assert message in stderr
        assert stderr.count("\n") == 1
    assert Path("my.yaml").read_text() == "mine"
    assert not Path("b.yaml").exists()


def test_it_imports_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom lptune.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nfinally:\n    print('TORCH', 'torch' in sys.modules)\n"
    )
    done = cold.run("-c", program, "migrate", TORCHTUNE, "--world-size", "8", folder=tmp_path)
    assert done.stdout.splitlines()[-1] == "TORCH False", done.stderr
