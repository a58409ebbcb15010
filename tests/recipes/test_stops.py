"""A base model that names another end: what its export's generation stops at, for every training recipe."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lptune.data import load_tokenizer
from tests.helpers import warm
from tests.helpers.tiny_recipe import write_config, write_labelled, write_preferences, write_texts
from tests.recipes.conftest import runner

BASE_END, CLOSING = "<|pad|>", "<|im_end|>"


@pytest.fixture(scope="module")
def base(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint as a base model: no file of it says that `<|im_end|>` ends an answer."""
    folder = shutil.copytree(tiny_checkpoint, tmp_path_factory.mktemp("base") / "model")
    end = load_tokenizer(folder).backend.token_to_id(BASE_END)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"eos_token_id": end}), encoding="utf-8")
    (folder / "generation_config.json").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    named = json.loads(path.read_text("utf-8")) | {"eos_token": BASE_END}
    path.write_text(json.dumps(named), encoding="utf-8")
    return folder


def _pairs(path: Path, count: int) -> Path:
    rows = [{"prompt": f"say {i % 7}", "response": "yes"} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


RECIPES: dict[str, tuple[Callable[[Path, int], Path], dict[str, Any]]] = {
    "full_finetune": (_pairs, {}),
    "full_dpo": (write_preferences, {"preference": {"loss": "simpo"}}),
    "full_kto": (write_labelled, {}),
    "distill": (_pairs, {}),
    "continued_pretrain": (write_texts, {}),
}


def _ids(folder: Path, *texts: str) -> list[int]:
    return [load_tokenizer(folder).backend.token_to_id(text) for text in texts]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipes_export_ends_generation_where_its_rows_end_answers(
    base: Path, tmp_path: Path, recipe: str
) -> None:
    """Raw text ends with the base's own token: continued_pretrain changes no file, chat template or not."""
    write, keys = RECIPES[recipe]
    source = write(tmp_path / "rows.jsonl", 64)
    teacher = {"teacher": {"path": str(base)}} if recipe == "distill" else {}
    config = write_config(
        tmp_path / "run.yaml", base, tmp_path / "run", data={"source": str(source), "seq_len": 192},
        num_steps=2, schedule={"warmup_steps": 1}, eval_every_steps=0, **keys, **teacher,
    )  # fmt: skip
    said = runner(recipe, config)().stdout
    export = tmp_path / "run" / "export"
    if recipe == "continued_pretrain":
        assert not (export / "generation_config.json").exists()
        assert "generation_config.json" not in said
        return
    content = json.loads((export / "generation_config.json").read_text("utf-8"))
    assert content["eos_token_id"] == _ids(base, BASE_END, CLOSING)
    assert f"generation ends at {CLOSING}" in said


def test_transformers_stops_where_lptune_does(base: Path, tmp_path: Path) -> None:
    """With the export of a run, and with what `lptune export` makes of its checkpoint elsewhere."""
    import transformers

    config = write_config(
        tmp_path / "run.yaml", base, tmp_path / "run", num_steps=40, eval_every_steps=0,
        data={"source": str(_pairs(tmp_path / "rows.jsonl", 64)), "seq_len": 64}, optimizer={"lr": 1e-2},
    )  # fmt: skip
    runner("full_finetune", config)("optimizer.ema_decay=0.5")
    again = tmp_path / "again"
    warm.lptune(["export", str(tmp_path / "run"), str(again)], folder=tmp_path).check_returncode()
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "say 3"}\n', encoding="utf-8")
    for number, model in enumerate([tmp_path / "run", tmp_path / "run" / "export", again]):
        output = tmp_path / f"answers-{number}.jsonl"
        runner("generate", _generation(tmp_path, model, prompts, output))()
        assert json.loads(output.read_text("utf-8"))["generated"] == "yes"
    tokenizer = load_tokenizer(again)
    chat = [{"role": "user", "content": "say 3"}]
    ids = tokenizer.encode(tokenizer.render_chat(chat, add_generation_prompt=True), add_special=False)
    for folder in (tmp_path / "run" / "export", again):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        found = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=12)
        answer = found[0, len(ids) :].tolist()
        assert tokenizer.decode(answer, skip_special=False) == f"yes{CLOSING}"


def _generation(folder: Path, model: Path, prompts: Path, output: Path) -> Path:
    path = folder / "generation.yaml"
    content = {
        "model": {"path": str(model)}, "prompts": {"source": str(prompts)}, "output": str(output),
        "sampling": {"temperature": 0, "max_new_tokens": 12}, "compute_dtype": "float32", "device": "cpu",
    }  # fmt: skip
    path.write_text(json.dumps(content), encoding="utf-8")
    return path
