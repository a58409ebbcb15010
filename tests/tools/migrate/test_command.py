"""`lptune migrate` as a command; what it makes of each key is tested in tests/migrate."""

import json
from pathlib import Path

import yaml

from tests.cli.conftest import Command
from tests.helpers import warm

CONFIGS = Path(__file__).parent / "configs"
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


def test_what_the_recipe_would_refuse_is_in_the_report(command: Command) -> None:
    text = Path(TORCHTUNE).read_text(encoding="utf-8").replace("lr: 2e-5", "lr: 0.0")
    Path("theirs.yaml").write_text(text)
    code, stdout, _ = command("migrate", "theirs.yaml", "--world-size", "16", "--output", "my.yaml")
    assert code == 0
    assert "config: optimizer.lr: must be greater than 0" in stdout


def test_without_an_output_the_config_goes_to_stdout_and_the_report_to_stderr(command: Command) -> None:
    code, stdout, stderr = command("migrate", TORCHTUNE, "--world-size", "16")
    assert code == 0
    assert stdout.startswith("# Migrated by")
    assert "global_batch_size: 8   #" in stdout
    assert "no equivalent" in stderr
    Path("my.yaml").write_text(stdout)
    assert command("validate", "my.yaml")[0] == 0


THEIRS = """
output_dir: runs/theirs
model: {_component_: torchtune.models.llama3_2.llama3_2_1b}
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  path: tiny/tokenizer.model
  max_seq_len: 64
dataset:
  _component_: torchtune.datasets.instruct_dataset
  source: json
  data_files: rows.jsonl
  column_map: {input: frage, output: antwort}
  packed: true
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: tiny
  output_dir: ${output_dir}
batch_size: 2
gradient_accumulation_steps: 2
epochs: 2
max_steps_per_epoch: 2
optimizer: {_component_: torch.optim.AdamW, lr: 1e-3, betas: [0.8, 0.9], eps: 1e-7}
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 2
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
clip_grad_norm: 0.5
dtype: fp32
device: cpu
seed: 3
"""


def test_a_migrated_config_trains_as_the_old_one_says(tmp_path: Path) -> None:
    rows = [{"frage": f"What is {n} + 1?", "antwort": str(n + 1)} for n in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "theirs.yaml").write_text(THEIRS)
    for arguments in (
        ["new-checkpoint", "llama3_2/tiny", "tiny"],
        ["migrate", "theirs.yaml", "--output", "my.yaml"],
        ["run", "full_finetune", "--config", "my.yaml", "export.enabled=false"],
    ):
        done = warm.lptune(arguments, folder=tmp_path, timeout_s=300)
        assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs/theirs"
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["lr"] for row in metrics if row["step"]] == [
        5e-4,
        1e-3,
        1e-3,
        5e-4,
    ]  # 2 of warm-up, half a wave
    assert "steps 0 to 4 of 4 rows x 64 tokens" in done.stdout
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert (config["seed"], config["compute_dtype"], config["max_grad_norm"]) == (3, "float32", 0.5)
    optimizer = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-7, "weight_decay": 0.01}
    assert {key: config["optimizer"][key] for key in optimizer} == optimizer
