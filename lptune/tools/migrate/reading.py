"""Reads a file of another trainer and finds the trainer by its content.

A shell script is read, never run, for the command line of a trainer; variables of the shell stay as they
stand there:

    trl dpo --config base.yaml --learning_rate 5e-7        flags, over a YAML file if one is named
    accelerate launch trl/scripts/sft.py --packing         the same
    llamafactory-cli train my.yaml learning_rate=1e-5      a YAML file, and keys over it
    llamafactory-cli train --stage sft --do_train True     flags
"""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf

from lptune.base.errors import UserError
from lptune.base.files import read_object, read_text
from lptune.config.load import read_yaml
from lptune.tools.migrate import axolotl, llamafactory, torchtitan, torchtune, trl
from lptune.tools.migrate.draft import Draft

TOOLS: dict[str, Callable[[Draft], None]] = {
    "torchtune": torchtune.fill,
    "torchtitan": torchtitan.fill,
    "axolotl": axolotl.fill,
    "llamafactory": llamafactory.fill,
    "trl": trl.fill,
}
"""Tool -> the function that fills a draft."""

_MAX_BYTES = 4 * 2**20
"""torchtitan's JSON has every layer of the model: 332 KB of Llama 3 70B."""
_SCRIPT = re.compile(r"(?:.*/)?(sft|dpo|kto)\.py")
_FACTORY = re.compile(r"(?:.*/)?(llamafactory-cli|lmf|src/train\.py)")
_FACTORY_KEYS = {"stage", "finetuning_type", "template", "cutoff_len", "dataset", "dataset_dir"}
_TITAN_SECTIONS = {"training", "parallelism", "lr_scheduler", "checkpoint", "metrics", "compile"}


def migrate(file: Path, *, num_ranks: int | None = None, num_steps: int | None = None) -> Draft:
    """The draft of `file`, a config of the tool that its content shows.

    num_ranks: that the config ran on; None for those that a script starts, else 1.

    Raises UserError (one line) for a file that is no config of a full fine-tuning of one of the tools.
    """
    if file.suffix in (".py", ".toml"):
        raise UserError(
            f"{file}: a Python config is not read, because reading it means running it, and torchtitan reads "
            "no TOML ones any more; it writes its config as JSON when a run starts with "
            "--debug.save_config_file NAME.json: give that file"
        )
    tool: str | None
    command = ""
    if file.suffix in (".sh", ".bash"):
        tool, command, arguments, started = command_line(file)
        num_ranks = num_ranks or started
        base, over = arguments_of(arguments, file)
        values = (_read(base) if base is not None else {}) | over
    else:
        values = _read(file)
        tool = _tool(values)
    if tool is None:
        raise UserError(f"{file}: {_what_else(values)}")
    draft = Draft(tool, file, values, num_ranks or 1, num_steps, command)
    TOOLS[tool](draft)
    return draft


def tool_of(file: Path) -> str | None:
    """The tool whose config `file` is, by its content; None for another file."""
    try:
        return _tool(_read(file))
    except UserError:
        return None


def _read(file: Path) -> dict[str, Any]:
    if file.suffix == ".json":
        return read_object(file, max_bytes=_MAX_BYTES, todo="mend the file")
    return dict(_with_text_keys(OmegaConf.to_container(read_yaml(file), resolve=False)))


def _with_text_keys(value: Any) -> Any:
    """`value` with keys such as `on:` and `1:`, which YAML does not take for text, as text."""
    if isinstance(value, dict):
        return {str(key): _with_text_keys(each) for key, each in value.items()}
    return [_with_text_keys(each) for each in value] if isinstance(value, list) else value


def _tool(values: Mapping[str, Any]) -> str | None:
    if _has_component(values):
        return "torchtune"
    if "base_model" in values:
        return "axolotl"
    if "model_name_or_path" in values:
        return "llamafactory" if _FACTORY_KEYS.intersection(values) else "trl"
    training = values.get("training")
    if isinstance(training, Mapping) and len(_TITAN_SECTIONS.intersection(values)) >= 2:
        return "torchtitan"
    return None


def _has_component(values: Mapping[str, Any]) -> bool:
    nested = [each for each in values.values() if isinstance(each, Mapping)]
    return "_component_" in values or any(map(_has_component, nested))


def _what_else(values: Mapping[str, Any]) -> str:
    model = values.get("model")
    if isinstance(model, Mapping) and "path" in model and "data" in values:
        return "is a config of lptune already; `lptune validate` checks it"
    if {"compute_environment", "distributed_type"} <= set(values):
        return "is a config of accelerate, which holds no training keys"
    return (
        "is no config of torchtune (no `_component_`), torchtitan (no `training` beside other sections), "
        "axolotl (no `base_model`), LLaMA-Factory or TRL (no `model_name_or_path`)"
    )


# ---- shell scripts


def command_line(file: Path) -> tuple[str, str, list[str], int | None]:
    """(tool, command, arguments, ranks) of the first command line of TRL or LLaMA-Factory in the script.

    ranks: that its launcher starts, on one machine; None if it does not say.

    Raises UserError where there is none, or where it trains otherwise.
    """
    try:
        text = read_text(file, _MAX_BYTES)
        lines = re.sub(r"\\\r?\n", " ", text).splitlines()
        commands = [
            shlex.split(line, comments=True) for line in lines if "--" in line or "llamafactory" in line
        ]
    except FileNotFoundError:
        raise UserError(f"{file}: no such file") from None
    except UnicodeDecodeError:
        raise UserError(f"{file}: is not UTF-8 text") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read as a shell script: {error}") from None
    for words in commands:
        for number, word in enumerate(words):
            before, rest = words[:number], words[number + 1 :]
            if word == "trl" and rest and not rest[0].startswith("-"):
                return "trl", rest[0], rest[1:], _ranks(before) or _ranks(rest)
            if script := _SCRIPT.fullmatch(word):
                return "trl", script[1], rest, _ranks(before)
            if _FACTORY.fullmatch(word):
                given = rest[1:] if rest[:1] == ["train"] else rest
                return "llamafactory", "train", given, _ranks(before)
    raise UserError(f"{file}: has no command line of `trl`, of its scripts, or of `llamafactory-cli train`")


def _ranks(words: Sequence[str]) -> int | None:
    """Of accelerate's, torchrun's and LLaMA-Factory's ways to say it; not over several machines."""
    text = " ".join(words)
    found = re.search(r"(?:--num[-_]processes|--nproc[-_]per[-_]node|\bNPROC_PER_NODE)[= ](\d+)", text)
    several = re.search(r"(?:--nnodes|--num[-_]machines|\bNNODES)[= ](?!1\b)", text)
    return int(found[1]) if found and not several else None


def arguments_of(arguments: Sequence[str], file: Path) -> tuple[Path | None, dict[str, Any]]:
    """The YAML file that the arguments name, beside `file` if it is not here; and the keys that they set."""
    base, found = None, dict[str, Any]()
    for key, given in _flags(arguments):
        if key == "" or key == "config":
            base = Path(given[0]) if given else None
        else:
            read = [_value(each) for each in given]
            if not read:  # --packing, --no_packing
                found[key.removeprefix("no_")] = not key.startswith("no_")
            else:
                found[key] = read[0] if len(read) == 1 else read
    if base is not None and not base.exists():
        base = file.parent / base
    return base, found


def _flags(arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """(key, its words) of each flag; the key of a file is empty."""
    key, given = None, list[str]()
    for word in arguments:
        if word in ("&&", ";", "|", "&", ">", "2>&1") or word.startswith(">"):
            break
        if word.startswith("--"):
            if key is not None:
                yield key, given
            key, _, value = word.removeprefix("--").partition("=")
            given = [value] if value else []
        elif key is not None:
            given.append(word)
        elif "=" in word:
            name, _, value = word.partition("=")
            yield name, [value]
        else:
            yield "", [word]
    if key is not None:
        yield key, given


def _value(word: str) -> Any:
    try:
        value = yaml.safe_load(word)
    except yaml.YAMLError:
        return word
    return word if value is None and word not in ("null", "~") else value
