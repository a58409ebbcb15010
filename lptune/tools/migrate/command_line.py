"""The command line of a trainer in a shell script: read, never run.

    trl dpo --config base.yaml --learning_rate 5e-7        flags, over a YAML file if one is named
    accelerate launch trl/scripts/sft.py --packing         the same
    llamafactory-cli train my.yaml learning_rate=1e-5      a YAML file, and keys over it
    llamafactory-cli train --stage sft --do_train True     flags

Variables of the shell stay as they stand there.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from lptune.base.errors import UserError
from lptune.base.files import read_text

_MAX_CHARS = 256 * 1024
_SCRIPT = re.compile(r"(?:.*/)?(sft|dpo|kto)\.py")
_FACTORY = re.compile(r"(?:.*/)?(llamafactory-cli|lmf|src/train\.py)")


def find(file: Path) -> tuple[str, str, list[str], int | None]:
    """(tool, command, arguments, ranks) of the first command line of TRL or LLaMA-Factory in the script.

    ranks: that its launcher starts, on one machine; None if it does not say.

    Raises UserError where there is none, or where it trains otherwise.
    """
    try:
        text = read_text(file, _MAX_CHARS)
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


def values(arguments: Sequence[str], file: Path) -> tuple[Path | None, dict[str, Any]]:
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
