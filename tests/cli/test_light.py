"""Commands that answer without torch import neither it nor anything else that takes long."""

import json
from pathlib import Path

from tests.cli.conftest import write_model
from tests.helpers import cold

# One process: a module that a command imports stays imported, so the first that imports too much is named.
PROGRAM = """
import contextlib, io, json, sys
from lptune.cli.main import main
from lptune.tools.doctor import child

child.lines = lambda **_: ()  # in place of a process that imports torch
for heavy, arguments, words in json.loads(sys.argv[1]):
    said, code = io.StringIO(), 0
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            main(arguments.split())
    except SystemExit as end:
        code = end.code
    found = sorted(set(heavy.split()) & set(sys.modules))
    assert not found, f"{arguments}: imports {found}"
    assert (code, words in said.getvalue()) == (2 if words else 0, True), (arguments, code, said.getvalue())
"""
HEAVY = "torch numpy transformers tokenizers huggingface_hub safetensors jinja2"
NO_TORCH = "torch transformers"
"""For what reads headers of weights, and for tools that compute with numpy."""
RUN = "full_finetune --config quickstart model.path=m device=cpu"
THREE = f"run --nproc-per-node 3 {RUN}"
COMMANDS = [
    *((HEAVY, command, "") for command in (
        "--help", "run --help", "run full_dpo --help", "run -h", "new-checkpoint --help", "plan --help",
        "advise --help", "report --help", "keys", "keys precision.kind", "ls", "ls gemma",
        "validate llama3_2/1b data.source=rows.jsonl seed=1", "validate full_finetune --config quickstart",
    )),
    # What a run refuses before it imports anything that takes long.
    (HEAVY, f"{THREE} sed=1", "unknown key 'sed' (did you mean 'seed'?)"),
    (HEAVY, f"{THREE} micro_batch_size=8", "do not divide among 3 data ranks; set global_batch_size to a"),
    (HEAVY, f"{THREE} parallel.tensor=2", "tensor=2 needs a multiple of 2 ranks, found 3"),
    (HEAVY, f"run {RUN} model.path=nowhere", "model.path: nowhere is not a folder; `lptune download`"),
    (HEAVY, f"run {RUN} data.source=rows.jsnl.json", "rows.jsnl.json: no such file; set data.source"),
    (HEAVY, f"run {RUN} precision.kind=float8_rowwise", "float8_rowwise needs a device"),
    *((NO_TORCH, f"{command} --config eight.yaml", "the checkpoint is quantized (gptq)") for command in (
        "run full_finetune", "validate full_finetune", "plan", "advise",
    )),
    *((NO_TORCH, command, "") for command in (
        "migrate theirs.yaml --output mine.yaml", "doctor", "report a", "diff a quickstart",
    )),
]  # fmt: skip


def test_what_needs_no_torch_imports_none(tmp_path: Path) -> None:
    write_model(tmp_path / "m")
    eight = write_model(tmp_path / "eight") / "config.json"
    quantized = {"quantization_config": {"quant_method": "gptq"}}
    eight.write_text(json.dumps(json.loads(eight.read_text()) | quantized))
    (tmp_path / "eight.yaml").write_text("model: {path: eight}\ndata: {source: builtin}\ndevice: cpu\n")
    (tmp_path / "theirs.yaml").write_text("base_model: /m\ndatasets: [{path: a.jsonl}]\n")
    (tmp_path / "a").mkdir()
    (tmp_path / "a/metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n')
    done = cold.run("-c", PROGRAM, json.dumps(COMMANDS), folder=tmp_path)
    assert done.returncode == 0, done.stderr
