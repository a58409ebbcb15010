"""A checkpoint and a config with which a recipe runs in seconds, for fixtures and for scripts."""

import json
import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from lptune.data.builtin import builtin_rows
from tests.helpers import warm


def make_checkpoint(folder: Path) -> Path:
    """llama3_2/tiny with random weights and a tokenizer that knows a chat template."""
    warm.lptune(["new-checkpoint", "llama3_2/tiny", str(folder)], folder=folder.parent).check_returncode()
    return folder


def write_rows(path: Path, count: int) -> Path:
    """The built-in rows of prompts and answers."""
    return _write(path, builtin_rows(count))


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
    return _write(path, rows)


def write_labelled(path: Path, count: int) -> Path:
    """Rows for full_kto: answers are desirable, refusals are not, and each prompt is another one."""
    rows = [
        {
            "prompt": row["prompt"],
            "completion": row["response"] if i % 2 else f"Sorry, no. {row['response'][: i % 9]}",
            "label": bool(i % 2),
        }
        for i, row in enumerate(builtin_rows(count))
    ]
    return _write(path, rows)


def make_teacher(student: Path, folder: Path, **changed: Any) -> Path:
    """A model with the student's tokenizer and other sizes, made by transformers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(student, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    content |= {"hidden_size": 96, "num_hidden_layers": 3, "intermediate_size": 160} | changed
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    for parameter in model.parameters():
        # Larger than a new model's weights, for probabilities that differ from word to word.
        parameter.data.mul_(4.0) if parameter.dim() > 1 else None
    model.save_pretrained(folder)
    return folder


def write_texts(path: Path, count: int) -> Path:
    """Rows for continued_pretrain, each another one, of 20 to 60 words that the tiny tokenizer knows."""
    draw = random.Random(count)
    words = ["cat", "dog", "owl", "fox", "one", "two", "six", "ten"]
    texts = [" ".join(draw.choices(words, k=draw.randint(20, 60))) for _ in range(count)]
    return _write(path, [{"text": text} for text in texts])


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_config(path: Path, checkpoint: Path, output_dir: Path, /, **changed: Any) -> Path:
    """A run of a few seconds: 12 steps of 8 short rows of the built-in data."""
    values = {
        "model": {"path": str(checkpoint)},
        # In the plain layout: to render a template takes a process of its own, two CPU seconds a run.
        "data": {
            "source": "builtin",
            "max_rows": 900,
            "chat_template": "none",
            "seq_len": 128,
            "eval_fraction": 0.05,
        },
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
