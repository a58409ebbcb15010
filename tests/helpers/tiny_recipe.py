"""A checkpoint and a config with which a recipe runs in seconds, for fixtures and for scripts."""

import json
from pathlib import Path
from typing import Any

import yaml

from lptune.data.builtin import builtin_rows
from tests.helpers import warm


def make_checkpoint(folder: Path) -> Path:
    """llama3_2/tiny with random weights and a tokenizer that knows a chat template."""
    warm.lptune(["new-checkpoint", "llama3_2/tiny", str(folder)], folder=folder.parent).check_returncode()
    return folder


def write_preferences(path: Path, count: int) -> Path:
    """Rows for full_dpo: an answer is chosen over a refusal, and each prompt is another one."""
    rows = [
        {
            "prompt": row["prompt"],
            "chosen": row["response"],
            "rejected": f"Sorry, no. {row['response'][: i % 9]}",
        }
        for i, row in enumerate(builtin_rows(count))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_config(path: Path, checkpoint: Path, output_dir: Path, /, **changed: Any) -> Path:
    """A run of a few seconds: 12 steps of 8 short rows of the built-in data."""
    values = {
        "model": {"path": str(checkpoint)},
        "data": {"source": "builtin", "seq_len": 128, "eval_fraction": 0.05, "max_rows": 600},
        "optimizer": {"lr": 3.0e-3},
        "schedule": {"warmup_steps": 2},
        "compile": "none",
        "activation_checkpointing": "none",
        "compute_dtype": "float32",
        "device": "cpu",
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "num_steps": 12,
        "eval_every_steps": 6,
        "output_dir": str(output_dir),
    }
    path.write_text(yaml.safe_dump(values | changed), encoding="utf-8")
    return path
