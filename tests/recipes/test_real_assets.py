"""A real checkpoint on real data: the loss falls, INT8 ends where bfloat16 does, and transformers agrees."""

from pathlib import Path

import pytest
import torch
import yaml

from tests.recipes.conftest import Run, read_metrics

# The tokenizer brings no template. The answer ends with eos, so that the model learns where to stop.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] + ': ' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
OPENAI_MESSAGES = {
    "data": {"source": "openai_messages.jsonl", "chat_template": CHAT_TEMPLATE, "eval_fraction": 0.1},
    "global_batch_size": 8,
    "num_epochs": 20,
}
GSM8K = {
    "data": {"source": "gsm8k_train.jsonl", "eval_fraction": 0.01},
    "global_batch_size": 16,
    "num_steps": 100,
}


def _config(assets: Path, folder: Path, job: dict[str, object]) -> Path:
    data = job["data"]
    assert isinstance(data, dict)
    values = {
        **job,
        "model": {"path": str(assets / "models" / "story_llama")},
        "data": data | {"source": str(assets / "data" / data["source"]), "seq_len": 512},
        "optimizer": {"lr": 1.0e-3},
        "schedule": {"warmup_steps": 5},
        "micro_batch_size": 4,
        "compile": "none",
        "activation_checkpointing": "none",
        "device": "cpu",
    }
    path = folder / "real.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(OPENAI_MESSAGES, id="openai_messages"),
        pytest.param(GSM8K, id="gsm8k", marks=pytest.mark.slow),
    ],
)
def test_held_out_loss_falls_by_a_fifth_and_int8_ends_within_one_percent_of_bfloat16(
    assets: Path, run_recipe: Run, tmp_path: Path, job: dict[str, object]
) -> None:
    config = _config(assets, tmp_path, job)
    ends = {}
    for kind in ("none", "int8_rowcol"):
        run_recipe(f"precision.kind={kind}", f"output_dir={tmp_path / kind}", config=config)
        evaluated = [r["eval_loss"] for r in read_metrics(tmp_path / kind) if "eval_loss" in r]
        assert evaluated[-1] <= 0.8 * evaluated[0], kind
        ends[kind] = evaluated[-1]
    assert ends["int8_rowcol"] == pytest.approx(ends["none"], rel=0.01)
    _assert_transformers_agrees(tmp_path / "int8_rowcol" / "export")


def _assert_transformers_agrees(export: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from lptune import checkpoint, models

    theirs = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    ours = models.build_on_meta(models.read_config(export))
    ours.to_empty(device="cpu")
    ours.reset_buffers("cpu")
    checkpoint.load_hf(ours, checkpoint.read_index(export))
    tokens = torch.tensor(
        [AutoTokenizer.from_pretrained(export)("What is the capital of France?")["input_ids"]]
    )
    with torch.no_grad():
        logits = theirs(tokens).logits
        assert (ours(tokens) - logits).abs().max() <= 1e-4
    assert logits.std() > 0.1
