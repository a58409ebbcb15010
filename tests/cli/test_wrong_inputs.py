"""The contract of an error: ONE line that names the key, the argument or the file and says what to do; exit code
2; nothing written.

A row of a table is a wrong input and what its line must have, with " | " between: the place, what was found, the
remedy. Other wording is free. `RUNS` damages one input of a run that works; `COMMANDS` are command lines in a folder
with files of every kind. What the readers of configs, checkpoints and data refuse besides stands beside them:
tests/config/test_load.py, tests/models/test_config.py, tests/checkpoint/test_hf.py, tests/data/test_refused.py.
"""

# ruff: noqa: E501  (a row is a line)

import json
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copyfile, copytree
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load, save_file

from lptune.cli.main import fail
from lptune.data.builtin import builtin_rows
from tests.cli.conftest import Command, write_model
from tests.helpers import warm
from tests.helpers.told import only_told


def check(words: str, folder: Path, run: Callable[[], tuple[int, str, str]]) -> None:
    """The contract. run: (exit code, stdout, stderr)."""
    before = files_in(folder)
    code, stdout, stderr = run()
    assert (code, stderr.count("\n"), stderr[:7]) == (2, 1, "error: "), f"exit {code}\n{stdout}\n{stderr}"
    # What needs torch to be found comes after the lines that tell what the run does; nothing else is printed.
    assert only_told(stdout), stdout
    assert [each for each in words.split(" | ") if each not in stderr] == [], stderr
    assert files_in(folder) == before


def files_in(folder: Path) -> dict[Path, int]:
    """When each was written, in ns; all but the code that Python keeps of a recipe that it has read."""
    found = (path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    return {path: path.lstat().st_mtime_ns for path in found}


def ids(table: list[Any]) -> list[Any]:
    return [pytest.param(*row, id=row[-1].replace(" | ", " ")[:60]) for row in table]


# ---- a run that works until one input is damaged


@dataclass
class Job:
    folder: Path
    arguments: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(
        default_factory=lambda: {
            "model": {"path": "checkpoint"},
            "data": {"source": "rows.jsonl", "seq_len": 512},
            "compile": "none",
            "compute_dtype": "float32",
            "device": "cpu",
            "global_batch_size": 8,
            "num_steps": 1,
            "output_dir": "runs/1",
        }
    )

    @property
    def weights(self) -> Path:
        return self.folder / "checkpoint" / "model.safetensors"

    def run(self) -> tuple[int, str, str]:
        if not (self.folder / "job.yaml").exists():
            (self.folder / "job.yaml").write_text(yaml.safe_dump(self.values))
        arguments = ["run", "full_finetune", "--config", "job.yaml", *self.arguments]
        done = warm.lptune(arguments, folder=self.folder, environment=self.environment)
        return done.returncode, done.stdout, done.stderr


Damage = Callable[[Job], object]


def keys(values: dict[str, Any], *more: Damage) -> Damage:
    """Dotted keys of job.yaml, and more damage."""

    def damage(job: Job) -> None:
        for key, value in values.items():
            *sections, leaf = key.split(".")
            holder = job.values
            for name in sections:
                holder = holder.setdefault(name, {})
            holder[leaf] = value
        for each in more:
            each(job)

    return damage


def arguments(*texts: str, **environment: str) -> Damage:
    return lambda job: (job.arguments.extend(texts), job.environment.update(environment))


def write(name: str, content: str | bytes) -> Damage:
    """A file of this content; a folder above it that is not there is made."""

    def damage(job: Job) -> None:
        (job.folder / name).parent.mkdir(exist_ok=True)
        (job.folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return damage


def cut(name: str) -> Damage:
    return lambda job: os.truncate(job.folder / name, (job.folder / name).stat().st_size // 2)


def edit_json(name: str, **changes: Any) -> Damage:
    def damage(job: Job) -> None:
        path = job.folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def model(**changes: Any) -> Damage:
    return edit_json("checkpoint/config.json", **changes)


def tensors(edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Damage:
    """The tensors of the checkpoint, as `edit` returns them."""
    return lambda job: save_file(edit(load(job.weights.read_bytes())), job.weights, metadata={"format": "pt"})


def index(tensor: str, file: str) -> Damage:
    """An index beside the weights, right but for one tensor."""

    def damage(job: Job) -> None:
        weights = job.weights.rename(job.weights.with_name("weights.safetensors"))
        weight_map = dict.fromkeys(load(weights.read_bytes()), weights.name) | {tensor: file}
        path = job.weights.with_name("model.safetensors.index.json")
        path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    return damage


def line(number: int, edit: Callable[[bytes], bytes]) -> Damage:
    """One line of rows.jsonl, edited."""

    def damage(job: Job) -> None:
        lines = (job.folder / "rows.jsonl").read_bytes().split(b"\n")
        lines[number - 1] = edit(lines[number - 1])
        (job.folder / "rows.jsonl").write_bytes(b"\n".join(lines))

    return damage


def rows(edit: Callable[[dict[str, Any]], dict[str, Any]]) -> Damage:
    """All rows, each as `edit` returns it."""

    def damage(job: Job) -> None:
        path = job.folder / "rows.jsonl"
        lines = path.read_text().splitlines()
        path.write_text("".join(f"{json.dumps(edit(json.loads(each)))}\n" for each in lines))

    return damage


def link(name: str, target: str) -> Damage:
    return lambda job: (job.folder / name).symlink_to(target)


def removed(name: str) -> Damage:
    return lambda job: (job.folder / name).unlink()


def renamed(*names: str) -> Damage:
    """The weights under these names."""

    def damage(job: Job) -> None:
        for name in names:
            copyfile(job.weights, job.weights.with_name(name))
        job.weights.unlink()

    return damage


NORM = "model.norm.weight"
PREFERENCE = '{"prompt": "Say yes.", "chosen": "Yes.", "rejected": "No."}\n'
# fmt: off
RUNS: list[tuple[Damage, str]] = [
    # --- config.json
    (keys({"model.path": "chekpoint"}), "model.path: chekpoint is not a folder | `lptune download` fetches one"),
    (keys({"model.path": "checkpoint/config.json"}), "model.path: checkpoint/config.json is a file | give the"),
    (removed("checkpoint/config.json"), "checkpoint/config.json: not found | expected the folder of a"),
    (cut("checkpoint/config.json"), "checkpoint/config.json: line | not valid JSON | download it again"),
    (model(model_type="gemma3", vision_config={}), "config.json: transformers refuses it"),
    (model(architectures=["LlamaForSequenceClassification"]), "architectures: | expected a ...ForCausalLM"),
    (model(num_hidden_layers=10**9), "checkpoint/config.json: num_hidden_layers: 1000000000 is | download"),
    (model(rope_scaling={"rope_type": "llama4"}), "config.json: rope_scaling: rope type 'llama4' is not supported"),
    # --- weights
    (tensors(lambda found: found | {NORM: found[NORM][:-1].clone()}), f"tensor '{NORM}' has shape [ | asks for ["),
    (index("model.norm.bias", "weights.safetensors"), "index.json: | holds 'model.norm.bias' | download"),
    (index(NORM, "../model.safetensors"), "index.json: | '../model.safetensors'; a plain *.safetensors file name"),
    (renamed("model-1.safetensors", "model-2.safetensors"), "checkpoint: holds 2 safetensors | no model.safetensors"),
    # --- tokenizer
    (removed("checkpoint/tokenizer.json"), "checkpoint/tokenizer.json: not found | copy it from the original"),
    (edit_json("checkpoint/tokenizer_config.json", added_tokens_decoder=["<pad>"]), "checkpoint: | copy them again"),
    # --- files of data
    (keys({"data.source": "rows.jsnl"}), "rows.jsnl: no such file | mean 'rows.jsonl'? | set data.source"),
    (keys({"data.source": "shards"}, write("shards/a.jsonl", '{"prompt": "a", "response": "b"}\n'), write("shards/b.jsonl", '{"text": "c"}\n')),
     "shards/b.jsonl line 1: has no column 'response' | its columns: text"),
    (keys({"data.source": "rows.pipe.jsonl"}, lambda job: os.mkfifo(job.folder / "rows.pipe.jsonl")),
     "rows.pipe.jsonl: is not a regular file | data.source"),
    (keys({"data.source": "loop.jsonl"}, link("loop.jsonl", "loop.jsonl")), "loop.jsonl: is a link to nowhere"),
    (write("rows.jsonl", b""), "rows.jsonl: is empty | give data.source rows to train on"),
    (line(57, lambda text: text[:20]), "rows.jsonl line 57: not valid JSON: | column | fix the line (or set"),
    (keys({"data.source": "rows.csv"}, write("rows.csv", "prompt,response\nWhat?,2\nSay yes, please,yes\n")),
     "rows.csv line 3: has 3 fields, the header has 2 | check quotes and each ','"),
    # --- rows
    (rows(lambda each: dict(zip("qa", each.values(), strict=True))), "rows.jsonl: cannot tell | set data.prompt_"),
    (keys({"data.response_column": "respone"}), "data.response_column: rows.jsonl has no | mean 'response'?"),
    (write("rows.jsonl", PREFERENCE), "holds preferences (columns chosen, | set data.response_column=chosen"),
    # --- chats
    (keys({"data.chat_template": "chatml.jinja"}), "data.chat_template: 'chatml.jinja' is neither a jinja template nor"),
    # --- the machine, and what other runs left behind
    (keys({"output_dir": "taken"}, write("taken", "mine")), "output_dir: | taken is a file; choose another folder"),
    (keys({"output_dir": "taken/1"}, write("taken", "mine")), "output_dir: | taken is a file; choose another"),
    (keys({"output_dir": "/proc/lptune"}), "output_dir: /proc | choose another folder"),
    (keys({"output_dir": "old", "resume": "none"}, write("old/metrics.jsonl", "{}\n")),
     "output_dir: old holds another run; choose a new folder, or | resume=auto"),
    (arguments("checkpoint.copy_to=bucket/run"), "checkpoint.copy_to: expected an address like s3:// | 'bucket/run'"),
    (arguments("checkpoint.copy_to=nowhere://bucket/run"),
     "checkpoint.copy_to: nowhere://bucket/run: Protocol not known | mend it, or leave the key out"),
    (arguments("resume=runs/1/checkpoints/step-00000004"), "resume: runs/1/checkpoints/step-00000004 | auto or none"),
    (lambda job: (write("step-00000004/model-00000.safetensors", "")(job), arguments("resume=step-00000004")(job)),
     "resume: step-00000004: has no manifest.json | give another checkpoint"),
    (arguments("compile=block", CXX="/nonexistent/c++"), "compile: needs a C++ compiler | set compile=none"),
    (arguments("precision.kind=int8_rowcol", LPTUNE_KERNELS="cuda"), "LPTUNE_KERNELS='cuda': must be one of torch"),
    (arguments("precision.kind=int8_rowcol", "precision.skip=[lm_haed]"), "precision.skip: 'lm_haed' | 'lm_head'?"),
]
# fmt: on


@pytest.fixture(scope="module")
def working(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job that works: a checkpoint and rows."""
    folder = tmp_path_factory.mktemp("working")
    done = warm.lptune(["new-checkpoint", "llama3_2/tiny", "checkpoint"], folder=folder)
    assert done.returncode == 0, done.stderr
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in builtin_rows(128)))
    return folder


def test_the_job_works_until_it_is_damaged(working: Path, tmp_path: Path) -> None:
    job = Job(copytree(working, tmp_path / "job"))
    code, _, stderr = job.run()
    assert (code, stderr) == (0, "")


@pytest.mark.parametrize(("damage", "words"), ids(RUNS))
def test_a_damaged_input_of_a_run_is_one_line(
    working: Path, tmp_path: Path, damage: Damage, words: str
) -> None:
    job = Job(copytree(working, tmp_path / "job"))
    (job.folder / "job.yaml").touch()
    damage(job)
    (job.folder / "job.yaml").write_text(yaml.safe_dump(job.values))
    check(words, job.folder, job.run)


# ---- command lines

X300 = "x" * 300
RECIPES = {  # which are none
    "open.py": "def main(cfg: FinetuneConfig",
    "bare.py": "x = 1",
    "untyped.py": "def main(cfg): pass",
    "int.py": "def main(cfg: int): pass",
}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with files of every kind."""
    for folder in ("empty", "full", "new/checkpoints", "run/checkpoints/step-00000004", "bad", "a"):
        (tmp_path / folder).mkdir(parents=True)
    write_model(tmp_path / "tiny")
    config = "model: {path: tiny}\ndata: {source: builtin}\ndevice: cpu\n"
    for name, text in {
        "toy.py": "def main(cfg: FinetuneConfig) -> None: pass\n",
        "old.py": "from lptune.training import is_due\ndef main(cfg: FinetuneConfig) -> None: pass\n",
        **RECIPES,
        "toy.yaml": config,
        "mine.yaml": "model: {path: here}\ndata: {source: rows.jsonl}\nglobal_batch_size: 4\n",
        "list.yaml": "- model\n",
        "open.yaml": f"{config}seed: [\n",
        "lora.yml": "base_model: a/b\nadapter: lora\n",
        "file": "precious",
        "full/file": "precious",
        "run/checkpoints/step-00000004/manifest.json": "{}",
        "bad/metrics.jsonl": "x\ny\n",
        "a/metrics.jsonl": '{"step": 1, "loss": 3.0}\n',
    }.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe")
    os.mkfifo(tmp_path / "pipe")
    for name, target in {
        "loop": "loop",
        "null": os.devnull,
        "dangling": "nothing",
        "to_empty": "empty",
    }.items():
        (tmp_path / name).symlink_to(target)
    return tmp_path


TUNE = str(Path(__file__).parents[1] / "tools/migrate/configs/torchtune_llama3_3_70b_full_multinode.yaml")
TWO = "run --nnodes 2 --rdzv-endpoint localhost:1"
TOY = "toy.py --config toy.yaml"
TINY = "--config llama3_2/1b --preset llama3_2/tiny data.source=builtin data.seq_len=32"
# fmt: off
COMMANDS: list[tuple[str, str]] = [
    ("chat", "No such command 'chat'; here that is: lptune run generate --config generation model.path=FOLDER"),
    ("rn", "No such command 'rn' | Did you mean 'run' | `lptune --help`"),
    *((usage, "") for usage in ("--vresion", "cat", "cp full_finetune", "ls more", "keys --recip x", "data")),
    # --- names
    ("cat binary.py", "binary.py: is not text"),
    ("cat ~nobody-here/a", "recipe or config: ~nobody-here/a: there is no such user's home"),
    ("cat pipe", "pipe: is a pipe | give the name or the path of a recipe or config"),
    ("cat /dev/zero", "/dev/zero: is a device or socket | give the name or the path"),
    ("cat dangling", "dangling: no such recipe or config | `lptune ls` shows what there is"),
    (f"run full_finetun {TOY[7:]}", "full_finetun: no such recipe | did you mean 'full_finetune'?"),
    ("run recipes/full_fintune.py --config toy.yaml", "no such recipe | did you mean 'full_finetune'?"),
    ("run toy.py --config mine.py", "mine.py: is a recipe | give the name or the path of a config"),
    ("run toy.py --config full_finetune", "full_finetune: is a recipe | give the name or the path of a config"),
    ("run toy.py --config lama3_2/1b.yaml", "lama3_2/1b.yaml: no such config | did you mean 'llama3_2/1b'?"),
    ("run toy.py --config zzzzz", "zzzzz: no such config | `lptune ls` shows what there is"),
    ("run toy.py --config /", "/: is a folder | give the name or the path of a config"),
    (f"run {X300} --config quickstart", "recipe: is not a path: a name in it is longer than 255 bytes"),
    ("keys precison", "did you mean 'precision'?"),
    ("keys xqzw", "`lptune keys` lists all"),
    ("cp llama3_2/1b b/c.yaml", "b: no such folder | add --parents"),
    ("cp llama3_2/1b file/c.yaml --parents", "file: is a file, where a folder is needed"),
    ("cp full_finetune file", "file: exists | add --force to overwrite it"),
    ("cp full_finetune dangling", "dangling: exists | add --force to overwrite it"),
    ("cp full_finetune pipe --force", "pipe: cannot be overwritten | choose another DEST"),
    # --- recipes and configs
    ("run open.py --config toy.yaml", "open.py: line 1: not valid Python"),
    ("run bare.py --config toy.yaml", "bare.py: is not a recipe: it has no function `main(cfg: FinetuneConfig)`"),
    ("run untyped.py --config toy.yaml", "untyped.py: line 1: annotate main's parameter: main(cfg: FinetuneConfig)"),
    ("run int.py --config toy.yaml", "int.py: the annotation 'int' of main's first parameter is not a config class"),
    ("run binary.py --config toy.yaml", "binary.py: is not a Python file"),
    ("run old.py --config toy.yaml", "old.py: line 1: cannot import name 'is_due' | another version | `lptune cp`"),
    ("validate list.yaml", "list.yaml: must hold `key: value` lines, found a list"),
    ("validate toy.yaml optimzer.lr=1e-4", "argument 'optimzer.lr=1e-4': unknown key | did you mean 'optimizer'?"),
    ("validate toy.yaml precision.kind=int8", "'precision.kind=int8' | of its 14 choices | mean 'int8_rowcol'?"),
    ("validate toy.yaml data.eval_fraction=0.1 data.eval_source=builtin", "data.eval_fraction | set one of them"),
    ("validate toy.yaml checkpoint.keep_best=1", "checkpoint.keep_best: needs evaluations | set data.eval_fraction"),
    ("validate toy.yaml data.eval_fraction=0.1 eval_every_steps=4 checkpoint.keep_best=1 checkpoint.every_steps=6",
     "checkpoint.keep_best: uses evaluations | a multiple of eval_every_steps (4)"),
    ("validate full_finetune --config toy.yaml --nnodes 3 --nproc-per-node 5 micro_batch_size=1 global_batch_size=8", "global_batch_size: 8 rows | 15 data ranks"),
    ("plan --config toy.yaml --world-size 6 --nnodes 2", "--world-size: | leave it out"),
    ("advise --config toy.yaml --nnodes 2:4", "advise: --nnodes: 2:4 is known where | give a number"),
    ("validate toy.yaml checkpoint.at_end=false", "checkpoint.at_end: | set export.enabled=false"),
    ("validate toy.yaml output_dir=tiny", "output_dir: tiny would overwrite the model in model.path"),
    ("validate toy.yaml data.seq_len=1000000000000", "micro_batch_size: 4 rows of data.seq_len= | lower one"),
    ("validate toy.yaml 'data.split=${oc.env:HOME}/m'", "data.split: | may be another key | in a place such as"),
    (f"validate {TUNE} sed=1", "is a config of torchtune | `lptune migrate"),
    ("run generate --config generation data.source=x", "unknown key 'data.source' | mean 'prompts.source'?"),
    ("validate full_dpo --config llama3_2/1b_kto data.source=x kto.beta=1", "'preference.beta'? | full_kto has it"),
    # --- launches
    ("run --config toy.yaml", "run: no recipe given | `lptune ls` shows what there is"),
    ("run toy.py", "run: --config is required: lptune run toy.py --config CONFIG | `lptune ls`"),
    ("run toy.yaml", "toy.yaml is a config, and RECIPE comes first: lptune run full_finetune --config toy.yaml"),
    ("run llama3_2/1b seed=1", "RECIPE comes first: lptune run full_finetune --config llama3_2/1b"),
    ("run toy.py toy.yaml seed=1", "run: toy.yaml is a config: lptune run toy.py --config toy.yaml"),
    ("run toy.py --confg toy.yaml", "run: no such option here: --confg | did you mean '--config'?"),
    (f"run {TOY} --rdzv-backend c10d", "no such option here: --rdzv-backend | flags stand before RECIPE"),
    (f"run --rdzv-backnd c10d {TOY}", "no such option: --rdzv-backnd | '--rdzv-backend'? | `lptune run --help`"),
    (f"run --nproc-per-node 0 {TOY}", "run: --nproc-per-node: must be a positive integer, found '0'"),
    (f"run --nproc-per-node two {TOY}", "run: --nproc-per-node: must be a positive integer, found 'two'"),
    (f"run --nproc 2 {TOY}", "run: no such option: --nproc (did you mean '--nproc-per-node'?)"),
    (f"run --nproc-per-node 2 {TOY} sed=1", "argument 'sed=1': unknown key 'sed' | did you mean 'seed'?"),
    (f"run --max-restarts many {TOY}", "--max-restarts | invalid int value: 'many' | `torchrun --help`"),
    (f"run --no-python {TOY}", "run: --no-python and --run-path do not go with a recipe"),
    (f"run --signals-to-handle SIGFOO {TOY}", "run: --signals-to-handle: no such signal: SIGFOO"),
    (f"run --nnodes 2 {TOY}", "run: --nnodes 2: the machines need a place to meet | --rdzv-endpoint HOST:PORT"),
    (f"run --nnodes 2 --rdzv-backend c10d {TOY}", "run: --rdzv-backend | c10d | leave it out"),
    (f"run --nnodes 2 --rdzv-endpoint localhost:0 {TOY}", "--rdzv-endpoint: must be HOST:PORT | 'localhost:0'"),
    (f"{TWO} --node-rank 2 {TOY}", "run: --node-rank: must be 0 to 1 (--nnodes 2), found '2'"),
    (f"{TWO} --local-addr host-a {TOY}", "run: --local-addr: must be an address of this machine, found 'host-a'"),
    (f"{TWO} --rdzv-conf join_timeout=soon {TOY}", "run: --rdzv-conf: must be join_timeout=SECONDS"),
    (f"run --nnodes 1:4 --rdzv-endpoint localhost:1 {TOY}", "run: --nnodes: 1:4 | give one number | --restarts N"),
    (f"run --nnodes 2 --standalone {TOY}", "run: --standalone is for one machine, --nnodes is 2"),
    (f"run --max-restarts 3 {TOY}", "run: --max-restarts: | --restarts N starts the run again"),
    # --- commands that make folders
    ("new-checkpoint llama3_2/tny new-one", "llama3_2/tny: no such family and size | mean 'llama3_2/tiny'?"),
    ("new-checkpoint llama3_2/tiny new-one --vocab-size 100", "'--vocab-size': 100 is not in the range 260<=x"),
    ("export new out", "new: the run has no checkpoint yet"),
    ("export nothing out", "nothing: no such checkpoint folder"),
    ("verify file", "file: is a file; give its folder"),
    ("verify new", "new: the run has neither a checkpoint nor an export yet"),
    ("verify empty", "empty: is not a checkpoint, a Hugging Face folder or a run's folder"),
    ("download 'not a repo'", "not a repo: is not a repository id; give OWNER/NAME"),
    ("download owner/name --output-dir file", "file: is | choose another --output-dir"),
    ("download owner/name --output-dir dangling", "dangling: is a link to nowhere; choose another --output-dir"),
    ("download owner/name --token s3cret", "--token"),
    ("download owner/name --ignore-patterns x", "only safetensors, JSON and tokenizer files are fetched"),
    # --- plan, advise, data
    ("plan --config llama3_1/70b --world-size 512", "global_batch_size: 64 rows | 512 data ranks"),
    ("plan --config llama3_2/1b --world-size 8 parallel.replicate=3", "a multiple of 3 ranks, found 8"),
    (
        "plan --config llama3_2/1b --world-size 2 parallel.replicate=2 parallel.reduce_dtype=int8",
        "parallel.reduce_dtype: int8 is for gradients of weights that are sharded | set parallel.replicate=1",
    ),
    ("plan --config llama3_2/1b --preset llama3_2/2b", "--preset: no such family and size: llama3_2/2b"),
    ("plan --config llama3_2/1b device=cpu parallel.cpu_offload=true", "parallel.cpu_offload: | set it to false"),
    ("plan --config llama3_2/1b --device h100-pcle", "--device: unknown device | 'h100-pcie'? | h100-nvl"),
    ("plan --config llama3_2/1b --device h200 device=cpu", "--device: h200 is a GPU, and device=cpu | leave one of them out"),
    (f"plan {TINY} --device a100 precision.kind=float8_rowwise", "(e4m3) GEMM, and A100-SXM4-80GB has none"),
    ("plan --config llama3_2/1b evaluate", "evaluate"),
    ("plan --config mine.yaml", "model.path: here is not there | name the model with --preset"),
    ("advise", "advise: --config is required: lptune advise --config CONFIG"),
    ("advise --config mine.yaml", "model.path: here is not there | name the model with --preset"),
    (f"advise {TINY} --kind float8_rowwise", "--kind: this CPU | only emulate it; it runs int8_rowcol"),
    (f"advise {TINY} --device a100 --kind float8_rowwise", "--kind: there is no prediction"),
    (f"advise {TINY} --world-size 3", "global_batch_size"),
    (f"advise {TINY} --quality", "--quality: measures the model in model.path; leave --preset out"),
    ("advise --config mine.yaml --quality", "rows.jsonl: no such file; set data.source"),
    ("advise --config mine.yaml --quality data.source=builtin", "model.path: here is not a folder"),
    ("advise evaluate --config evaluation", "advise: evaluate does not train"),
    (f"plan {TINY} --write there/my.yaml", "--write: there: no such folder"),
    (f"plan {TINY} --write mine.txt", "ends in .yaml"),
    ("data --config toy.yaml model.path=nowhere", "model.path: nowhere is not a folder; `lptune download`"),
    ("data --config toy.yaml data.soruce=rows.jsonl", "unknown key 'data.soruce' | did you mean 'data.source'?"),
    ("doctor full_dpo", ""),
    # --- reports
    ("report", "give the folder of a run"),
    ("report nowhere", "nowhere: no such folder"),
    ("report file", "file: is a file; give the folder"),
    (f"report {X300}", "RUN...: is not a path: a name in it is longer than 255 bytes"),
    ("report empty", "empty: is not a run's folder"),
    ("report loop", "loop"),
    ("report bad", "none of its 2 lines is a row of metrics"),
    ("report a --output empty", "--output: empty is a folder"),
    ("report a --output no/x.html", "--output: there is no folder no"),
    ("report a --output pipe", "pipe: cannot be written: it is a pipe"),
    ("report a --output null", "null: cannot be written: it is a device"),
    ("report a --reference nowhere", "nowhere: no such folder"),
    ("diff a nowhere", "nowhere"),
    ("diff empty a", "empty: is not a run's folder"),
    ("diff a open.yaml", "open.yaml"),
    # --- sweeps
    ("sweep --config toy.yaml optimizer.lr=1e-3,-1", "argument 'optimizer.lr=-1'"),
    ("sweep --config toy.yaml precision.kind=none,int9", "'int9' is not one of"),
    ("sweep --config toy.yaml optimizer.lr=1e-3,0.001", "lr=1e-3 and lr=0.001 are the same"),
    ("sweep --config toy.yaml sed=1,2", "unknown key 'sed'"),
    ("sweep --config toy.yaml full_finetune data.source=builtin,no.jsonl", "no.jsonl: no such file"),
    ("sweep --config toy.yaml seed=1,2 --output-dir file", "file: is a file, where a folder is needed"),
    ("sweep --config toy.yaml --nnodes 2 seed=1,2", "add --dry-run"),
    ("sweep --config toy.yaml seed=1,2 --dryrun", "no such option here: --dryrun | did you mean '--dry-run'?"),
    ("sweep --config toy.yaml evaluate seed=1,2", ""),
    *((f"sweep --config toy.yaml {values}", words) for values, words in (
        ("seed=1,", "has an empty value"), ("seed=1,2,1", "has the value '1' twice"), ("seed=1", "no key has several"),
        ("precision.skip=[a,b", "] is missing at the end"), ('x="\'a,b"', "' is missing at the end"), ("seed=1,2 seed=3", "is given twice"),
        ("full_finetune seed", "overrides have the form"), ("output_dir=a,b", "each run has its own folder"),
        (f"seed={','.join(map(str, range(20_000)))}", "has 20000 runs"))),
    # --- configs of other trainers
    (f"migrate {TUNE} --output mine.yaml", "mine.yaml: exists"),
    (f"migrate {TUNE} --world-size 3 --output b.yaml", "do not divide among 8"),
    (f"migrate {TUNE} --output b.txt", "ends in .yaml"),
    ("migrate lora.yml --output b.yaml", "adapter: lora trains adapters"),
    ("migrate nothing.yaml", "no such config file"),
]
# fmt: on


@pytest.mark.parametrize(("arguments", "words"), ids(COMMANDS))
def test_a_wrong_command_line_is_one_line(command: Command, here: Path, arguments: str, words: str) -> None:
    check(words, here, lambda: command(*shlex.split(arguments)))


@pytest.mark.parametrize(
    ("variables", "words"),
    ids(
        [
            ({"RANK": "0"}, "run: RANK=0 in the environment"),
            ({"WORLD_SIZE": "2"}, "run: WORLD_SIZE=2 in the environment"),
            ({"RANK": "a", "WORLD_SIZE": "2"}, "run: RANK=a in the environment"),
            ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "a"}, "run: LOCAL_RANK=a in the environment"),
            ({"PET_NNODES": "2"}, "run: --nnodes 2: the machines need a place to meet"),  # as Kubernetes asks
        ]
    ),
)
def test_a_wrong_variable_of_a_launcher_is_one_line(
    command: Command, here: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    check(words, here, lambda: command("run", *TOY.split()))


def test_a_message_of_several_lines_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """As those of parsers are, which a message may quote."""
    with pytest.raises(SystemExit) as ended:
        fail("r.parquet: not Parquet:\n  magic bytes not found\n")
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: r.parquet: not Parquet: magic bytes not found\n"
