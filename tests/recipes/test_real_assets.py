"""A real checkpoint on real data: the loss falls, INT8 ends where float32 does, and transformers agrees."""

from pathlib import Path

import pytest
import torch
import yaml

from lptune import checkpoint, models
from tests.recipes.conftest import Run, evaluations

# The tokenizer brings no template. The answer ends with eos, so that the model learns where to stop.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] + ': ' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def _config(assets: Path, folder: Path) -> Path:
    source = str(assets / "data" / "openai_messages.jsonl")
    values = {
        "model": {"path": str(assets / "models" / "story_llama")},
        "data": {"source": source, "chat_template": CHAT_TEMPLATE, "eval_fraction": 0.1, "seq_len": 512},
        "optimizer": {"lr": 2.0e-3},
        "schedule": {"warmup_steps": 5},
        "global_batch_size": 8,
        "num_epochs": 10,
        "micro_batch_size": 4,
        "compute_dtype": "float32",  # a processor without bfloat16 would take minutes for what is not INT8
        "compile": "none",
        "activation_checkpointing": "none",
        "device": "cpu",
    }
    path = folder / "real.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


@pytest.mark.slow  # 13 s; on built-in rows and random weights: test_full_finetune.py
def test_held_out_loss_falls_by_a_fifth_and_int8_ends_within_one_percent_of_float32(
    assets: Path, run_recipe: Run, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = _config(assets, tmp_path)
    ends = {}
    for kind in ("none", "int8_rowcol"):
        run_recipe(f"precision.kind={kind}", f"output_dir={tmp_path / kind}", config=config)
        evaluated = [record["eval_loss"] for record in evaluations(tmp_path / kind)]
        assert evaluated[-1] <= 0.8 * evaluated[0], kind
        ends[kind] = evaluated[-1]
    assert ends["int8_rowcol"] == pytest.approx(ends["none"], rel=0.01)

    export = tmp_path / "int8_rowcol" / "export"
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
