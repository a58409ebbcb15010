"""Wrong inputs to `lptune run`: one line that says where, what and what to do; exit code 2; nothing written.

A case starts from a `Job` that works and damages one thing. Its words are what the line must contain: the
place (file, line, key, tensor or argument), what was found there, and the remedy.

Faults of checkpoints and data come on generated inputs, so that this file is complete by itself, and many of
them on real ones too (the `assets` fixture), which are larger, older and written by others. All faults of the
command line and one of each real input run as a user types them; the others are forked off a process that has
imported torch already (tests/helpers/warm.py), or they would take minutes.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copyfile
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load, save_file

from lptune.cli.main import fail
from lptune.data.builtin import builtin_rows
from tests.cli.conftest import Lptune
from tests.helpers import warm
from tests.helpers.cold import Finished
from tests.helpers.told import only_told

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}"
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
        """A copy of a real input (contents, not permissions: the originals are read-only)."""
        assert self.assets is not None
        copy_into(self.assets / name, self.folder / to)
        return self.folder / to

    def config_text(self, text: str) -> None:
        """job.yaml as written by hand."""
        (self.folder / "job.yaml").write_text(text, encoding="utf-8")

    def config_json(self, **changes: Any) -> None:
        """Other values in the checkpoint's config.json."""
        edit_json(self.checkpoint / "config.json", **changes)

    def write_config(self) -> None:
        """job.yaml from `values`, unless a case wrote its own."""
        if not (self.folder / "job.yaml").exists():
            self.config_text(yaml.safe_dump(self.values))

    def arguments(self) -> list[str]:
        return ["run", *self.flags, self.recipe, "--config", self.config, *self.overrides]


# ---- ways to damage a file


def copy_into(source: Path, target: Path) -> None:
    """A file, or a folder of files."""
    if source.is_dir():
        target.mkdir()
        for path in source.iterdir():
            copyfile(path, target / path.name)
    else:
        copyfile(source, target)


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | changes, indent=2), encoding="utf-8")


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


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


def index_of(job: Job, changes: dict[str, str]) -> None:
    """Writes an index beside the weight file, right but for `changes`. A model.safetensors would be read and
    the index not, so the file gets another name.
    """
    weights = job.weights.rename(job.weights.with_name("weights.safetensors"))
    weight_map = dict.fromkeys(load(weights.read_bytes()), weights.name) | changes
    path = job.checkpoint / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


LFS_POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:9d9f0b1e8a8ac4ee0f4a7f2b6d43c5d1b0c8d1f6f3f3a2b1c0d9e8f7a6b5c4d3\nsize 2471645608\n"
)


# ---- the cases


CONFIG = "config"
"""The command line and the YAML: these fail before a checkpoint is looked at."""
GENERATED = "generated"
"""A checkpoint of `lptune new-checkpoint` and rows of the built-in set."""
STORY, CHATS = "story", "chats"
"""story_llama with gsm8k_train.jsonl, and with openai_messages.jsonl and a chat template."""
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


def case(*words: str, on: tuple[str, ...]) -> Callable[[Callable[[Job], object]], None]:
    """Registers a damage function as one case for each base in `on`."""

    def register(damage: Callable[[Job], object]) -> None:
        CASES.extend(Case(damage, base, words) for base in on)

    return register


# The command line and the config.


@case("job.yaml: unknown key 'data.seqlen'", "did you mean 'data.seq_len'?", on=(CONFIG,))
def misspelt_key(job: Job) -> None:
    job.data(seqlen=128)


@case("argument 'optimzer.lr=1e-4': unknown key 'optimzer'", "did you mean 'optimizer'?", on=(CONFIG,))
def misspelt_key_in_an_argument(job: Job) -> None:
    job.overrides = ["optimzer.lr=1e-4"]


@case("job.yaml: unknown key 'lr'", "did you mean 'optimizer.lr'?", on=(CONFIG,))
def key_in_the_wrong_section(job: Job) -> None:
    job.values["lr"] = 1e-4


@case("job.yaml: global_batch_size: must be an integer, found 'many'", on=(CONFIG,))
def text_for_a_number(job: Job) -> None:
    job.values["global_batch_size"] = "many"


@case("argument 'num_steps=1.5': num_steps: must be an integer, found 1.5", on=(CONFIG,))
def fraction_for_an_integer(job: Job) -> None:
    job.overrides = ["num_steps=1.5"]


@case("argument 'micro_batch_size=-4': micro_batch_size: must be at least 1, found -4", on=(CONFIG,))
def negative_batch(job: Job) -> None:
    job.overrides = ["micro_batch_size=-4"]


@case("job.yaml: optimizer.lr: must be greater than 0 and finite, found nan", on=(CONFIG,))
def learning_rate_of_nan(job: Job) -> None:
    job.values["optimizer"] = {"lr": float("nan")}


@case(
    "argument 'precision.kind=int8'",
    "not one of its 11 choices",
    "mean 'int8_rowcol'?",
    on=(CONFIG,),
)
def misspelt_choice(job: Job) -> None:
    job.overrides = ["precision.kind=int8"]


@case("job.yaml: data: is a section of keys, found 'rows.jsonl'", on=(CONFIG,))
def value_for_a_section(job: Job) -> None:
    job.values["data"] = "rows.jsonl"


@case("argument 'seed.x=5': seed: must be an integer", on=(CONFIG,))
def section_for_a_value(job: Job) -> None:
    job.overrides = ["seed.x=5"]


@case("job.yaml: model: is required; set it in the file or as an argument model.path=", on=(CONFIG,))
def missing_key(job: Job) -> None:
    del job.values["model"]


@case("job.yaml: line 3: not valid YAML", on=(CONFIG,))
def broken_yaml(job: Job) -> None:
    job.config_text("model: {path: checkpoint}\ndata: {source: rows.jsonl\nseed: 0\n")


@case("job.yaml: line 2: not valid YAML", "put text that starts with * or & in quotes", on=(CONFIG,))
def glob_without_quotes(job: Job) -> None:
    job.config_text("model: {path: checkpoint}\nprecision: {skip: [*.o_proj]}\n")


@case("job.yaml: line 3: not valid YAML: found duplicate key seed", on=(CONFIG,))
def duplicate_key(job: Job) -> None:
    job.config_text("model: {path: checkpoint}\nseed: 0\nseed: 1\ndata: {source: builtin}\n")


@case("job.yaml: must hold `key: value` lines, found a list", on=(CONFIG,))
def list_for_a_config(job: Job) -> None:
    job.config_text("- model\n- data\n")


@case("job.yaml: global_batch_size: 6 is not a multiple of micro_batch_size (4)", on=(CONFIG,))
def batches_that_do_not_divide(job: Job) -> None:
    job.values |= {"global_batch_size": 6, "micro_batch_size": 4}


@case("micro_batch_size: 4 rows of data.seq_len=1000000000000", "lower one of the two", on=(CONFIG,))
def rows_without_measure(job: Job) -> None:
    job.data(seq_len=10**12)


@case("job.yaml: data.eval_fraction and data.eval_source exclude", "set one of them", on=(CONFIG,))
def two_held_out_sets(job: Job) -> None:
    job.data(eval_fraction=0.1, eval_source="builtin")


@case("job.yaml: model.path: ~nobody-here/model: there is no such user's home", on=(GENERATED,))
def home_of_nobody(job: Job) -> None:
    job.values["model"] = {"path": "~nobody-here/model"}


@case("job.yaml: checkpoint.keep_best: needs evaluations; set data.eval_fraction", on=(GENERATED,))
def the_best_of_what_is_never_evaluated(job: Job) -> None:
    job.values["checkpoint"] = {"keep_best": 1}


@case(
    "job.yaml: checkpoint.keep_best: uses evaluations",
    "a multiple of eval_every_steps (4)",
    on=(GENERATED,),
)
def the_best_of_checkpoints_that_miss_the_evaluations(job: Job) -> None:
    job.data(eval_fraction=0.1)
    job.values |= {"checkpoint": {"keep_best": 1, "every_steps": 6}, "eval_every_steps": 4}


@case(
    "job.yaml: checkpoint.at_end: false leaves nothing to export; set export.enabled=false", on=(GENERATED,)
)
def an_export_of_nothing(job: Job) -> None:
    job.values["checkpoint"] = {"at_end": False}


@case("job.yaml: output_dir: checkpoint would overwrite the model in model.path", on=(GENERATED,))
def the_models_folder_for_output(job: Job) -> None:
    job.values["output_dir"] = "checkpoint"


@case("job.yaml: model.path: Environment variable 'LPTUNE_TEST_NOT_SET' not found", on=(CONFIG,))
def environment_variable_that_is_not_set(job: Job) -> None:
    job.values["model"] = {"path": "${oc.env:LPTUNE_TEST_NOT_SET}"}


@case("job.yaml: output_dir: is not a path: a name in it is longer than 255 bytes", on=(CONFIG,))
def name_longer_than_any_file_system_takes(job: Job) -> None:
    job.values["output_dir"] = "runs/" + "x" * 300


@case("llama3_2/1bb: no such config", "did you mean 'llama3_2/1b'?", on=(CONFIG,))
def misspelt_config(job: Job) -> None:
    job.config = "llama3_2/1bb"


@case("full_finetun: no such recipe", "did you mean 'full_finetune'?", on=(CONFIG,))
def misspelt_recipe(job: Job) -> None:
    job.recipe = "full_finetun"


@case("argument 'precision.kind': overrides have the form key=value", on=(CONFIG,))
def argument_without_a_value(job: Job) -> None:
    job.overrides = ["precision.kind"]


@case("run: --nproc-per-node: must be a positive integer, found '0'", on=(CONFIG,))
def no_ranks(job: Job) -> None:
    job.flags = ["--nproc-per-node=0"]


@case("12 rows in micro-batches of 4", "among 2 data ranks; set micro_batch_size=3", on=(CONFIG,))
def ranks_that_do_not_divide_the_batch(job: Job) -> None:
    job.flags = ["--nproc-per-node=2"]
    job.values["global_batch_size"] = 12


@case("checkpoint/config.json: unknown key 'architectures'; known: model, data", on=(STORY,))
def checkpoint_given_as_the_config(job: Job) -> None:
    job.config = "checkpoint/config.json"


@case("checkpoint/model.safetensors: is not UTF-8 text; a config is a YAML file", on=(STORY,))
def weights_given_as_the_config(job: Job) -> None:
    job.config = "checkpoint/model.safetensors"


# The checkpoint's config.json.


@case("model.path: chekpoint is not a folder; `lptune download` fetches one", on=(GENERATED,))
def missing_checkpoint(job: Job) -> None:
    job.values["model"] = {"path": "chekpoint"}


@case(
    "model.path: checkpoint/config.json is a file; give the checkpoint's folder, checkpoint", on=(GENERATED,)
)
def file_for_a_checkpoint(job: Job) -> None:
    job.values["model"] = {"path": "checkpoint/config.json"}


@case("checkpoint/config.json: not found; expected the folder of a Hugging Face checkpoint", on=(GENERATED,))
def no_config_json(job: Job) -> None:
    (job.checkpoint / "config.json").unlink()


@case("checkpoint/config.json: line ", "not valid JSON", "download it again", on=(GENERATED, STORY))
def config_json_cut_off(job: Job) -> None:
    cut(job.checkpoint / "config.json")


@case("checkpoint/config.json: model_type: 'lama' is not supported (llama, mistral", on=(GENERATED, STORY))
def unknown_architecture(job: Job) -> None:
    job.config_json(model_type="lama")


@case("checkpoint/config.json: model_type: 'gemma3' is multimodal; only text", on=(GENERATED, STORY))
def multimodal_checkpoint(job: Job) -> None:
    job.config_json(model_type="gemma3", vision_config={"hidden_size": 64})


@case("checkpoint/config.json: num_local_experts: mixtures of experts", "dense", on=(GENERATED, STORY))
def mixture_of_experts(job: Job) -> None:
    job.config_json(num_local_experts=8)


@case("checkpoint/config.json: quantization_config:", "(gptq); start from", on=(GENERATED,))
def quantized_checkpoint(job: Job) -> None:
    job.config_json(quantization_config={"quant_method": "gptq", "bits": 4})


@case("checkpoint/config.json: architectures: expected a ...ForCausalLM checkpoint", on=(GENERATED,))
def classifier(job: Job) -> None:
    job.config_json(architectures=["LlamaForSequenceClassification"])


@case("checkpoint/config.json: hidden_size: expected an integer above 0, found '128'", on=(GENERATED,))
def text_for_a_number_in_config_json(job: Job) -> None:
    job.config_json(hidden_size="128")


@case("checkpoint/config.json: num_hidden_layers: 1000000000 is", "download", on=(GENERATED,))
def layers_without_measure(job: Job) -> None:
    job.config_json(num_hidden_layers=10**9)


@case("checkpoint/config.json: num_key_value_heads: 3 does not divide num_attention_heads", on=(GENERATED,))
def heads_that_do_not_divide(job: Job) -> None:
    job.config_json(num_key_value_heads=3)


@case("checkpoint/config.json: rope_scaling: rope type 'llama4' is not supported", on=(GENERATED,))
def unknown_rope(job: Job) -> None:
    job.config_json(rope_scaling={"rope_type": "llama4", "factor": 8.0})


@case("tiny/config.json: rope_scaling: factor: expected a number above 0, found null", on=(STORY,))
def rope_without_its_factor(job: Job) -> None:
    folder = job.asset("models/tiny_llama3", "tiny")
    rope = json.loads((folder / "config.json").read_text())["rope_scaling"]
    edit_json(folder / "config.json", rope_scaling={k: v for k, v in rope.items() if k != "factor"})
    job.values["model"] = {"path": "tiny"}


@case(
    "checkpoint/model.safetensors: tensor ",
    "config.json asks for [128256, 2048]",
    "do not belong",
    on=(STORY,),
)
def config_of_another_model(job: Job) -> None:
    job.asset("configs/llama3_2_1b.json", "checkpoint/config.json")


# Its weights.


@case("model.safetensors: is no readable safetensors file:", "download it again", on=(GENERATED, STORY))
def weights_cut_off(job: Job) -> None:
    cut(job.weights)


@case("model.safetensors: is no readable safetensors file:", "download it again", on=(GENERATED,))
def byte_of_the_header_changed(job: Job) -> None:
    content = bytearray(job.weights.read_bytes())
    content[20] ^= 0xFF
    job.weights.write_bytes(content)


@case("model.safetensors:", "it is a git-lfs pointer; run `git lfs pull`", on=(GENERATED,))
def weights_that_are_a_git_lfs_pointer(job: Job) -> None:
    job.weights.write_text(LFS_POINTER)


@case("checkpoint: holds only pickled weights (pytorch_model.bin)", "never loaded", on=(GENERATED, STORY))
def pickled_weights(job: Job) -> None:
    torch.save(load(job.weights.read_bytes()), job.checkpoint / "pytorch_model.bin")
    job.weights.unlink()


@case("model.safetensors:", "a pickle", "never loaded; convert it to safetensors", on=(GENERATED, STORY))
def pickled_weights_by_another_name(job: Job) -> None:
    torch.save(load(job.weights.read_bytes()), job.weights)


@case("checkpoint: holds an adapter", "merge it into its base model first", on=(GENERATED,))
def adapter_for_a_model(job: Job) -> None:
    (job.checkpoint / "adapter_config.json").write_text("{}")
    job.weights.rename(job.checkpoint / "adapter_model.safetensors")


@case("model.safetensors: tensor '", "stored as I8; only F64, F32, BF16, F16", on=(GENERATED, STORY))
def weights_in_int8(job: Job) -> None:
    def to_int8(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)

    edit_tensors(job.weights, to_int8)


@case("checkpoint: tensor '", "mlp.up_proj.weight' is missing; download", on=(GENERATED,))
def missing_tensor(job: Job) -> None:
    edit_tensors(job.weights, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))


@case("checkpoint: tensor '", "is missing", "did you mean 'model.layers.0.mlp.up.weight'?", on=(GENERATED,))
def renamed_tensor(job: Job) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.up.weight"] = tensors.pop("model.layers.0.mlp.up_proj.weight")

    edit_tensors(job.weights, rename)


@case("model.safetensors: tensor 'model.layers.2.", "is not part of this model", on=(GENERATED,))
def tensor_too_many(job: Job) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.2.input_layernorm.weight"] = tensors["model.norm.weight"].clone()

    edit_tensors(job.weights, add)


@case("model.safetensors: tensor 'model.norm.weight' has shape [", "asks for [", on=(GENERATED, STORY))
def tensor_of_another_shape(job: Job) -> None:
    def shorten(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()

    edit_tensors(job.weights, shorten)


@case("index.json: names model-2.safetensors, which is not in the folder; download", on=(GENERATED, STORY))
def index_that_names_a_missing_file(job: Job) -> None:
    index_of(job, {"model.norm.weight": "model-2.safetensors"})


@case("index.json: says that weights.safetensors holds 'model.norm.bias'", "download", on=(GENERATED,))
def index_that_names_a_missing_tensor(job: Job) -> None:
    index_of(job, {"model.norm.bias": "weights.safetensors"})


@case("index.json:", "'../model.safetensors'; a plain *.safetensors file name is needed", on=(GENERATED,))
def index_that_leaves_the_folder(job: Job) -> None:
    index_of(job, {"model.norm.weight": "../model.safetensors"})


@case("checkpoint: holds 2 safetensors files but no model.safetensors.index.json", on=(GENERATED,))
def shards_without_an_index(job: Job) -> None:
    copyfile(job.weights, job.checkpoint / "model-2.safetensors")
    job.weights.rename(job.checkpoint / "model-1.safetensors")


# Its tokenizer.


@case("checkpoint/tokenizer.json: not found", "copy it from the original checkpoint", on=(GENERATED,))
def no_tokenizer(job: Job) -> None:
    (job.checkpoint / "tokenizer.json").unlink()


@case("tiny/tokenizer.json: not found", "copy it from the original checkpoint", on=(STORY,))
def checkpoint_that_came_without_a_tokenizer(job: Job) -> None:
    job.asset("models/tiny_qwen3", "tiny")
    job.values["model"] = {"path": "tiny"}


@case("checkpoint/tokenizer.json: cannot be read as JSON", "copy it again", on=(GENERATED, STORY))
def tokenizer_cut_off(job: Job) -> None:
    cut(job.checkpoint / "tokenizer.json")


@case("checkpoint: AutoTokenizer", "tokenizer.json", "copy them again", on=(GENERATED,))
def tokenizer_of_an_unknown_kind(job: Job) -> None:
    edit_json(job.checkpoint / "tokenizer.json", model={"type": "Morse"})


@case("checkpoint/tokenizer_config.json: cannot be read as JSON", "copy it again", on=(GENERATED,))
def tokenizer_config_cut_off(job: Job) -> None:
    cut(job.checkpoint / "tokenizer_config.json")


@case("checkpoint: AutoTokenizer", "copy them again", on=(GENERATED,))
def tokenizer_config_of_wrong_types(job: Job) -> None:
    edit_json(job.checkpoint / "tokenizer_config.json", added_tokens_decoder=["<pad>"])


@case(
    "checkpoint: token '", "the model's vocabulary ends at 1023 ", "use the tokenizer that", on=(GENERATED,)
)
def tokenizer_with_more_tokens_than_the_model(job: Job) -> None:
    edit_json(job.checkpoint / "tokenizer_config.json", extra_special_tokens=["<extra>"])
    edit_row(job.rows, 57, lambda row: row.update(response="<extra>"))


@case("checkpoint: token '", "the model's vocabulary ends at 2047 ", "use the tokenizer that", on=(STORY,))
def tokenizer_of_another_model(job: Job) -> None:
    job.asset("tokenizers/gpt2/tokenizer.json", "checkpoint/tokenizer.json")


# The data's file.


@case("rows.jsnl: no such file", "did you mean 'rows.jsonl'?", "set data.source", on=(GENERATED,))
def misspelt_source(job: Job) -> None:
    job.data(source="rows.jsnl")


@case("held_out.jsonl: no such file", "set data.eval_source", on=(GENERATED,))
def missing_eval_source(job: Job) -> None:
    job.data(eval_source="held_out.jsonl")


@case("checkpoint/empty: is a folder without a file that data.source reads (.json, ", on=(GENERATED,))
def folder_without_data_for_a_source(job: Job) -> None:
    (job.checkpoint / "empty").mkdir()
    job.data(source="checkpoint/empty")


@case("shards/*.jsonl: no file has this name or matches this pattern", "data.source", on=(GENERATED,))
def glob_that_matches_nothing(job: Job) -> None:
    job.data(source="shards/*.jsonl")


@case("rows.jsnl: no such file", "did you mean 'rows.jsonl'?", "set data.source", on=(GENERATED,))
def misspelt_source_in_a_list(job: Job) -> None:
    job.data(source=["rows.jsonl", "rows.jsnl"])


@case("data.source: rows.jsonl is read twice, by rows.jsonl and *.jsonl", "weight: 2", on=(GENERATED,))
def file_in_two_sources(job: Job) -> None:
    job.data(source=["rows.jsonl", "*.jsonl"])


@case("job.yaml: data.source[1].weight: must be greater than 0", "found 0", on=(CONFIG,))
def weight_of_nothing(job: Job) -> None:
    job.data(source=["rows.jsonl", {"source": "more.jsonl", "weight": 0}])


@case("shards/b.jsonl line 1: has no column 'response'", "its columns: text", on=(GENERATED,))
def files_of_a_folder_that_differ(job: Job) -> None:
    shards = job.folder / "shards"
    shards.mkdir()
    (shards / "a.jsonl").write_bytes(job.rows.read_bytes())
    (shards / "b.jsonl").write_text('{"text": "no pair"}\n')
    job.data(source="shards")


@case("rows.pipe.jsonl: is not a regular file", "data.source", on=(GENERATED,))
def pipe_for_a_source(job: Job) -> None:
    os.mkfifo(job.folder / "rows.pipe.jsonl")
    job.data(source="rows.pipe.jsonl")


@case("loop.jsonl: is a link to nowhere", "data.source", on=(GENERATED,))
def link_to_itself_for_a_source(job: Job) -> None:
    (job.folder / "loop.jsonl").symlink_to("loop.jsonl")
    job.data(source="loop.jsonl")


@case("rows.xlsx: unknown kind of file '.xlsx'; data.source reads .json, .jsonl", on=(GENERATED,))
def spreadsheet_for_a_source(job: Job) -> None:
    job.source("rows.xlsx", b"PK\x03\x04")


@case("rows.jsonl: is empty; give data.source rows to train on", on=(GENERATED,))
def empty_source(job: Job) -> None:
    job.rows.write_bytes(b"")


@case("rows.jsonl line 57: not valid JSON: ", "column", "fix the line (or set", on=(GENERATED, STORY))
def broken_line_in_the_middle(job: Job) -> None:
    edit_line(job.rows, 57, lambda line: line[: len(line) // 2])


@case("rows.jsonl line 57: must be a JSON object", "found a list", "on_bad_row=skip", on=(GENERATED,))
def line_that_is_a_list(job: Job) -> None:
    edit_line(job.rows, 57, lambda line: json.dumps(list(json.loads(line).values())).encode())


@case("rows.jsonl line 33: not UTF-8 text (byte 0xff); save the file as UTF-8", on=(GENERATED,))
def source_that_is_not_utf8(job: Job) -> None:
    edit_line(job.rows, 33, lambda line: line[:20] + b"\xff" + line[20:])


@case("rows.json line 3: not valid JSON: ", "fix the file", on=(GENERATED,))
def json_list_without_commas(job: Job) -> None:
    job.source("rows.json", b"[\n" + job.rows.read_bytes() + b"]\n")


@case("rows.csv line 3: has 3 fields, the header has 2; check commas and quotes", on=(GENERATED,))
def csv_with_an_unquoted_comma(job: Job) -> None:
    job.source("rows.csv", "prompt,response\nWhat is 1 + 1?,2\nSay yes, please,yes\n")


@case("rows.parquet: not a Parquet file", on=(GENERATED,))
def parquet_cut_off(job: Job) -> None:
    pytest.importorskip("pyarrow")
    job.source("rows.parquet", b"PAR1\x15\x04\x15")


# Its rows.


@case("rows.jsonl line 57: has no column", "its columns:", "on_bad_row=skip", on=(GENERATED, STORY))
def row_without_a_response(job: Job) -> None:
    edit_row(job.rows, 57, lambda row: row.popitem())


@case("rows.jsonl line 57: column", "is empty; give it text or remove the row", on=(GENERATED,))
def row_with_an_empty_response(job: Job) -> None:
    edit_row(job.rows, 57, lambda row: row.update(response=" "))


@case("rows.jsonl line 57: column 'response' must be text, found a dict; flatten it", on=(GENERATED,))
def row_with_an_object_for_text(job: Job) -> None:
    edit_row(job.rows, 57, lambda row: row.update(response={"text": "42"}))


@case("rows.jsonl line 57: holds '\\ud800', half of a surrogate pair", "write the whole", on=(GENERATED,))
def half_a_character(job: Job) -> None:
    edit_row(job.rows, 57, lambda row: row.update(response="\ud800"))


@case("rows.jsonl: no usable row: 128 bad, the first: rows.jsonl line 1: column", on=(GENERATED,))
def nothing_left_after_skipping(job: Job) -> None:
    job.data(on_bad_row="skip")
    for number in range(1, 129):
        edit_row(job.rows, number, lambda row: row.update(response=""))


@case("rows.jsonl: cannot tell", "set data.prompt_column", "its columns: q, a", on=(GENERATED,))
def columns_that_nobody_knows(job: Job) -> None:
    rows = [json.loads(line) for line in job.rows.read_text().splitlines()]
    job.rows.write_text("\n".join(json.dumps(dict(zip("qa", row.values(), strict=True))) for row in rows))


@case("data.response_column: rows.jsonl has no column 'respone'", "mean 'response'?", on=(GENERATED,))
def response_column_that_is_not_there(job: Job) -> None:
    job.data(response_column="respone")


@case("data.prompt_template: rows.jsonl has no column 'queston'", "mean 'question'?", on=(STORY,))
def prompt_template_with_an_unknown_column(job: Job) -> None:
    job.data(prompt_template="Q: {queston}\nA: ")


@case("seeds.jsonl: column 'instances' holds nested rows", "write one row for each of them", on=(STORY,))
def nested_rows(job: Job) -> None:
    job.asset("data/alpaca_seed_tasks.jsonl", "seeds.jsonl")
    job.data(source="seeds.jsonl")


@case("holds preferences (columns chosen, rejected)", "set data.response_column=chosen", on=(GENERATED,))
def preference_rows(job: Job) -> None:
    job.source("rows.jsonl", '{"prompt": "Say yes.", "chosen": "Yes.", "rejected": "No."}\n')


@case("dpo.json: holds preferences", "set data.response_column=chosen", on=(CHATS,))
def preferences_between_chats(job: Job) -> None:
    job.asset("data/dpo_en_demo.json", "dpo.json")
    job.data(source="dpo.json")


@case("rows.jsonl: all 128 rows are masked", "data.seq_len=2", "raise data.seq_len", on=(GENERATED, STORY))
def rows_cut_before_their_first_target(job: Job) -> None:
    job.data(seq_len=2)


@case("data.eval_fraction: rows.jsonl gives one document", "set data.eval_source or 0", on=(GENERATED,))
def one_row_to_hold_out_from(job: Job) -> None:
    job.data(max_rows=1, eval_fraction=0.1)


@case("data.eval_fraction: rows.jsonl gives 128 documents with one and the same prompt", on=(GENERATED,))
def one_prompt_to_hold_out_from(job: Job) -> None:
    for number in range(1, 129):
        edit_row(job.rows, number, lambda row: row.update({next(iter(row)): "What next?"}))
    job.data(eval_fraction=0.1)


# Chats.


@case("checkpoint: has no chat template", "set data.chat_template to a jinja template", on=(GENERATED,))
def chats_without_a_template(job: Job) -> None:
    as_chats(job)
    job.data(chat_template="none")


@case("rows.jsonl line 7: message ", "unknown role 'asistant'", "mean 'assistant'?", on=(GENERATED, CHATS))
def unknown_role(job: Job) -> None:
    as_chats(job)
    edit_row(job.rows, 7, lambda row: row["messages"][-1].update(role="asistant"))


@case("rows.jsonl line 7: ", "no assistant message", "on_bad_row=skip", on=(GENERATED, CHATS))
def conversation_without_an_answer(job: Job) -> None:
    as_chats(job)
    edit_row(job.rows, 7, lambda row: row["messages"].pop())


@case("rows.jsonl line 7: message 1 ", "parts that are not text (image_url)", on=(GENERATED,))
def image_in_a_conversation(job: Job) -> None:
    as_chats(job)
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "x.png"}}]
    edit_row(job.rows, 7, lambda row: row["messages"][0].update(content=parts))


@case("glaive.json row 3: message 2 ", "function call without a name", "on_bad_row=skip", on=(CHATS,))
def tool_call_without_a_name(job: Job) -> None:
    path = job.asset("data/glaive_toolcall_en_demo.json", "glaive.json")
    rows = json.loads(path.read_text())
    rows[2]["conversations"][1] = {"from": "function_call", "value": "{}"}
    path.write_text(json.dumps(rows))
    job.data(source="glaive.json")


@case("data.chat_template: line 2: not a jinja template:", "'endfor'", on=(GENERATED, CHATS))
def template_with_a_syntax_error(job: Job) -> None:
    as_chats(job)
    job.data(chat_template="{{ bos_token }}\n{% for m in messages %}{{ m.content }}{% end %}")


@case("rows.jsonl line 1: the chat template refuses it: No chat!; change", on=(GENERATED,))
def template_that_refuses(job: Job) -> None:
    as_chats(job)
    job.data(chat_template="{{ raise_exception('No chat!') }}")


@case("rows.jsonl line 1: the chat template", "'colour' is undefined; change the row or", on=(GENERATED,))
def template_with_an_undefined_name(job: Job) -> None:
    as_chats(job)
    job.data(chat_template="{% for m in messages %}{{ m.content + colour.red }}{% endfor %}")


@case("data.chat_template: 'chatml.jinja' is neither a jinja template nor an existing file", on=(GENERATED,))
def template_file_that_is_not_there(job: Job) -> None:
    as_chats(job)
    job.data(chat_template="chatml.jinja")


@case("data.chat_template: '~nobody-of-this-name/x.jinja' is neither a jinja template nor", on=(GENERATED,))
def chat_template_in_the_home_of_nobody(job: Job) -> None:
    job.data(chat_template="~nobody-of-this-name/x.jinja")


# The machine, and what other runs left behind.


@case("output_dir: ", "taken is a file; choose another folder", on=(GENERATED,))
def file_for_an_output_dir(job: Job) -> None:
    (job.folder / "taken").write_text("mine")
    job.values["output_dir"] = "taken"


@case("output_dir: ", "taken is a file; choose another folder", on=(GENERATED,))
def file_above_the_output_dir(job: Job) -> None:
    (job.folder / "taken").write_text("mine")
    job.values["output_dir"] = "taken/runs/1"


@case("output_dir: /proc", "choose another folder", on=(GENERATED,))
def output_dir_where_nothing_can_be_made(job: Job) -> None:
    job.values["output_dir"] = "/proc/lptune"


@case("output_dir: old holds another run; choose a new folder, or", "resume=auto", on=(GENERATED,))
def output_dir_of_another_run(job: Job) -> None:
    (job.folder / "old").mkdir()
    (job.folder / "old" / "metrics.jsonl").write_text("{}\n")
    job.values |= {"output_dir": "old", "resume": "none"}


@case("resume: runs/1/checkpoints/step-00000004", "give another checkpoint, auto or none", on=(GENERATED,))
def resume_from_nothing(job: Job) -> None:
    job.overrides = ["resume=runs/1/checkpoints/step-00000004"]


@case("resume: step-00000004: has no manifest.json", "give another checkpoint", on=(GENERATED,))
def resume_from_an_unfinished_checkpoint(job: Job) -> None:
    (job.folder / "step-00000004").mkdir()
    copyfile(job.weights, job.folder / "step-00000004" / "model-00000.safetensors")
    job.overrides = ["resume=step-00000004"]


@case("device: cuda was asked for", "set device=cpu or auto", on=(GENERATED,))
def cuda_where_there_is_none(job: Job) -> None:
    job.environment["CUDA_VISIBLE_DEVICES"] = ""
    job.overrides = ["device=cuda"]


@case("compile: needs a C++ compiler", "/nonexistent/c++", "set compile=none", on=(GENERATED,))
def compile_without_a_compiler(job: Job) -> None:
    job.environment["CXX"] = "/nonexistent/c++"
    job.overrides = ["compile=block"]


@case("LPTUNE_KERNELS='cuda': must be one of torch, ", on=(GENERATED,))
def unknown_kernels(job: Job) -> None:
    job.environment["LPTUNE_KERNELS"] = "cuda"
    job.overrides = ["precision.kind=int8_rowcol"]


@case("precision.skip: 'lm_haed' matches no linear layer", "did you mean 'lm_head'?", on=(GENERATED,))
def skip_that_matches_nothing(job: Job) -> None:
    job.overrides = ["precision.kind=int8_rowcol", "precision.skip=[lm_haed]"]


@case("precision.kind: int8_rowcol would convert no layer", "Change precision.skip", on=(GENERATED,))
def precision_without_a_layer(job: Job) -> None:
    job.overrides = ["precision.kind=int8_rowcol", "precision.skip=[*_proj, lm_head]"]


def as_chats(job: Job) -> None:
    """Writes pairs as conversations; real chats stay."""
    rows = [json.loads(line) for line in job.rows.read_text().splitlines()]
    if "messages" not in rows[0]:
        pairs = [zip(("user", "assistant"), row.values(), strict=True) for row in rows]
        chats = [{"messages": [{"role": role, "content": text} for role, text in pair]} for pair in pairs]
        job.rows.write_text("".join(json.dumps(chat) + "\n" for chat in chats))


# ---- the tests


TYPED = [next(each for each in CASES if each.base == base) for base in REAL]


def make_job(case: Case, folder: Path, checkpoint: Path | None, assets: Path | None) -> Job:
    """A run of a few rows that works, as far as the case needs it."""
    folder.mkdir()
    if checkpoint is not None:
        copy_into(checkpoint, folder / "checkpoint")
    if assets is not None:
        name = {STORY: "gsm8k_train.jsonl", CHATS: "openai_messages.jsonl"}[case.base]
        lines = (assets / "data" / name).read_text(encoding="utf-8").splitlines()[:128]
    else:
        lines = [json.dumps(row) for row in builtin_rows(128)]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    values: dict[str, Any] = {
        "model": {"path": "checkpoint"},
        "data": {"source": "rows.jsonl", "seq_len": 512},
        "compile": "none",
        "device": "cpu",
        "global_batch_size": 8,
        "num_steps": 1,
        "output_dir": "runs/1",
    }
    if case.base == CHATS:
        values["data"]["chat_template"] = TEMPLATE
    job = Job(folder, values, assets)
    case.damage(job)
    job.write_config()
    return job


def check(case: Case, job: Job, run: Callable[[], Finished]) -> None:
    before = sorted(job.folder.rglob("*"))
    done = run()
    assert done.returncode == 2, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    # What needs torch to be found comes after the lines that tell what the run does; nothing else is printed.
    assert only_told(done.stdout), done.stdout
    assert not done.stdout or case.base != CONFIG, "a wrong command line or config is found before them"
    assert done.stderr.startswith("error: "), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    for words in case.words:
        assert words in done.stderr
    assert sorted(job.folder.rglob("*")) == before


@pytest.fixture(scope="session")
def generated_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    done = warm.lptune(["new-checkpoint", "llama3_2/tiny", "checkpoint"], folder=folder)
    assert done.returncode == 0, done.stderr
    return folder / "checkpoint"


def of(*bases: str) -> pytest.MarkDecorator:
    chosen = [pytest.param(case, id=case.name) for case in CASES if case.base in bases]
    return pytest.mark.parametrize("case", chosen)


@of(CONFIG)
def test_a_wrong_command_line_or_config_is_one_line_and_exit_2(
    case: Case, tmp_path: Path, lptune: Lptune
) -> None:
    job = make_job(case, tmp_path / "job", checkpoint=None, assets=None)
    check(case, job, lambda: lptune(*job.arguments(), cwd=job.folder, **job.environment))


@of(*REAL)
def test_a_real_input_gone_wrong_is_one_line_and_exit_2(
    case: Case, tmp_path: Path, lptune: Lptune, assets: Path
) -> None:
    job = make_job(case, tmp_path / "job", assets / "models" / "story_llama", assets)
    if case in TYPED:
        check(case, job, lambda: lptune(*job.arguments(), cwd=job.folder, **job.environment))
    else:
        check(case, job, lambda: warm.lptune(job.arguments(), folder=job.folder, environment=job.environment))


@of(GENERATED)
def test_a_generated_input_gone_wrong_is_one_line_and_exit_2(
    case: Case, tmp_path: Path, generated_checkpoint: Path
) -> None:
    job = make_job(case, tmp_path / "job", generated_checkpoint, assets=None)
    check(case, job, lambda: warm.lptune(job.arguments(), folder=job.folder, environment=job.environment))


def test_the_jobs_work_until_they_are_damaged(tmp_path: Path, generated_checkpoint: Path) -> None:
    job = make_job(Case(lambda job: None, GENERATED, ()), tmp_path / "job", generated_checkpoint, None)
    done = warm.lptune(job.arguments(), folder=job.folder)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_no_case_hides_another() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


def test_a_message_of_several_lines_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """As those of parsers are, which a message may quote."""
    with pytest.raises(SystemExit) as ended:
        fail("r.parquet: not Parquet:\n  magic bytes not found\n")
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: r.parquet: not Parquet: magic bytes not found\n"
