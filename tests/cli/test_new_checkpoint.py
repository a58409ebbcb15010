"""`lptune new-checkpoint` and `lptune verify`: what is written is a complete Hugging Face folder, and damage is found."""

# ruff: noqa: E501  (messages are compared whole)

import json
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lptune.cli import new_checkpoint
from lptune.models import PRESETS
from tests.cli.conftest import Command

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Two plus 12?\nPlease — naïve 雪"},
    {"role": "assistant", "content": "14"},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Still 14."},
]


@pytest.mark.parametrize("family", [family for family, sizes in PRESETS.items() if "tiny" in sizes])
def test_transformers_loads_a_new_checkpoint_of_every_family(command: Command, family: str) -> None:
    code, stdout, stderr = command("new-checkpoint", f"{family}/tiny", "new", "--vocab-size", "300")
    assert (code, stderr) == (0, ""), stderr
    assert stdout.startswith(f"new checkpoint new: {family}/tiny, ")
    model, report = AutoModelForCausalLM.from_pretrained("new", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = AutoTokenizer.from_pretrained("new")
    ids = torch.tensor([tokenizer("Two plus 12? 雪").input_ids])
    assert ids[0, 0] == tokenizer.bos_token_id == model.config.bos_token_id
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (3, 0)
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == "Two plus 12? 雪"
    assert int(ids.max()) < model.config.vocab_size == 300
    assert torch.isfinite(model(ids).logits).all()
    assert command("verify", "new")[0] == 0


def test_the_chat_template_marks_exactly_the_assistants_turns(command: Command) -> None:
    assert command("new-checkpoint", "llama3_2/tiny", "new")[0] == 0
    tokenizer = AutoTokenizer.from_pretrained("new")
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    assert text == (
        "<|begin|><|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nTwo plus 12?\nPlease — naïve 雪<|im_end|>\n<|im_start|>assistant\n14<|im_end|>\n"
        "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\nStill 14.<|im_end|>\n"
    )
    marked = tokenizer.apply_chat_template(MESSAGES, return_dict=True, return_assistant_tokens_mask=True)
    on = [token for token, loss in zip(marked["input_ids"], marked["assistant_masks"], strict=True) if loss]
    assert tokenizer.decode(on) == "14<|im_end|>Still 14.<|im_end|>"
    prompt = tokenizer.apply_chat_template(MESSAGES[:2], tokenize=False, add_generation_prompt=True)
    assert prompt == text[: len(prompt)]
    assert prompt.endswith("<|im_start|>assistant\n")


def test_weights_are_a_function_of_the_seed_and_tied_ones_are_stored_once(command: Command) -> None:
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        assert command("new-checkpoint", "llama3_2/tiny", name, "--seed", seed)[0] == 0
    files = {name: sorted(file.name for file in Path(name).iterdir()) for name in "abc"}
    assert files["a"] == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]  # fmt: skip
    for file in files["a"]:
        assert Path("a", file).read_bytes() == Path("b", file).read_bytes(), file
        assert stat.S_IMODE(Path("a", file).stat().st_mode) == stat.S_IMODE(
            Path("a", "config.json").stat().st_mode
        )
    a, c = load_file("a/model.safetensors"), load_file("c/model.safetensors")
    assert "lm_head.weight" not in a
    embedding = "model.embed_tokens.weight"
    assert not torch.equal(a[embedding], c[embedding])
    with safe_open("a/model.safetensors", "pt") as tensors:
        assert tensors.metadata() == {"format": "pt"}


def test_dtype_is_taken_from_the_option(command: Command) -> None:
    assert command("new-checkpoint", "mistral/tiny", "new", "--dtype", "bfloat16")[0] == 0
    assert {tensor.dtype for tensor in load_file("new/model.safetensors").values()} == {torch.bfloat16}
    assert json.loads(Path("new/config.json").read_text())["dtype"] == "bfloat16"


def test_a_large_checkpoint_is_written_in_shards_with_an_index(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command("new-checkpoint", "qwen3/tiny", "whole")[0] == 0
    monkeypatch.setattr(new_checkpoint, "_SHARD_BYTES", 100_000)
    assert command("new-checkpoint", "qwen3/tiny", "parts")[0] == 0
    assert len(list(Path("parts").glob("model-0000?-of-0000?.safetensors"))) > 2
    assert command("verify", "parts")[0] == 0
    whole, parts = (AutoModelForCausalLM.from_pretrained(name).state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_what_is_written_to_dest_meanwhile_stays_and_is_one_line(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_weights = new_checkpoint._write_weights

    def meanwhile(*arguments: Any) -> int:
        Path("empty", "mine.txt").write_text("mine")
        return write_weights(*arguments)

    monkeypatch.setattr(new_checkpoint, "_write_weights", meanwhile)
    Path("empty").mkdir()
    message = "error: empty: cannot be written: empty: Directory not empty\n"
    assert command("new-checkpoint", "llama3_2/tiny", "empty") == (2, "", message)
    assert [path.name for path in Path().rglob("*")] == ["empty", "mine.txt"]


def test_verify_names_the_damage(command: Command) -> None:
    assert command("new-checkpoint", "llama3_2/tiny", "new")[0] == 0
    weights = Path("new/model.safetensors")
    good = load_file(weights)
    name = "model.layers.1.mlp.up_proj.weight"
    head = {"lm_head.weight": good["model.embed_tokens.weight"] * 2}
    save_file(good | head, weights, metadata={"format": "pt"})  # not tied after all, which is no damage
    code, stdout, _ = command("verify", "new")
    assert (code, stdout.count("note: new: lm_head.weight differs from model.embed_tokens.weight")) == (0, 1)

    def refused(change: dict[str, torch.Tensor]) -> str:
        save_file(good | change, weights, metadata={"format": "pt"})
        code, _, stderr = command("verify", "new")
        assert (code, stderr.count("\n")) == (2, 1)
        return stderr

    bad = good[name].clone()
    bad[3, 5] = torch.nan
    assert refused({name: bad}) == (
        f"error: {weights}: tensor {name!r} has 1 values that are not finite; get the checkpoint again\n"
    )
    assert name in refused({name: bad[:, :8].contiguous()})
    del good[name]
    assert "is missing" in refused({})
    weights.write_bytes(weights.read_bytes()[:-8])
    assert str(weights) in command("verify", "new")[2]
    weights.unlink()
    assert "holds no *.safetensors file" in command("verify", "new")[2]
    assert command("verify", "no") == (2, "", "error: no: no such folder\n")
