"""Texts: secrets in the environment x keys x forms of `${…}`, escapes x everything that is echoed."""

import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file, save_file

from lptune.config import FinetuneConfig, key_paths
from tests.faults.adversary.judge import EITHER, Case
from tests.faults.adversary.place import SECRET, Place
from tests.faults.adversary.things import put


def cases(rng: random.Random) -> Iterator[Case]:
    yield from _secrets(rng)
    yield from _secret_places()
    yield from _template_paths()
    yield from _echoes()


# ---- secrets

_READ = "${oc.env:TOP_SECRET}"
# Form -> (the key's value, that of data.cache: a variable may decide it, and these few rows are not cached).
_FORMS = {
    "plain": (_READ, None),
    "with spaces": ("${ oc.env : TOP_SECRET }", None),
    "as a default": ("${oc.env:NOT_THERE,${oc.env:TOP_SECRET}}", None),
    "within text": (f"a{_READ}b", None),
    "of a nested name": ("${oc.env:${data.cache}}", "TOP_SECRET"),
    "of a nested resolver": ("${oc.${data.cache}:TOP_SECRET}", "env"),
    "of a nested key": ("${${data.cache}:TOP_SECRET}", "oc.env"),
    "through another key": ("${data.cache}", _READ),
    "escaped": ("\\${oc.env:TOP_SECRET}", None),
    "escaped twice": ("\\\\${oc.env:TOP_SECRET}", None),
    "escaped and decoded": ("${oc.decode:'\\${oc.env:TOP_SECRET}'}", None),
    "escaped and put together": ("${oc.decode:${data.cache}}", "\\${oc.env:TOP_SECRET}"),
    "in a list": ([_READ], None),
    "in a mapping": ({"source": "rows.jsonl", "system_prompt": _READ}, None),
    "as the name of a key": ({_READ: "x"}, None),
    "created": ("${oc.create:{a: ${oc.env:TOP_SECRET}}}", None),
    "selected": ("${oc.select:data.cache}", _READ),
    "deprecated": ("${oc.deprecated:data.cache}", _READ),
    "of an older resolver": ("${env:TOP_SECRET}", None),
}
_PLACE_KEYS = (
    "model.path", "data.source", "data.eval_source", "data.cache", "data.chat_template", "output_dir",
    "resume",
)  # fmt: skip
"""What a variable decides of them is told where the place is named."""
_KEYS = [key for key in key_paths(FinetuneConfig) if key != "data.cache"]


def _secrets(rng: random.Random) -> Iterator[Case]:
    """All forms of all keys are some 1,200; a third of them is drawn."""
    for key, form in itertools.product(_KEYS, _FORMS):
        if rng.random() > 0.35 and not key.startswith("data.chat_template"):
            continue
        is_argument = rng.random() < 0.5 and isinstance(_FORMS[form][0], str)

        def prepare(
            place: Place, key: str = key, form: str = form, is_argument: bool = is_argument
        ) -> list[str]:
            value, of_other = _FORMS[form]
            other = [] if of_other is None else [f"data.cache={of_other}"]
            if is_argument:
                return place.job(*other, f"{key}={value}")
            _set(place.config, key, value)
            return place.job(*other)

        yield Case(
            subject="secrets",
            name=f"{key} {form}, by {'an argument' if is_argument else 'the file'}",
            prepare=prepare,
            may_hold=("work/*/state.json", "work/*/README.md") if key == "model.path" else (),
            may_tell=key in _PLACE_KEYS,
        )


def _set(path: Path, key: str, value: Any) -> None:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    section, _, leaf = key.rpartition(".")
    (content.setdefault(section, {}) if section else content)[leaf] = value
    path.write_text(yaml.safe_dump(content, allow_unicode=True), encoding="utf-8")


def _secret_places() -> Iterator[Case]:
    """A variable that decides a place, in a run that comes to its end."""
    for key, suffix in (
        ("model.path", ""), ("output_dir", ""), ("data.source", ".jsonl"), ("data.eval_source", ".jsonl"),
        ("data.cache", ""), ("data.chat_template", ".jinja"), ("resume", "/checkpoints/step-00000002"),
        ("seed", ""), ("precision.kind", ""),
    ):  # fmt: skip
        for form in (_READ, "${oc.env:NOT_THERE,${oc.env:TOP_SECRET}}"):

            def prepare(place: Place, key: str = key, form: str = form, suffix: str = suffix) -> list[str]:
                target = place.folder / SECRET
                if key == "model.path":
                    place.model.rename(target)
                elif key == "resume":
                    place.a_finished_run().rename(target)
                elif "source" in key:
                    target.with_suffix(suffix).write_bytes(place.rows.read_bytes())
                elif key == "data.chat_template":
                    target.with_suffix(suffix).write_text("{{ messages[0].content }}")
                return place.job(f"{key}={form}{suffix}", "num_steps=3")

            yield Case(
                subject="secret places",
                name=f"{key} is {form}",
                prepare=prepare,
                may_hold={
                    "model.path": ("work/run/*state.json", "work/run/*README.md"),
                    "output_dir": ("work/*/report.html",),
                }.get(key, ()),
                may_tell=key in _PLACE_KEYS,
            )


_TEMPLATES = {
    "a file without the suffix": "victim/file",
    "a link with the suffix": "link.jinja",
    "a link to /proc/self/environ": "environ.jinja",
    "/proc/self/environ": "/proc/self/environ",
    "dots": "victim/folder/../file",
    "a pipe": "pipe.jinja",
    "a folder": "folder.jinja",
    "a device": "device.jinja",
    "an include": "{% include 'victim/file' %}{{ messages }}",
    "an import": "{% import 'victim/file' as x %}{{ messages }}",
    "an attribute": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "the environment by globals": "{{ cycler.__init__.__globals__.os.environ }}",
    "the environment by a filter": "{{ 'x'|attr('__class__') }}{{ messages }}",
    "text": "{{ messages }}${oc.env:TOP_SECRET}",
    "text and a resolver by another key": "{{ messages }}${output_dir}",
}


def _template_paths() -> Iterator[Case]:
    for name, template in _TEMPLATES.items():

        def prepare(place: Place, template: str = template) -> list[str]:
            (place.folder / "link.jinja").symlink_to(place.victim / "file")
            (place.folder / "environ.jinja").symlink_to("/proc/self/environ")
            for thing in ("pipe", "folder", "device"):
                put(thing, place.folder / f"{thing}.jinja", place)
            return place.job(f"data.chat_template={template}")

        yield Case(subject="secret templates", name=name, prepare=prepare)


# ---- escapes

_ESCAPES = {
    "a title": "\x1b]0;x\x07",
    "a cleared screen": "\x1b[2J",
    "a C1 control": "\x9b2J",
    "right to left": "\u202efdp",
    "a return": "x\rok: all is well",
    "backspaces": "x\x08\x08",
    "a forged line": "x\nerror: forged",
    "a delete": "\x7f",
    "an isolate": "\u2067x",
}
Lay = Callable[[Place, str], list[str]]


def _in_config(key: str) -> Lay:
    def lay(place: Place, text: str) -> list[str]:
        _set(place.config, key, text)
        return place.job()

    return lay


def _in_rows(row: Callable[[str], Any], name: str = "rows.jsonl") -> Lay:
    def lay(place: Place, text: str) -> list[str]:
        content = row(text)
        written = content if isinstance(content, str) else json.dumps(content) + "\n"
        (place.folder / name).write_text(written, encoding="utf-8")
        return place.job(f"data.source={name}")

    return lay


def _in_model(file: str, command: tuple[str, ...] = (), **changes: Any) -> Lay:
    def lay(place: Place, text: str) -> list[str]:
        path = place.model / file
        content = json.loads(path.read_text(encoding="utf-8"))
        content |= {key: value(text) if callable(value) else value for key, value in changes.items()}
        path.write_text(json.dumps(content), encoding="utf-8")
        return list(command) or place.job()

    return lay


def _in_tensors(place: Place, text: str) -> list[str]:
    path = place.model / "model.safetensors"
    tensors = load_file(path)
    tensors[f"model.{text}"] = tensors.pop("model.norm.weight")
    save_file(tensors, path, metadata={"format": "pt"})
    return place.job()


def _in_weight_map(place: Place, text: str) -> list[str]:
    (place.model / "model.safetensors").unlink()
    weight_map = {"model.norm.weight": f"{text}.safetensors"}
    (place.model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return ["verify", "model"]


def _in_run(file: str, key: str, command: Callable[[Place], list[str]]) -> Lay:
    def lay(place: Place, text: str) -> list[str]:
        path = place.a_finished_run() / file
        content = json.loads(path.read_text(encoding="utf-8"))
        content[key] = text
        path.write_text(json.dumps(content), encoding="utf-8")
        return command(place)

    return lay


def _recipe(code: str) -> Lay:
    def lay(place: Place, text: str) -> list[str]:
        (place.folder / "mine.py").write_text(code.replace("TEXT", repr(text)), encoding="utf-8")
        return place.job(recipe="mine.py")

    return lay


def _named_beside(place: Place, text: str) -> list[str]:
    (place.folder / "folder").mkdir()
    place.rows.rename(place.folder / "folder" / "rows.jsonl")
    (place.folder / "folder" / f"{text}.md").touch()
    return place.job("data.source=folder")


def _named_weights(place: Place, text: str) -> list[str]:
    (place.model / "model.safetensors").rename(place.model / f"{text}.bin")
    return place.job()


def _named_step(place: Place, text: str) -> list[str]:
    (place.a_finished_run() / "checkpoints" / f"step-{text}").mkdir()
    return ["verify", "run"]


def _named_rows(place: Place, text: str) -> list[str]:
    (place.folder / f"{text}.jsonl").write_text("{}\n")
    return place.job("data.source=*.jsonl")


def _chat(**message: Any) -> Callable[[str], Any]:
    def row(text: str) -> Any:
        changed = {key: text if value is None else value for key, value in message.items()}
        return {
            "messages": [{"role": "user", "content": "x"} | changed, {"role": "assistant", "content": "y"}]
        }

    return row


def _file(name: str, content: str, *command: str) -> Lay:
    def lay(place: Place, text: str) -> list[str]:
        (place.folder / name).write_text(content.replace("TEXT", text), encoding="utf-8")
        return list(command)

    return lay


_TEMPLATE = "data.chat_template={}"
_PLACES: dict[str, Lay] = {
    "a key of the file": lambda place, text: (_set(place.config, text, 1), place.job())[1],
    **{
        key: _in_config(key)
        for key in (
            "precision.kind",
            "compute_dtype",
            "seed",
            "device",
            "resume",
            "model.path",
            "data.source",
            "data.format",
            "data.prompt_column",
            "data.prompt_template",
            "data.system_prompt",
            "data.cache",
            "output_dir",
            "compile",
            "precision",
            "data.split",
            "logging.wandb_project",
        )
    },
    "precision.skip": lambda place, text: (_set(place.config, "precision.skip", [text]), place.job())[1],
    "an argument": lambda place, text: place.job(text),
    "an argument's key": lambda place, text: place.job(f"{text}=1"),
    "an argument's value": lambda place, text: place.job(f"num_steps={text}"),
    "a recipe": lambda place, text: ["run", text, "--config", "job.yaml"],
    "a config": lambda place, text: ["run", "full_finetune", "--config", text],
    "a command": lambda place, text: [text],
    "an option": lambda place, text: ["verify", f"--{text}"],
    "an option of run": lambda place, text: ["run", f"--{text}", "full_finetune"],
    "a number of ranks": lambda place, text: place.job(f"--nproc-per-node={text}"),
    "a preset": lambda place, text: ["new-checkpoint", text, "new"],
    "a GPU": lambda place, text: ["plan", "full_finetune", "--config", "job.yaml", f"--device={text}"],
    "a path to verify": lambda place, text: ["verify", text],
    "a repository": lambda place, text: ["download", text],
    "a new folder": lambda place, text: ["new-checkpoint", "llama3_2/tiny", text],
    "YAML that is none": _file("odd.yaml", "a: [TEXT\n", "validate", "odd.yaml"),
    "YAML printed": _file("odd.yaml", "# TEXT\n", "cat", "odd.yaml"),
    "a recipe's syntax": _recipe("TEXT x\n"),
    "a recipe's annotation": _recipe("def main(cfg: TEXT): pass\n"),
    "a recipe's error": _recipe(
        "from lptune.config import FinetuneConfig, UserError\n"
        "def main(cfg: FinetuneConfig):\n    raise UserError(TEXT)\n"
    ),
    "a template's error": lambda place, text: place.job(
        _TEMPLATE.format(f"{{{{ raise_exception({text!r}) }}}}")
    ),
    "a template's syntax": lambda place, text: place.job(_TEMPLATE.format(f"{{% {text} %}}")),
    "a template's name": lambda place, text: place.job(_TEMPLATE.format(f"{{{{ messages[{text!r}].x.y }}}}")),
    "a column": _in_rows(lambda text: {text: "x", "b": "y"}),
    "a column of CSV": _in_rows(lambda text: f'"{text}","b"\nx,y\n', "rows.csv"),
    "a value": _in_rows(lambda text: {"prompt": text, "response": {text: 1}}),
    "no JSON": _in_rows(lambda text: f'{{"prompt": {text}\n'),
    "a role": _in_rows(_chat(role=None)),
    "a kind of content": _in_rows(lambda text: _chat(content=[{"type": text}])(text)),
    "a name of a file of rows": _named_rows,
    "a name beside the rows": _named_beside,
    "a name of weights": _named_weights,
    "a name of a checkpoint": _named_step,
    "a model's type": _in_model("config.json", model_type=str),
    "a model's type verified": _in_model("config.json", ("verify", "model"), model_type=str),
    "a model's activation": _in_model("config.json", hidden_act=str),
    "a model's rope": _in_model("config.json", rope_scaling=lambda text: {"rope_type": text, text: 1}),
    "a model's size": _in_model("config.json", hidden_size=str),
    "a model's unknown key": _in_model(
        "config.json", quantization_config=lambda text: {"quant_method": text}
    ),
    "a tokenizer's class": _in_model("tokenizer_config.json", tokenizer_class=str),
    "a tokenizer's template": _in_model(
        "tokenizer_config.json", chat_template=lambda text: f"{{{{ raise_exception({text!r}) }}}}"
    ),
    "a tokenizer's model": _in_model("tokenizer.json", model=lambda text: {"type": text}),
    "a tokenizer's normalizer": _in_model("tokenizer.json", normalizer=lambda text: {"type": text}),
    "a tokenizer's token": _in_model("tokenizer_config.json", eos_token=str),
    "a tensor": _in_tensors,
    "a weight map": _in_weight_map,
    "a checkpoint's state": _in_run(
        "checkpoints/step-00000002/state.json", "step", lambda place: place.job("num_steps=3")
    ),
    "a checkpoint's manifest": _in_run(
        "checkpoints/step-00000002/manifest.json", "format", lambda place: ["verify", "run"]
    ),
    "an export's note": _in_run("export.json", "dtype", lambda place: place.job()),
    "samples": lambda place, text: (
        place.rows.write_text(
            "".join(json.dumps({"prompt": f"{text} {n}", "response": text}) + "\n" for n in range(9))
        ),
        place.job("data.eval_fraction=0.4", "num_samples=2"),
    )[1],
}
_VARIABLES = ("RANK", "LPTUNE_KERNELS", "PET_NPROC_PER_NODE", "CUDA_VISIBLE_DEVICES", "XDG_CACHE_HOME")


def _echoes() -> Iterator[Case]:
    for where, escape in itertools.product(_PLACES, _ESCAPES):

        def prepare(place: Place, where: str = where, escape: str = escape) -> list[str]:
            return _PLACES[where](place, _ESCAPES[escape])

        yield Case(
            subject="escapes",
            name=f"{escape} in {where}",
            prepare=prepare,
            codes=EITHER,
            may_change=("work/run/*",),
        )
    for name, escape in itertools.product(_VARIABLES, _ESCAPES):
        yield Case(
            subject="escapes",
            name=f"{escape} in the variable {name}",
            prepare=lambda place: place.job("precision.kind=float8_rowwise"),
            environment={name: _ESCAPES[escape]},
        )
