"""Malformed input in bulk: configs, data files and checkpoints, read by the functions that a run calls.

    python -m tests.faults.malformed --num-mutations 20000 --seed 1

Each case has a name and must end as one line (UserError). Mutations of valid input, bytes flipped, cut and
put in, keys dropped and retyped, may also be valid; anything but that and one line is a bug. In a training
checkpoint no changed byte is valid; there, mutations of the manifest come with the right digest, too.

Mistakes that people make are in tests/config/test_load.py and tests/data/test_refused.py, and, with what the
command line makes of such lines (exit code 2, nothing written), in tests/cli/test_wrong_inputs.py.
"""

import argparse
import json
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lptune import checkpoint, data, distributed, models
from lptune.base.errors import UserError
from lptune.base.files import write_json
from lptune.checkpoint.files import save_tensors
from lptune.checkpoint.manifest import Shard, _seal, describe_file, write_manifest
from lptune.config import DataConfig, FinetuneConfig, load_config

BASE = "model: {path: x}\ndata: {source: builtin}\n"


def is_one_line(read: Callable[[], object]) -> bool:
    """Whether `read` refuses, in one line; False where it takes what it reads."""
    try:
        read()
    except UserError as error:
        line = str(error)
        assert "\n" not in line, line
        assert 0 < len(line) < 2000, line
        return True
    return False


# ---- configs


def _key(text: str) -> str:
    return BASE + text + "\n"


CONFIGS: dict[str, str | bytes] = {
    "null": "null",
    "text": "hello",
    "list": "- a",
    "two documents": BASE + "---\n" + BASE,
    "tab": "model:\n\tpath: x\n",
    "open bracket": "model: {path: x",
    "open quote": "model: {path: 'x}",
    "NUL": "a\0b: 1",
    "control character": _key("output_dir: a\x01b"),
    "too long": _key("#" * 300_000),
    "deep list": "a: " + "[" * 50_000,
    "python name": "seed: !!python/name:os.system",
    "null key": "~: 2",
    "loop to itself": _key("output_dir: ${output_dir}"),
    "unknown resolver": _key("output_dir: '${os.system:ls}'"),
    "resolver from a key": _key("output_dir: '${${seed}:a}'"),
    "unset variable": _key("output_dir: ${oc.env:LPTUNE_NOT_SET}"),
    "section for a value": _key("seed: {a: 1}"),
    "float for an integer": _key("num_steps: 1.5"),
    "nan": _key("optimizer: {lr: .nan}"),
    "negative": _key("micro_batch_size: -1"),
    "zero": _key("global_batch_size: 0"),
    "digits": _key("seed: " + "9" * 5000),
    "empty path": "model: {path: ''}\ndata: {source: builtin}",
    "NUL in a path": 'model: {path: "a\\0b"}\ndata: {source: builtin}',
    "long name": _key("output_dir: " + "x" * 300),
}


def read_config(path: Path) -> None:
    load_config(FinetuneConfig, path)


# ---- data


def _rows(*rows: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


GOOD_ROW = {"prompt": "What is 2 + 2?", "response": "4"}
GOOD_CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}


def _calls(calls: Any) -> bytes:
    answer = {"role": "assistant", "tool_calls": calls}
    return _rows(GOOD_CHAT, {"messages": [GOOD_CHAT["messages"][0], answer]})


DATA: dict[str, tuple[str, bytes]] = {
    "empty": ("r.jsonl", b""),
    "no object": ("r.jsonl", b"3\n"),
    "a list": ("r.jsonl", b"[1]\n"),
    "cut": ("r.jsonl", _rows(GOOD_ROW)[:-5]),
    "not UTF-8": ("r.jsonl", b'{"prompt": "\xff"}\n'),
    "NUL": ("r.jsonl", b"\0" * 99),
    "deep": ("r.jsonl", b'{"prompt": ' + b"[" * 99_999 + b"\n"),
    "digits": ("r.jsonl", b'{"prompt": ' + b"9" * 9999 + b', "response": "x"}\n'),
    "null row": ("r.jsonl", _rows(GOOD_ROW, None)),
    "text after": ("r.jsonl", _rows(GOOD_ROW)[:-1] + b" x\n"),
    "json cut": ("r.json", b'[{"prompt": "x"'),
    "json object": ("r.json", b'{"a": 1}'),
    "json deep": ("r.json", b"[" * 99_999),
    "json conversation": ("r.json", json.dumps(GOOD_CHAT).encode()),
    "csv header only": ("r.csv", b"prompt,response\n"),
    "csv another separator": ("r.csv", b"prompt;response\nx,y\n"),
    "csv open quote": ("r.csv", b'prompt,response\n"x,y\n'),
    "csv too many": ("r.csv", b"prompt,response\nx,y,z\n"),
    "csv doubled name": ("r.csv", b"prompt,prompt\nx,y\n"),
    "csv no name": ("r.csv", b"prompt,\nx,y\n"),
    "txt binary": ("r.txt", bytes(range(256))),
    "parquet cut": ("r.parquet", b"PAR1\x15\x04\x15"),
    "parquet ends": ("r.parquet", b"PAR1" + bytes(99) + b"\xff\xff\xff\x7fPAR1"),
    "spreadsheet": ("r.xlsx", b"PK\x03\x04"),
    "script": ("r.py", b"raise SystemExit('canary')"),
    "tool call text": ("r.jsonl", _calls("x")),
    "tool call nameless": ("r.jsonl", _calls([{"function": {}}])),
}


def read_data(path: Path, tokenizer: data.Tokenizer) -> None:
    data.prepare(DataConfig(source=str(path), seq_len=64), tokenizer, seed=0, vocab_size=1024)


# ---- Hugging Face folders


def read_model(folder: Path) -> None:
    """What a run reads of model.path before it builds anything."""
    index = checkpoint.read_index(folder)
    model = models.build_on_meta(models.read_config(folder))
    checkpoint.match_tensors(model, index)
    data.load_tokenizer(folder)


def _edit(name: str, **changes: Any) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | changes))

    return edit


def _write(name: str, content: str | bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(
        content.encode() if isinstance(content, str) else content
    )


def _header(content: Any, num_bytes: int = 0, size: int | None = None) -> Callable[[Path], object]:
    text = json.dumps(content).encode() if not isinstance(content, bytes) else content
    return _write(
        "model.safetensors",
        (len(text) if size is None else size).to_bytes(8, "little") + text + bytes(num_bytes),
    )


def _index(content: Any) -> Callable[[Path], object]:
    return _index_text(json.dumps(content))


def _index_text(text: str) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "weights.safetensors")  # it would be read instead
        (folder / "model.safetensors.index.json").write_text(text)

    return write


def _link(name: str, target: str) -> Callable[[Path], object]:
    def link(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return link


def _tensor(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"model.norm.weight": {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}}


MODELS: dict[str, Callable[[Path], object]] = {
    "no weights": lambda f: (f / "model.safetensors").unlink(),
    "empty weights": _write("model.safetensors", b""),
    "header of 1 GB": _header({}, size=10**9),
    "header beyond the end": _header({}, size=99),
    "header no JSON": _header(b"{nope"),
    "header deep": _header(b"[" * 9999),
    "offsets backwards": _header(_tensor("F32", [1], 4, 0), 4),
    "offsets beyond": _header(_tensor("F32", [9], 0, 36), 4),
    "shape huge": _header(_tensor("F32", [2**40, 2**40], 0, 4), 4),
    "dtype unknown": _header(_tensor("F99", [1], 0, 4), 4),
    "hole": _header(_tensor("F32", [1], 4, 8), 8),
    "bytes left over": _header(_tensor("F32", [1], 0, 4), 99),
    "another model": _header(_tensor("F32", [1], 0, 4), 4),
    "index empty": _index({"weight_map": {}}),
    "index list": _index({"weight_map": []}),
    "index absolute": _index({"weight_map": {"a": "/etc/passwd.safetensors"}}),
    "index pickle": _index({"weight_map": {"a": "model.bin"}}),
    "index NUL": _index({"weight_map": {"a": "a\0.safetensors"}}),
    "weights are a folder": lambda f: ((f / "model.safetensors").unlink(), (f / "model.safetensors").mkdir()),
    "link out": _link("model.safetensors", "/etc/hosts"),
    "link to nowhere": _link("model.safetensors", "nowhere"),
    "config linked out": _link("config.json", "/etc/hosts"),
    "device for a config": _link("config.json", "/dev/zero"),
    "other JSON linked out": _link("secret.json", "/etc/passwd"),
    "config not UTF-8": _write("config.json", b"\xff"),
    "config digits": _write("config.json", '{"a": ' + "9" * 9999 + "}"),
    "config deep": _write("config.json", "[" * 99_999),
    "config too long": _write("config.json", '{"a": "' + "x" * (16 * 1024**2) + '"}'),
    "huge size": _edit("config.json", hidden_size=2**40),
    "zero size": _edit("config.json", vocab_size=0),
    "rope null": _edit("config.json", rope_scaling={"rope_type": None}),
    "only code": _edit("config.json", model_type="canary", auto_map={"AutoModelForCausalLM": "canary.Model"}),
    "tokenizer model": _edit("tokenizer.json", model={}),
    "added tokens": _edit("tokenizer.json", added_tokens=3),
    "tokenizer config list": _write("tokenizer_config.json", "[]"),
    "template number": _edit("tokenizer_config.json", chat_template=3),
    "templates of lists": _edit("tokenizer_config.json", chat_template=[{"name": [], "template": "x"}]),
    "template broken": _edit("tokenizer_config.json", chat_template="{% if %}"),
    "template long": _edit("tokenizer_config.json", chat_template="x" * 999_999),
    "template file binary": _write("chat_template.jinja", b"\xff\xfe"),
    "decoder ids": _edit("tokenizer_config.json", added_tokens_decoder={"x": {}}),
}


# ---- training checkpoints


def write_state(root: Path) -> Path:
    """step-00000007 as two ranks leave it: a matrix cut by rows, a vector on the second."""
    folder = root / "step-00000007"
    folder.mkdir(parents=True)
    values = torch.arange(12.0).reshape(4, 3)
    first, second = "model-00000.safetensors", "model-00001.safetensors"
    save_tensors(folder / first, {"w": values[:3].contiguous()})
    save_tensors(folder / second, {"w": values[3:].contiguous(), "b": torch.ones(4)})
    write_json(folder / "state.json", {"step": 7, "fingerprint": {"seed": 0}, "started_on": "2026-11-22"})
    shards = {
        "w": [Shard(first, ((0, 3), (0, 3)), 0), Shard(second, ((3, 1), (0, 3)), 0)],
        "b": [Shard(second, ((0, 4), (0, 1)), 0)],
    }
    files = {path.name: describe_file(path) for path in folder.iterdir()}
    write_manifest(folder, 7, 2, files, shards)
    return folder


def cut_in_a_third_dimension(folder: Path) -> None:
    """`w` as a stack of matrices, each rank with a part of all of them: a manifest of version 4."""
    first, second = "model-00000.safetensors", "model-00001.safetensors"
    save_tensors(folder / first, {"w": torch.zeros(2, 3, 2)})
    save_tensors(folder / second, {"w": torch.zeros(2, 3, 1), "b": torch.ones(4)})
    part = {"start": 0, "rows": 2, "column": 0, "columns": 3, "at": 0}

    def edit(content: dict[str, Any]) -> None:
        content["version"] = 4
        content["files"] |= {file: describe_file(folder / file) for file in (first, second)}
        content["shards"]["w"] = [
            {"file": first, **part, "beyond": [[0, 2]]},
            {"file": second, **part, "beyond": [[2, 1]]},
        ]

    reseal(folder, edit)


def read_state(folder: Path) -> None:
    """What a run reads of a checkpoint before it builds anything."""
    manifest = checkpoint.verify(folder)
    state = checkpoint.read_state(manifest)
    _ = state.started_on, state.skipped
    alone = distributed.World(0, 1, torch.device("cpu"), mesh=None)  # type: ignore[arg-type]
    checkpoint.check_fingerprint(state, checkpoint.RunState({"fingerprint": {}}), alone)


def reseal(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Another content of the manifest, with its right digest."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    del content["digest"]
    edited = edit(content)
    write_sealed(path, content if edited is None or not isinstance(edited, list) else edited)


def write_sealed(path: Path, content: Any) -> None:
    body = json.dumps(content, indent=2, ensure_ascii=False).removesuffix("\n}").encode()
    path.write_bytes(body + _seal(body).encode())


def _set(*keys: Any, to: Any) -> Callable[[Path], object]:
    def edit(content: dict[str, Any]) -> None:
        inner: Any = content
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = to

    return lambda folder: reseal(folder, edit)


def _pop(*keys: Any) -> Callable[[Path], object]:
    def edit(content: dict[str, Any]) -> None:
        inner: Any = content
        for key in keys[:-1]:
            inner = inner[key]
        del inner[keys[-1]]

    return lambda folder: reseal(folder, edit)


def _box(to: Any) -> Callable[[Path], object]:
    """A stack of matrices, the second rank's part of which has another `beyond`."""
    return _after(cut_in_a_third_dimension, _set("shards", "w", 1, "beyond", to=to))


def _after(*damages: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: [damage(folder) for damage in damages]


def _named(name: str) -> Callable[[Path], object]:
    def edit(content: dict[str, Any]) -> None:
        content["files"][name] = content["files"]["model-00000.safetensors"]

    return lambda folder: reseal(folder, edit)


def _state(content: str) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        (folder / "state.json").write_text(content)
        entry = describe_file(folder / "state.json")
        reseal(folder, lambda manifest: manifest["files"].update({"state.json": entry}))

    return edit


def _tensors(tensors: dict[str, torch.Tensor]) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        file = folder / "model-00000.safetensors"
        save_tensors(file, tensors)
        entry = describe_file(file)
        reseal(folder, lambda manifest: manifest["files"].update({file.name: entry}))

    return edit


def _space(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b"{\n  ", b"{\n   ", 1))


def _linked(folder: Path) -> None:
    (folder / "state.json").rename(folder.parent / "state.json")
    (folder / "state.json").symlink_to("../state.json")


STATES: dict[str, Callable[[Path], object]] = {
    "manifest gone": lambda f: (f / "manifest.json").unlink(),
    "manifest empty": _write("manifest.json", b""),
    "manifest list": _write("manifest.json", b"[]"),
    "manifest deep": _write("manifest.json", b"[" * 99_999),
    "a space more": _space,
    "no last newline": lambda f: (f / "manifest.json").write_bytes((f / "manifest.json").read_bytes()[:-1]),
    "digest gone": lambda f: (f / "manifest.json").write_text(
        json.dumps({k: v for k, v in json.loads((f / "manifest.json").read_text()).items() if k != "digest"})
    ),
    "renamed": lambda f: f.rename(f.with_name("step-00000008")),
    "linked file": _linked,
    "another's file": _write("model-00002.safetensors", b"x"),
    "version": _set("version", to=99),
    "step bool": _set("step", to=True),
    "step negative": _set("step", to=-1),
    "step gone": _pop("step"),
    "another step": _set("step", to=8),
    "no ranks": _set("world_size", to=0),
    "ranks gone": _pop("world_size"),
    "files gone": _pop("files"),
    "no files": _set("files", to={}),
    "shards gone": _pop("shards"),
    "no shards": _set("shards", to={}),
    "upwards": _named("../model-00000.safetensors"),
    "absolute": _named("/etc/passwd"),
    "pickle": _named("model.bin"),
    "a file too many": _named("model-00009.safetensors"),
    "itself": _named("manifest.json"),
    "state gone": _pop("files", "state.json"),
    "size wrong": _set("files", "state.json", "size", to=1),
    "size gone": _pop("files", "state.json", "size"),
    "hash wrong": _set("files", "state.json", "sha256", to="0" * 64),
    "parts gone": _set("shards", "w", to=[]),
    "part lost": _pop("shards", "w", 0),
    "tensor lost": _pop("shards", "b"),
    "tensor invented": _set(
        "shards",
        "c",
        to=[{"file": "model-00000.safetensors", "start": 0, "rows": 1, "column": 0, "columns": 1, "at": 0}],
    ),
    "gap": _set("shards", "w", 1, "start", to=4),
    "overlap": _set("shards", "w", 1, "start", to=2),
    "twice": _set("shards", "w", 1, "start", to=0),
    "start negative": _set("shards", "w", 0, "start", to=-1),
    "rows zero": _set("shards", "w", 0, "rows", to=0),
    "rows gone": _pop("shards", "w", 0, "rows"),
    "columns more": _set("shards", "w", 0, "columns", to=4),
    "column moved": _set("shards", "w", 0, "column", to=1),
    "at beyond": _set("shards", "w", 0, "at", to=1),
    "in another file": _set("shards", "w", 0, "file", to="model-00001.safetensors"),
    "in no file": _set("shards", "w", 0, "file", to="x.safetensors"),
    "in state.json": _set("shards", "w", 0, "file", to="state.json"),
    "boxes of a matrix": _after(
        _set("version", to=4),
        _set("shards", "w", 0, "beyond", to=[[0, 1]]),
        _set("shards", "w", 1, "beyond", to=[[0, 1]]),
    ),
    "box gone": _after(cut_in_a_third_dimension, _pop("shards", "w", 1, "beyond")),
    "boxes gone": _after(
        cut_in_a_third_dimension, _pop("shards", "w", 0, "beyond"), _pop("shards", "w", 1, "beyond")
    ),
    "box without elements": _box([[2, 0]]),
    "box overlaps": _box([[1, 1]]),
    "box leaves a gap": _box([[3, 1]]),
    "box longer": _box([[2, 2]]),
    "box of more dimensions": _box([[2, 1], [0, 1]]),
    "stack of other dtype": _after(
        cut_in_a_third_dimension, _tensors({"w": torch.zeros(2, 3, 2, dtype=torch.bfloat16)})
    ),
    "stack longer in its file": _after(cut_in_a_third_dimension, _tensors({"w": torch.zeros(2, 3, 3)})),
    "stack of more dimensions": _after(cut_in_a_third_dimension, _tensors({"w": torch.zeros(2, 3, 2, 1)})),
    "matrix of a stack": _tensors({"w": torch.zeros(3, 3, 2)}),
    "tensor of other shape": _tensors({"w": torch.zeros(2, 3)}),
    "tensor of other dtype": _tensors({"w": torch.zeros(3, 3, dtype=torch.int32)}),
    "tensor of half": _tensors({"w": torch.zeros(3, 3).half()}),
    "tensor too many": _tensors({"w": torch.zeros(3, 3), "x": torch.zeros(1)}),
    "tensor missing": _tensors({"x": torch.zeros(1)}),
    "scalar": _tensors({"w": torch.tensor(1.0)}),
    "state list": _state("[]"),
    "state cut": _state("{"),
    "state of another step": _state('{"step": 8, "fingerprint": {}, "started_on": "2026-11-22"}'),
    "no fingerprint": _state('{"step": 7, "started_on": "2026-11-22"}'),
    "no date": _state('{"step": 7, "fingerprint": {}}'),
    "date wrong": _state('{"step": 7, "fingerprint": {}, "started_on": "2026-13-40"}'),
}


# ---- mutations


def mutate_bytes(content: bytes, choose: random.Random) -> bytes:
    """Up to three of: a bit flipped, a part cut out, the end cut off, bytes put in, a part repeated."""
    mutable = bytearray(content)
    for _ in range(choose.randint(1, 3)):
        at = choose.randrange(len(mutable) + 1)
        length = choose.choice((1, 2, 8, 100))
        match choose.randrange(5):
            case 0 if at < len(mutable):
                mutable[at] ^= 1 << choose.randrange(8)
            case 1:
                del mutable[at : at + length]
            case 2:
                del mutable[at:]
            case 3:
                mutable[at:at] = choose.choice(
                    (b"\0", b"{", b"[", b'"', b"\xff", b"-1", b"null", b"9" * 20, b"\n")
                )
            case _:
                mutable[at:at] = mutable[at : at + length]
    return bytes(mutable)


_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**31,
    2**70,
    1.5,
    "",
    "x",
    "\ud800",
    "../x",
    [],
    [1],
    {},
    {"a": 1},
    [[]],
)


def mutate_json(value: Any, choose: random.Random) -> Any:
    """`value` with one thing in it dropped, retyped, renamed or repeated."""
    if not isinstance(value, (dict, list)) or not value or choose.random() < 0.1:
        return choose.choice(_VALUES)
    changed: Any = value.copy()
    key = choose.choice(list(changed)) if isinstance(changed, dict) else choose.randrange(len(changed))
    action = choose.random()
    if action < 0.15:
        del changed[key]
    elif action < 0.25 and isinstance(changed, dict):
        changed[choose.choice(("x", "../x", "", "\0", key + "x"))] = changed.pop(key)
    elif action < 0.3 and isinstance(changed, list):
        changed.append(changed[key])
    else:
        changed[key] = mutate_json(changed[key], choose)
    return changed


class Inputs:
    """Valid input, to be damaged in a scratch folder. model: a folder of `lptune new-checkpoint`."""

    def __init__(self, root: Path, model: Path) -> None:
        self.root, self.model = root, model
        self.tokenizer = data.load_tokenizer(model)
        self.state = write_state(root / "valid")
        self.stack = write_state(root / "valid-stack")
        cut_in_a_third_dimension(self.stack)
        self.config = (
            BASE + "optimizer: {lr: 1.0e-4}\nprecision: {kind: int8_rowcol, skip: [lm_head]}\nseed: 3\n"
        )
        self.rows = _rows(*([GOOD_ROW, {**GOOD_ROW, "response": "four"}] * 4))
        self.chats = _rows(*([GOOD_CHAT] * 4))

    def copy_of(self, folder: Path) -> Path:
        target = self.root / "copy" / folder.name
        shutil.rmtree(target.parent, ignore_errors=True)
        shutil.copytree(folder, target, symlinks=True)
        return target

    def refuses_config(self, text: str | bytes) -> bool:
        path = self.root / "config.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return is_one_line(lambda: read_config(path))

    def refuses_data(self, name: str, content: bytes) -> bool:
        path = self.root / name
        path.write_bytes(content)
        return is_one_line(lambda: read_data(path, self.tokenizer))

    def refuses_model(self, damage: Callable[[Path], object]) -> bool:
        folder = self.copy_of(self.model)
        damage(folder)
        return is_one_line(lambda: read_model(folder))

    def refuses_state(self, damage: Callable[[Path], object], state: Path | None = None) -> bool:
        folder = self.copy_of(state or self.state)
        damage(folder)
        if not folder.exists():
            (folder,) = folder.parent.iterdir()
        return is_one_line(lambda: read_state(folder))

    def mutate(self, choose: random.Random) -> None:
        """Reads one mutation of each kind. AssertionError for a changed training checkpoint that is taken."""
        self.refuses_config(mutate_bytes(self.config.encode(), choose))
        name, content = choose.choice(
            (("r.jsonl", self.rows), ("r.json", b"[" + self.rows[:-1].replace(b"\n", b",") + b"]"))
        )
        self.refuses_data(name, mutate_bytes(content, choose))
        changed = [
            mutate_json(json.loads(line), choose)
            for line in choose.choice((self.chats, self.rows)).splitlines()
        ]
        self.refuses_data("r.jsonl", _rows(*changed))
        json_name = choose.choice(("config.json", "tokenizer.json", "tokenizer_config.json"))
        content = json.loads((self.model / json_name).read_text())
        self.refuses_model(_write(json_name, json.dumps(mutate_json(content, choose))))
        weights = (self.model / "model.safetensors").read_bytes()
        header = mutate_bytes(weights[:2000], choose)
        self.refuses_model(_write("model.safetensors", header + weights[2000:]))
        state = choose.choice((self.state, self.stack))
        file = choose.choice(sorted(state.iterdir()))
        damaged = mutate_bytes(file.read_bytes(), choose)
        refused = self.refuses_state(_write(file.name, damaged), state)
        assert refused or damaged == file.read_bytes(), f"{file.name}: {damaged!r:.2000}"
        content = json.loads((state / "manifest.json").read_text())
        del content["digest"]
        changed = mutate_json(content, choose)
        try:
            json.dumps(changed, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return
        self.refuses_state(lambda folder: write_sealed(folder / "manifest.json", changed), state)


def main() -> None:
    """All cases, then `--num-mutations` mutations of each kind."""
    from lptune.cli.main import main as lptune

    parser = argparse.ArgumentParser()
    parser.add_argument("--num-mutations", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        model = Path(root) / "model"
        try:
            lptune(["new-checkpoint", "llama3_2/tiny", str(model)])
        except SystemExit as done:
            if done.code:
                raise
        inputs = Inputs(Path(root), model)
        taken = [f"config: {name}" for name, text in CONFIGS.items() if not inputs.refuses_config(text)]
        taken += [f"data: {name}" for name, file in DATA.items() if not inputs.refuses_data(*file)]
        taken += [f"model: {name}" for name, damage in MODELS.items() if not inputs.refuses_model(damage)]
        taken += [f"state: {name}" for name, damage in STATES.items() if not inputs.refuses_state(damage)]
        counts = [len(CONFIGS), len(DATA), len(MODELS), len(STATES)]
        print("configs, data files, model folders, training checkpoints:", counts, "taken:", taken)
        for number in range(arguments.num_mutations):
            inputs.mutate(random.Random(arguments.seed * 10**6 + number))
        print(f"{7 * arguments.num_mutations} mutations: each valid or one line; no changed checkpoint taken")
        if taken:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
