"""Ten hostile files, and what the process that reads them does: nothing but read.

    python -m tests.faults.hostile FOLDER

Each file holds a canary, code that would make a file named `canary`. The commands that read it run in this
process under an audit hook, which sees what the interpreter does whoever asks for it: classes looked up by
unpickling, commands, and code or imports from the folder. Last, a training run with a resume and an export
runs under the same hook. What was seen goes to FOLDER/seen.json.
"""

import json
import os
import pickle
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from lptune.cli.main import main as lptune
from tests.faults.malformed import write_state

COMMANDS = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "pty.spawn")


class Canary:
    """Unpickled, it makes the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


class Hostile:
    """The files, below `folder`, and the commands that read them with the exit code that each must have."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self.canary = folder / "canary"
        self.script = f"open({str(self.canary)!r}, 'w')\n"

    def copy(self, name: str) -> Path:
        shutil.copytree(self.model, self.folder / name)
        return self.folder / name

    def run(self, name: str, model: Path, source: Path | str | None = None, **keys: Any) -> list[str]:
        values = {
            "model.path": model, "data.source": source or self.folder / "rows.jsonl", "data.seq_len": 64,
            "num_steps": 1, "global_batch_size": 2, "micro_batch_size": 2, "compile": "none", "device": "cpu",
            "output_dir": self.folder / f"run-{name}",
        }  # fmt: skip
        (self.folder / f"{name}.yaml").write_text("{}\n")
        arguments = [f"{key}={value}" for key, value in (values | keys).items()]
        return ["run", "full_finetune", "--config", str(self.folder / f"{name}.yaml"), *arguments]

    def pickled_weights(self) -> list[tuple[list[str], int]]:
        model = self.copy("bin")
        (model / "model.safetensors").unlink()
        torch.save({"w": Canary(self.canary)}, model / "pytorch_model.bin")
        return [(self.run("bin", model), 2), (["verify", str(model)], 2)]

    def renamed_pickle(self) -> list[tuple[list[str], int]]:
        model = self.copy("renamed")
        torch.save({"w": Canary(self.canary)}, model / "model.safetensors")
        return [(self.run("renamed", model), 2), (["verify", str(model)], 2)]

    def pickle_in_a_checkpoint(self) -> list[tuple[list[str], int]]:
        state = write_state(self.folder / "dcp")
        for name in (".metadata", "__0_0.distcp", "rng_state.pth"):
            (state / name).write_bytes(pickle.dumps(Canary(self.canary)))
        resume = self.run("dcp", self.model, resume=state)
        return [(["verify", str(state)], 0), (resume, 2)]  # 2: it is another model's

    def yaml_tag(self) -> list[tuple[list[str], int]]:
        path = self.folder / "tag.yaml"
        path.write_text(f"model: !!python/object/apply:os.system ['touch {self.canary}']\n")
        return [(["validate", str(path)], 2), (["run", "full_finetune", "--config", str(path)], 2)]

    def template(self) -> list[tuple[list[str], int]]:
        model = self.copy("template")
        escape = "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}"
        _edit(model / "tokenizer_config.json", chat_template=escape.replace("CANARY", str(self.canary)))
        return [(self.run("template", model, self.folder / "chats.jsonl"), 2)]

    def code_beside_the_config(self) -> list[tuple[list[str], int]]:
        model = self.copy("auto_map")
        _edit(model / "config.json", auto_map={"AutoModelForCausalLM": "canary.Model"})
        _edit(model / "tokenizer_config.json", auto_map={"AutoTokenizer": ["canary.T", None]})
        for name in ("canary.py", "modeling_llama.py", "tokenization_llama.py"):
            (model / name).write_text(self.script)
        return [(["verify", str(model)], 0), (self.run("auto_map", model), 0)]

    def data_script(self) -> list[tuple[list[str], int]]:
        folder = self.folder / "scripted"
        folder.mkdir()
        (folder / "scripted.py").write_text(self.script)
        paths = (folder, folder / "scripted.py")
        return [(self.run(str(n), self.model, path), 2) for n, path in enumerate(paths)]

    def path_traversal(self) -> list[tuple[list[str], int]]:
        model = self.copy("traversal")
        (model / "model.safetensors").rename(self.folder / "outside.safetensors")
        names = dict.fromkeys(load_file(self.folder / "outside.safetensors"), "../outside.safetensors")
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
        return [(self.run("traversal", model), 2), (["verify", str(model)], 2)]

    def link(self) -> list[tuple[list[str], int]]:
        model = self.copy("link")
        (self.folder / "secret.json").write_text('{"token": "secret"}')
        (model / "extra.json").symlink_to("../secret.json")  # it would be exported, and published
        return [(self.run("link", model), 2)]

    def huge_header(self) -> list[tuple[list[str], int]]:
        model = self.copy("header")
        with (model / "model.safetensors").open("wb") as file:
            file.write((10**9).to_bytes(8, "little") + b'{"')
            file.truncate(10**9 + 8)
        return [(self.run("header", model), 2), (["verify", str(model)], 2)]


FILES: tuple[Callable[[Hostile], list[tuple[list[str], int]]], ...] = (
    Hostile.pickled_weights,
    Hostile.renamed_pickle,
    Hostile.pickle_in_a_checkpoint,
    Hostile.yaml_tag,
    Hostile.template,
    Hostile.code_beside_the_config,
    Hostile.data_script,
    Hostile.path_traversal,
    Hostile.link,
    Hostile.huge_header,
)


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def watch(folder: Path) -> dict[str, list[str]]:
    """What happens from now on: {event: descriptions}, filled as it happens. There is no way to unhook."""
    seen: dict[str, list[str]] = {}

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        place = ""
        if event == "exec":
            place = getattr(arguments[0], "co_filename", "")
        elif event in ("import", "compile", "open"):
            place = str(arguments[1] if event != "open" else arguments[0])
        if event == "subprocess.Popen" and str(arguments[1][-1]).endswith("lptune/data/hf_process.py"):
            return  # it loads tokenizers and renders templates; what it did shows in the canaries
        if event == "pickle.find_class" or event in COMMANDS:
            frame, callers = sys._getframe(1), []
            while frame is not None:
                callers.append(frame.f_globals.get("__name__", "?"))
                frame = frame.f_back  # type: ignore[assignment]
            seen.setdefault(event, []).append(f"{arguments!r:.100} from {' < '.join(dict.fromkeys(callers))}")
        elif place.startswith(str(folder)) and (
            event != "open" or place.endswith((".py", ".bin", ".pth", ".distcp", ".metadata"))
        ):
            seen.setdefault(event, []).append(place)

    sys.addaudithook(hook)
    return seen


def exit_code(arguments: list[str]) -> int:
    try:
        lptune(arguments)
    except SystemExit as done:
        return int(done.code or 0)


def main(folder: Path) -> None:
    """Makes the files in `folder`, reads them, and writes seen.json."""
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "model"
    assert exit_code(["new-checkpoint", "llama3_2/tiny", str(model)]) == 0
    row = {"prompt": "What is 2 + 2?", "response": "It is 4."}
    (folder / "rows.jsonl").write_text((json.dumps(row) + "\n") * 8)
    chat = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    (folder / "chats.jsonl").write_text((json.dumps(chat) + "\n") * 8)
    hostile = Hostile(folder, model)
    commands = {make.__name__: make(hostile) for make in FILES}
    plain = hostile.run("plain", model)
    assert exit_code(plain) == 0  # imports what the first run of a process imports
    shutil.rmtree(folder / "run-plain")

    seen = watch(folder)
    wrong = [
        f"{name}: {' '.join(arguments)}: exit {code}, expected {expected}"
        for name, pairs in commands.items()
        for arguments, expected in pairs
        if (code := exit_code(arguments)) != expected
    ]
    of_files = {event: list(found) for event, found in seen.items()}
    seen.clear()
    every = ["checkpoint.every_steps=1"]
    assert exit_code([*plain, *every, "num_steps=2"]) == 0
    assert exit_code([*plain, *every, "num_steps=3"]) == 0  # resumes
    last = folder / "run-plain" / "checkpoints" / "step-00000003"
    assert exit_code(["verify", str(last)]) == 0
    assert exit_code(["export", str(last), str(folder / "exported")]) == 0
    of_training = {event: list(found) for event, found in seen.items()}
    seen.clear()
    canary = hostile.canary.exists()
    # Were the hook or the canaries dead, the above would look the same.
    pickle.loads((folder / "dcp" / "step-00000007" / ".metadata").read_bytes())
    assert hostile.canary.exists()
    runpy.run_path(str(folder / "auto_map" / "canary.py"))
    report = {
        "wrong exit codes": wrong,
        "files": of_files,
        "training": of_training,
        "canary": canary,
        "planted": seen,
    }
    (folder / "seen.json").write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
