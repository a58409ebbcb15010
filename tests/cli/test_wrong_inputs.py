"""Wrong inputs, each through `lptune run` as a user types it: one line that says where, what and what to do; exit
code 2; nothing written.

A case starts from a `Job` that would run and damages one thing. Faults of checkpoints and data come twice: on
generated inputs, so that this file is complete by itself, and on real ones (the `assets` fixture), which are
larger, older and written by others. The words of a case are what the line must contain: the place (file, line,
key, tensor or argument), what was found there, and the remedy.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copyfile
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load, save_file

from lptune.data.builtin import builtin_rows
from tests.cli.conftest import Lptune

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}"
)


@dataclass
class Job:
    """A run that works, in an empty folder, until a case damages its input."""

    folder: Path
    values: dict[str, Any]
    assets: Path | None = None
    recipe: str = "full_finetune"
    config: str = "job.yaml"
    flags: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def weights(self) -> Path:
        return self.checkpoint / "model.safetensors"

    @property
    def rows(self) -> Path:
        return self.folder / self.values["data"]["source"]

    def data(self, **values: Any) -> None:
        self.values["data"] |= values

    def source(self, name: str, content: str | bytes) -> None:
        """Another file of data."""
        (self.folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
        self.data(source=name)

    def asset(self, name: str, to: str) -> Path:
        """A copy of a real input."""
        assert self.assets is not None
        return Path(copyfile(self.assets / name, self.folder / to))

    def write_config(self) -> None:
        if not (self.folder / "job.yaml").exists():
            (self.folder / "job.yaml").write_text(yaml.safe_dump(self.values), encoding="utf-8")

    def arguments(self) -> list[str]:
        return ["run", *self.flags, self.recipe, "--config", self.config, *self.overrides]


# ---- ways to damage a file


REMOVED = object()


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8")) | changes
    kept = {key: value for key, value in content.items() if value is not REMOVED}
    path.write_text(json.dumps(kept, indent=2), encoding="utf-8")


def cut(path: Path, share: float = 0.5) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


def edit_tensors(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load(path.read_bytes())
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def edit_line(path: Path, number: int, edit: Callable[[bytes], bytes]) -> None:
    lines = path.read_bytes().split(b"\n")
    lines[number - 1] = edit(lines[number - 1])
    path.write_bytes(b"\n".join(lines))


def edit_row(path: Path, number: int, edit: Callable[[dict[str, Any]], object]) -> None:
    def edited(line: bytes) -> bytes:
        row = json.loads(line)
        edit(row)
        return json.dumps(row).encode()

    edit_line(path, number, edited)


def index_of(job: Job, **changes: str) -> Path:
    """An index beside the single weight file, which says `changes` of some tensors."""
    weight_map = dict.fromkeys(load(job.weights.read_bytes()), job.weights.name) | changes
    path = job.checkpoint / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


LFS_POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:9d9f0b1e8a8ac4ee0f4a7f2b6d43c5d1b0c8d1f6f3f3a2b1c0d9e8f7a6b5c4d3\nsize 2471645608\n"
)


# ---- the cases

GENERATED, STORY, CHATS = "generated", "story", "chats"
REAL = (STORY, CHATS)


@dataclass(frozen=True)
class Case:
    damage: Callable[[Job], object]
    base: str
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.base}-{self.damage.__name__}"


CASES: list[Case] = []


def case(*words: str, on: tuple[str, ...] = (GENERATED,)) -> Callable[[Callable[[Job], object]], None]:
    """Register a damage function as one case for each base in `on`."""

    def register(damage: Callable[[Job], object]) -> None:
        CASES.extend(Case(damage, base, words) for base in on)

    return register


# Config and command line. These fail before torch is imported.


@case("job.yaml", "unknown key 'data.seqlen'", "did you mean 'data.seq_len'?")
def misspelt_key(job: Job) -> None:
    job.data(seqlen=128)


@case("argument 'optimzer.lr=1e-4'", "unknown key 'optimzer'", "did you mean 'optimizer'?")
def misspelt_key_in_an_argument(job: Job) -> None:
    job.overrides = ["optimzer.lr=1e-4"]


@case("job.yaml", "unknown key 'lr'", "did you mean 'optimizer.lr'?")
def key_in_the_wrong_section(job: Job) -> None:
    job.values["lr"] = 1e-4


@case("job.yaml", "global_batch_size: must be an integer, found 'many'")
def text_for_a_number(job: Job) -> None:
    job.values["global_batch_size"] = "many"


@case("argument 'num_steps=1.5'", "num_steps: must be an integer, found 1.5")
def fraction_for_an_integer(job: Job) -> None:
    job.overrides = ["num_steps=1.5"]


@case("argument 'micro_batch_size=-4'", "micro_batch_size: must be at least 1, found -4")
def negative_batch(job: Job) -> None:
    job.overrides = ["micro_batch_size=-4"]


@case("job.yaml", "optimizer.lr: must be greater than 0 and finite, found nan")
def learning_rate_of_nan(job: Job) -> None:
    job.values["optimizer"] = {"lr": float("nan")}


@case("argument 'precision.kind=int8'", "'int8' is not one of none, int8_rowcol", "did you mean 'int8_rowcol'?")
def misspelt_choice(job: Job) -> None:
    job.overrides = ["precision.kind=int8"]


@case("job.yaml", "data: is a section of keys, found 'rows.jsonl'")
def value_for_a_section(job: Job) -> None:
    job.values["data"] = "rows.jsonl"


@case("job.yaml", "model: is required", "set it in the file or as an argument model.path=")
def missing_key(job: Job) -> None:
    del job.values["model"]


@case("job.yaml: line 3: not valid YAML")
def broken_yaml(job: Job) -> None:
    (job.folder / "job.yaml").write_text("model: {path: checkpoint}\ndata: {source: rows.jsonl\nseed: 0\n")


@case("job.yaml", "line 3", "duplicate key seed")
def duplicate_key(job: Job) -> None:
    (job.folder / "job.yaml").write_text("model: {path: checkpoint}\nseed: 0\nseed: 1\ndata: {source: builtin}\n")


@case("job.yaml", "must hold `key: value` lines, found a list")
def list_for_a_config(job: Job) -> None:
    (job.folder / "job.yaml").write_text("- model\n- data\n")


@case("job.yaml", "global_batch_size: 6 is not a multiple of micro_batch_size (4)")
def batches_that_do_not_divide(job: Job) -> None:
    job.values |= {"global_batch_size": 6, "micro_batch_size": 4}


@case("job.yaml", "data.eval_fraction and data.eval_source exclude each other; set one of them")
def two_held_out_sets(job: Job) -> None:
    job.data(eval_fraction=0.1, eval_source="builtin")


@case("job.yaml", "model.path: Environment variable 'LPTUNE_TEST_NOT_SET' not found")
def environment_variable_that_is_not_set(job: Job) -> None:
    job.values["model"] = {"path": "${oc.env:LPTUNE_TEST_NOT_SET}"}


@case("llama3_2/1bb: no such config", "did you mean 'llama3_2/1b'?")
def misspelt_config(job: Job) -> None:
    job.config = "llama3_2/1bb"


@case("full_finetun: no such recipe", "did you mean 'full_finetune'?")
def misspelt_recipe(job: Job) -> None:
    job.recipe = "full_finetun"


@case("argument 'precision.kind'", "overrides have the form key=value")
def argument_without_a_value(job: Job) -> None:
    job.overrides = ["precision.kind"]


@case("--nproc-per-node", "must be a positive integer, found '0'")
def no_ranks(job: Job) -> None:
    job.flags = ["--nproc-per-node=0"]


@case("config.json: unknown key 'architectures'", "known: model, data", on=(STORY,))
def checkpoint_given_as_the_config(job: Job) -> None:
    job.config = "checkpoint/config.json"


@case("checkpoint/model.safetensors: is no YAML", "give the name or the path of a config", on=(STORY,))
def weights_given_as_the_config(job: Job) -> None:
    job.config = "checkpoint/model.safetensors"


# The checkpoint's config.json.


@case("model.path: chekpoint is not a folder", "lptune download", on=(GENERATED,))
def missing_checkpoint(job: Job) -> None:
    job.values["model"] = {"path": "chekpoint"}


@case("model.path: checkpoint/config.json is a file; give the checkpoint's folder, checkpoint", on=(STORY,))
def file_for_a_checkpoint(job: Job) -> None:
    job.values["model"] = {"path": "checkpoint/config.json"}


@case("checkpoint/config.json: not found", on=(GENERATED,))
def no_config_json(job: Job) -> None:
    (job.checkpoint / "config.json").unlink()


@case("checkpoint/config.json: line ", "not JSON", on=(GENERATED, STORY))
def config_json_cut_off(job: Job) -> None:
    cut(job.checkpoint / "config.json")


@case("checkpoint/config.json: model_type: 'lama' is not supported", "did you mean 'llama'?", on=(GENERATED, STORY))
def unknown_architecture(job: Job) -> None:
    edit_json(job.checkpoint / "config.json", model_type="lama")


@case("checkpoint/config.json: model_type: 'gemma3' is multimodal", "only text decoders", on=(GENERATED, STORY))
def multimodal_checkpoint(job: Job) -> None:
    edit_json(job.checkpoint / "config.json", model_type="gemma3", vision_config={"hidden_size": 64})


@case("checkpoint/config.json: num_local_experts: mixtures of experts are not supported", on=(GENERATED, STORY))
def mixture_of_experts(job: Job) -> None:
    edit_json(job.checkpoint / "config.json", num_local_experts=8)


@case("checkpoint/config.json: quantization_config", "(gptq)", "start from its unquantized original", on=(GENERATED, STORY))
def quantized_checkpoint(job: Job) -> None:
    edit_json(job.checkpoint / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})


@case("checkpoint/config.json: hidden_size: expected an integer above 0, found '128'", on=(GENERATED, STORY))
def text_for_a_number_in_config_json(job: Job) -> None:
    edit_json(job.checkpoint / "config.json", hidden_size="128")


@case("checkpoint/config.json: num_key_value_heads: 3 does not divide num_attention_heads", on=(GENERATED, STORY))
def heads_that_do_not_divide(job: Job) -> None:
    edit_json(job.checkpoint / "config.json", num_key_value_heads=3)


@case("checkpoint/config.json: rope_scaling: rope type 'llama4' is not supported", "did you mean", on=(GENERATED, STORY))
def unknown_rope(job: Job) -> None:
    edit_json(job.checkpoint / "config.json", rope_scaling={"rope_type": "llama4", "factor": 8.0})


@case("checkpoint/model.safetensors: tensor ", "config.json asks for [128256, 2048]", "do not belong together", on=(STORY,))
def config_of_another_model(job: Job) -> None:
    job.asset("configs/llama3_2_1b.json", "checkpoint/config.json")


# Its weights.


@case("checkpoint/model.safetensors: is no readable safetensors file", "download it again", on=(GENERATED, STORY))
def weights_cut_off(job: Job) -> None:
    cut(job.weights)


@case("checkpoint/model.safetensors: is no readable safetensors file", "git-lfs pointer; run `git lfs pull`", on=(GENERATED, STORY))
def weights_that_are_a_git_lfs_pointer(job: Job) -> None:
    job.weights.write_text(LFS_POINTER)


@case("checkpoint: holds only pickled weights (pytorch_model.bin)", "never loaded", "safetensors", on=(GENERATED, STORY))
def pickled_weights(job: Job) -> None:
    torch.save(load(job.weights.read_bytes()), job.checkpoint / "pytorch_model.bin")
    job.weights.unlink()


@case("checkpoint/model.safetensors: is no readable", "a pickle", "never loaded; convert it to safetensors", on=(GENERATED, STORY))
def pickled_weights_by_another_name(job: Job) -> None:
    torch.save(load(job.weights.read_bytes()), job.weights)


@case("checkpoint/model.safetensors", "stored as I8", "quantized", on=(GENERATED, STORY))
def weights_in_int8(job: Job) -> None:
    def to_int8(tensors: dict[str, torch.Tensor]) -> None:
        name = next(name for name in tensors if name.endswith("q_proj.weight"))
        tensors[name] = tensors[name].to(torch.int8)

    edit_tensors(job.weights, to_int8)


@case("tensor 'model.layers.1.mlp.up_proj.weight' is missing", "checkpoint", on=(GENERATED, STORY))
def missing_tensor(job: Job) -> None:
    edit_tensors(job.weights, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))


@case("tensor 'model.layers.0.mlp.up_proj.weight' is missing", "did you mean 'model.layers.0.mlp.up_projection.weight'?", on=(GENERATED, STORY))
def renamed_tensor(job: Job) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.up_projection.weight"] = tensors.pop("model.layers.0.mlp.up_proj.weight")

    edit_tensors(job.weights, rename)


@case("tensor 'model.layers.2.mlp.up_proj.weight' is not part of this model", on=(GENERATED, STORY))
def tensor_too_many(job: Job) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.2.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].clone()

    edit_tensors(job.weights, add)


@case("tensor 'model.norm.weight' has shape [", "config.json asks for [", on=(GENERATED, STORY))
def tensor_of_another_shape(job: Job) -> None:
    def shorten(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()

    edit_tensors(job.weights, shorten)


@case("model.safetensors.index.json: names model-00002-of-00002.safetensors, which is not in the folder", "download", on=(GENERATED, STORY))
def index_that_names_a_missing_file(job: Job) -> None:
    index_of(job, **{"model.norm.weight": "model-00002-of-00002.safetensors"})


@case("model.safetensors.index.json", "'model.norm.bias'", on=(GENERATED, STORY))
def index_that_names_a_missing_tensor(job: Job) -> None:
    index_of(job, **{"model.norm.bias": "model.safetensors"})


@case("model.safetensors.index.json", "'../elsewhere/model.safetensors'", on=(GENERATED,))
def index_that_leaves_the_folder(job: Job) -> None:
    index_of(job, **{"model.norm.weight": "../elsewhere/model.safetensors"})


@case("checkpoint: holds 2 safetensors files but no model.safetensors.index.json", on=(STORY,))
def shards_without_an_index(job: Job) -> None:
    copyfile(job.weights, job.checkpoint / "model-00002-of-00002.safetensors")


# Its tokenizer.


@case("checkpoint/tokenizer.json: not found", "copy it from the original checkpoint", on=(GENERATED, STORY))
def no_tokenizer(job: Job) -> None:
    (job.checkpoint / "tokenizer.json").unlink()


@case("checkpoint/tokenizer.json: ", "line", "copy it again", on=(GENERATED, STORY))
def tokenizer_cut_off(job: Job) -> None:
    cut(job.checkpoint / "tokenizer.json")


@case("checkpoint/tokenizer.json: not a tokenizer", on=(GENERATED, STORY))
def tokenizer_of_an_unknown_kind(job: Job) -> None:
    edit_json(job.checkpoint / "tokenizer.json", model={"type": "Morse"})


@case("checkpoint: token ", "the model's vocabulary ends at 2047", "use the tokenizer that belongs to the model", on=(STORY,))
def tokenizer_of_a_larger_model(job: Job) -> None:
    job.asset("tokenizers/gpt2/tokenizer.json", "checkpoint/tokenizer.json")


@case("checkpoint/tokenizer_config.json", "copy it again", on=(GENERATED, STORY))
def tokenizer_config_cut_off(job: Job) -> None:
    cut(job.checkpoint / "tokenizer_config.json")


# Data: the file.


@case("rows.jsnl: no such file", "did you mean 'rows.jsonl'?", "data.source", on=(GENERATED, STORY))
def misspelt_source(job: Job) -> None:
    job.data(source="rows.jsnl")


@case("is a folder; data.source must name one of its files: rows.jsonl", on=(GENERATED,))
def folder_for_a_source(job: Job) -> None:
    job.data(source=str(job.folder))


@case("rows.jsonl: is empty", "data.source", on=(GENERATED, STORY))
def empty_source(job: Job) -> None:
    job.rows.write_bytes(b"")


@case("rows.jsonl line 57: not valid JSON", "column", "fix the line (or set data.on_bad_row=skip)", on=(GENERATED, STORY))
def broken_line_in_the_middle(job: Job) -> None:
    edit_line(job.rows, 57, lambda line: line[: len(line) // 2])


@case("rows.jsonl line 57: must be a JSON object", "found a list", "on_bad_row=skip", on=(GENERATED, STORY))
def line_that_is_a_list(job: Job) -> None:
    edit_line(job.rows, 57, lambda line: json.dumps(list(json.loads(line).values())).encode())


@case("rows.jsonl line 33: not UTF-8 text (byte 0xff)", "save the file as UTF-8", on=(GENERATED, STORY))
def source_that_is_not_utf8(job: Job) -> None:
    edit_line(job.rows, 33, lambda line: line[:20] + b"\xff" + line[20:])


@case("rows.json line 3: not valid JSON", "fix the file", on=(GENERATED, STORY))
def json_list_without_commas(job: Job) -> None:
    job.source("rows.json", b"[\n" + job.rows.read_bytes())


@case("rows.csv line 3: has 3 fields, the header has 2; check commas and quotes", on=(GENERATED, STORY))
def csv_with_an_unquoted_comma(job: Job) -> None:
    rows = [list(json.loads(line).values()) for line in job.rows.read_text().splitlines()[:5]]
    quoted = [",".join('"' + text.replace('"', '""').replace("\n", " ") + '"' for text in row) for row in rows]
    job.source("rows.csv", "\n".join(["prompt,response", quoted[0], quoted[1] + ",more", *quoted[2:]]) + "\n")


@case("rows.xlsx: unknown kind of file '.xlsx'", "data.source reads .json, .jsonl", on=(GENERATED,))
def spreadsheet_for_a_source(job: Job) -> None:
    job.source("rows.xlsx", b"PK\x03\x04")


# Data: its rows.


@case("rows.jsonl line 57: has no column", "its columns:", "on_bad_row=skip", on=(GENERATED, STORY))
def row_without_a_response(job: Job) -> None:
    edit_row(job.rows, 57, lambda row: row.pop(list(row)[-1]))


@case("rows.jsonl line 57: column", "is empty; give it text or remove the row", on=(GENERATED, STORY))
def row_with_an_empty_response(job: Job) -> None:
    edit_row(job.rows, 57, lambda row: row.update({list(row)[-1]: " "}))


@case("rows.jsonl line 57: column", "must be text, found a dict", on=(GENERATED, STORY))
def row_with_an_object_for_text(job: Job) -> None:
    edit_row(job.rows, 57, lambda row: row.update({list(row)[-1]: {"text": "42"}}))


@case("rows.jsonl: cannot tell", "set data.prompt_column", "its columns: q, a", on=(GENERATED, STORY))
def columns_that_nobody_knows(job: Job) -> None:
    rows = [json.loads(line) for line in job.rows.read_text().splitlines()]
    job.rows.write_text("\n".join(json.dumps(dict(zip("qa", row.values(), strict=True))) for row in rows))


@case("data.response_column", "has no column 'anwser'", "did you mean 'answer'?", "its columns: question, answer", on=(STORY,))
def column_that_is_not_there(job: Job) -> None:
    job.data(response_column="anwser")


@case("data.prompt_template", "has no column 'queston'", "did you mean 'question'?", on=(STORY,))
def template_with_an_unknown_column(job: Job) -> None:
    job.data(prompt_template="Q: {queston}\nA: ")


@case("seeds.jsonl: column 'instances' holds nested rows", "write one row for each of them", on=(STORY,))
def nested_rows(job: Job) -> None:
    job.asset("data/alpaca_seed_tasks.jsonl", "seeds.jsonl")
    job.data(source="seeds.jsonl")


@case("dpo.json: holds preferences", "set data.response_column=chosen", on=(STORY,))
def preference_rows(job: Job) -> None:
    job.asset("data/dpo_en_demo.json", "dpo.json")
    job.data(source="dpo.json")


@case("data.seq_len=2", "all ", "rows are masked", "raise data.seq_len", on=(GENERATED, STORY))
def rows_cut_before_their_first_target(job: Job) -> None:
    job.data(seq_len=2)


@case("data.eval_fraction", "one document", "set data.eval_source or 0", on=(GENERATED, STORY))
def one_row_to_hold_out_from(job: Job) -> None:
    job.data(max_rows=1, eval_fraction=0.1)


# Data: chats.


@case("checkpoint: has no chat template", "set data.chat_template", on=(GENERATED, CHATS))
def chats_without_a_template(job: Job) -> None:
    as_chats(job)
    job.data(chat_template="none")


@case("rows.jsonl line 7", "unknown role 'asistant'", "did you mean 'assistant'?", on=(GENERATED, CHATS))
def unknown_role(job: Job) -> None:
    as_chats(job)
    edit_row(job.rows, 7, lambda row: row["messages"][-1].update(role="asistant"))


@case("rows.jsonl line 7", "no assistant message", "on_bad_row=skip", on=(GENERATED, CHATS))
def conversation_without_an_answer(job: Job) -> None:
    as_chats(job)
    edit_row(job.rows, 7, lambda row: row["messages"].pop())


@case("rows.jsonl line 7", "message", "content parts that are no text (image_url)", on=(GENERATED, CHATS))
def image_in_a_conversation(job: Job) -> None:
    as_chats(job)
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "x.png"}}]
    edit_row(job.rows, 7, lambda row: row["messages"][0].update(content=parts))


@case("data.chat_template: line 2: not a jinja template", "endfor", on=(GENERATED, CHATS))
def template_with_a_syntax_error(job: Job) -> None:
    as_chats(job)
    job.data(chat_template="{{ bos_token }}\n{% for m in messages %}{{ m.content }}{% end %}")


@case("rows.jsonl line 1: the chat template refuses it: Only user and assistant!", "data.chat_template", on=(GENERATED, CHATS))
def template_that_refuses(job: Job) -> None:
    as_chats(job)
    job.data(chat_template="{{ raise_exception('Only user and assistant!') }}")


@case("rows.jsonl line 1: the chat template", "'colour' is undefined", "data.chat_template", on=(GENERATED, CHATS))
def template_with_an_undefined_name(job: Job) -> None:
    as_chats(job)
    job.data(chat_template="{% for m in messages %}{{ m.content + colour.red }}{% endfor %}")


@case("data.chat_template: 'chatml.jinja' is neither a jinja template nor an existing file", on=(GENERATED, CHATS))
def template_file_that_is_not_there(job: Job) -> None:
    as_chats(job)
    job.data(chat_template="chatml.jinja")


@case("glaive.json row 3", "message 2 of 'conversations'", "on_bad_row=skip", on=(CHATS,))
def tool_call_without_a_name(job: Job) -> None:
    path = job.asset("data/glaive_toolcall_en_demo.json", "glaive.json")
    rows = json.loads(path.read_text())
    rows[2]["conversations"][1] = {"from": "function_call", "value": "{}"}
    path.write_text(json.dumps(rows))
    job.data(source="glaive.json")


@case("dpo.json: holds preferences", "set data.response_column=chosen", on=(CHATS,))
def preferences_in_chats(job: Job) -> None:
    job.asset("data/dpo_en_demo.json", "dpo.json")
    job.data(source="dpo.json")


# The machine, and what runs left behind.


@case("output_dir: taken is a file; choose another folder", on=(GENERATED,))
def file_for_an_output_dir(job: Job) -> None:
    (job.folder / "taken").write_text("mine")
    job.values["output_dir"] = "taken"


@case("output_dir: ", "taken is a file; choose another folder", on=(GENERATED,))
def file_above_the_output_dir(job: Job) -> None:
    (job.folder / "taken").write_text("mine")
    job.values["output_dir"] = "taken/runs/1"


@case("output_dir: /proc/lptune cannot be made", "choose another folder", on=(GENERATED,))
def output_dir_where_nothing_can_be_written(job: Job) -> None:
    job.values["output_dir"] = "/proc/lptune"


@case("output_dir: old holds another run", "resume=auto", on=(GENERATED,))
def output_dir_of_another_run(job: Job) -> None:
    (job.folder / "old").mkdir()
    (job.folder / "old" / "metrics.jsonl").write_text("{}\n")
    job.values |= {"output_dir": "old", "resume": "none"}


@case("resume: runs/1/checkpoints/step-00000004: no such", "give another checkpoint, auto or none", on=(GENERATED,))
def resume_from_nothing(job: Job) -> None:
    job.overrides = ["resume=runs/1/checkpoints/step-00000004"]


@case("step-00000004: has no manifest.json", "it is no finished checkpoint", on=(GENERATED,))
def resume_from_an_unfinished_checkpoint(job: Job) -> None:
    folder = job.folder / "step-00000004"
    folder.mkdir()
    copyfile(job.weights, folder / "model-00000.safetensors")
    job.overrides = ["resume=step-00000004"]


@case("device: cuda was asked for", "set device=cpu or auto", on=(GENERATED,))
def cuda_where_there_is_none(job: Job) -> None:
    job.environment["CUDA_VISIBLE_DEVICES"] = ""
    job.overrides = ["device=cuda"]


@case("compile: needs a C++ compiler", "/nonexistent/c++", "install one or set compile=none", on=(GENERATED,))
def compile_without_a_compiler(job: Job) -> None:
    job.environment["CXX"] = "/nonexistent/c++"
    job.overrides = ["compile=block"]


@case("logging.trackio_project", "pip install 'lptune[trackio]'", on=(GENERATED,))
def missing_extra(job: Job) -> None:
    job.overrides = ["logging.trackio_project=mine"]


@case("precision.skip", "'lm_haed' matches no linear layer", "did you mean", on=(GENERATED,))
def skip_that_matches_nothing(job: Job) -> None:
    job.overrides = ["precision.kind=int8_rowcol", "precision.skip=[lm_haed]"]


@case("precision.kind: int8_rowcol would convert no layer", "precision.skip", on=(GENERATED, STORY))
def precision_without_a_layer(job: Job) -> None:
    job.overrides = ["precision.kind=int8_rowcol", "precision.skip=[*]"]


@case("LPTUNE_KERNELS='cuda': must be one of torch, reference", on=(GENERATED,))
def unknown_kernels(job: Job) -> None:
    job.environment["LPTUNE_KERNELS"] = "cuda"
    job.overrides = ["precision.kind=int8_rowcol"]


@case("global_batch_size: 8 rows in micro-batches of 4 do not divide among 3 data ranks", "1, 2", on=(GENERATED,))
def ranks_that_do_not_divide_the_batch(job: Job) -> None:
    job.flags = ["--nproc-per-node=3"]


def as_chats(job: Job) -> None:
    """Pairs of the generated rows as conversations; real chats stay."""
    rows = [json.loads(line) for line in job.rows.read_text().splitlines()]
    if "messages" not in rows[0]:
        chats = []
        for row in rows:
            user, assistant = list(row.values())
            messages = [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
            chats.append(json.dumps({"messages": messages}))
        job.rows.write_text("\n".join(chats) + "\n")


# ---- the tests


@pytest.fixture(scope="session")
def generated_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from lptune.cli.main import main

    folder = tmp_path_factory.mktemp("wrong") / "checkpoint"
    with pytest.raises(SystemExit):
        main(["new-checkpoint", "llama3_2/tiny", str(folder)])
    return folder


def make_job(base: str, folder: Path, checkpoint: Path, assets: Path | None = None) -> Job:
    """A run of a few rows that works."""
    (folder / "checkpoint").mkdir()
    for path in checkpoint.iterdir():  # contents, not permissions: assets are read-only
        copyfile(path, folder / "checkpoint" / path.name)
    if assets is None:
        lines = [json.dumps(row) for row in builtin_rows(128)]
    else:
        name = {STORY: "gsm8k_train.jsonl", CHATS: "openai_messages.jsonl"}[base]
        lines = (assets / "data" / name).read_text().splitlines()[:128]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    values: dict[str, Any] = {
        "model": {"path": "checkpoint"},
        "data": {"source": "rows.jsonl", "seq_len": 512},
        "compile": "none",
        "device": "cpu",
        "global_batch_size": 8,
        "num_steps": 1,
        "output_dir": "runs/1",
    }
    if base == CHATS:
        values["data"]["chat_template"] = TEMPLATE
    return Job(folder, values, assets)
