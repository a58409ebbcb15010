"""Every command that the documentation shows: run, or checked as far as this machine can.

- Those of docs/tour.md run in test_tour.py, as they stand. `lptune ls`, `cat`, `cp`, `validate` and `keys`
  run here.
- Other commands of lptune are parsed by lptune itself. Where they have a config, it is loaded with all keys,
  as `lptune validate` does.
- Of programs of this repository the file must be there, and hold each flag.
- What remains is in NOT_OURS, with the reason.
"""

import importlib.util
import itertools
import re
import shlex
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from lptune.cli import catalog, recipe
from lptune.cli.main import cli
from lptune.launch import flags
from tests.helpers.commands import COMMANDS
from tests.helpers.docs_pages import PAGES, ROOT, Command, anchors, commands
from tests.helpers.each import holds_for_each

NOT_OURS = {
    ".": "sources the venv that test_tour.py does not need",
    "cd": "of the shell",
    "curl": "asks a server of vLLM",
    "docker": "no container engine",
    "echo": "of the shell",
    "export": "of the shell",
    "git": "asks a remote",
    "head": "of the shell",
    "hf": "asks the hub",
    "pip": "downloads",
    "rm": "removes what other commands made",
    "sbatch": "needs Slurm; tests/cli/test_multi_node.py runs the script with stand-ins",
    "vllm": "is not installed, see docs/export.md",
}
OF_OTHERS = ("scripts/download_hf_assets.py",)  # programs of torchtitan, beside ours in a table
EXECUTED = ("ls", "cat", "cp", "validate", "keys")
PLACEHOLDERS = {
    "CONFIG": "llama3_2/1b", "RECIPE": "full_finetune", "FAMILY/SIZE": "llama3_2/tiny", "OWNER/NAME": "o/n",
}  # fmt: skip
AS_THE_GROUP: Any = {"help_option_names": cli.context_settings["help_option_names"]}
"""A command keeps the help option of the first context that asks for it; one without `-h` would leave other
tests of this process without it."""
ALL = [each for page in PAGES for each in commands(page)]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Command], None]:
    """Checks a command in a new folder that has the reader's own files: my.yaml, my_recipe.py."""
    own = catalog.find_config("llama3_2/1b").read_text(encoding="utf-8") + "data: {source: rows.jsonl}\n"
    recipe_text = catalog.find_recipe("full_finetune").read_text(encoding="utf-8")
    numbers = itertools.count()

    def in_a_new_folder(command: Command) -> None:
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        (folder / "my.yaml").write_text(own, encoding="utf-8")
        (folder / "my_recipe.py").write_text(recipe_text, encoding="utf-8")
        monkeypatch.chdir(folder)
        check_command(command)

    return in_a_new_folder


def test_every_command_is_one_that_the_program_takes(check: Callable[[Command], None]) -> None:
    holds_for_each(ALL, check, name=lambda command: f"{command.place} {command}")


def check_command(command: Command) -> None:
    if command.name == "lptune":
        check_lptune(command)
    elif command.name in ("python", "python3", "pytest", "torchrun", "bash"):
        check_program(command)
    elif command.name == "make":
        targets = re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert command.words[1] in targets
    else:
        assert command.name in NOT_OURS, f"{command.place}: run it in a test, or list it with the reason"


def check_lptune(command: Command) -> None:
    if len(command.words) == 1:
        return
    _, name, *arguments = command.words
    if name.startswith("-"):
        assert CliRunner().invoke(cli, [name]).exit_code == 0
        return
    assert name in COMMANDS, f"{command.place}: there is no `lptune {name}`"
    is_sketch = bool({"…", "key=value"} & set(arguments))
    arguments = [PLACEHOLDERS.get(word, word) for word in arguments if word not in ("…", "key=value")]
    if command.inline and not is_complete(name, arguments):
        options = {each for one in COMMANDS[name].params for each in (*one.opts, *one.secondary_opts)}
        flags = {word.partition("=")[0] for word in arguments if word.startswith("--")}
        assert name == "run" or flags <= options | {"--help"}, f"{command.place}: {flags - options}"
        return
    if name in EXECUTED and not command.inline:
        if name == "cp":
            Path(arguments[-1]).unlink(missing_ok=True)
        done = CliRunner().invoke(cli, [name, *arguments])
        assert done.exit_code == 0, (command.place, done.output, done.exception)
        return
    check_arguments(name, arguments, keys_may_miss=command.inline or is_sketch or name in ("advise", "plan"))


def is_complete(name: str, arguments: list[str]) -> bool:
    """Whether a command in a sentence has its arguments; else the sentence names a command or its flags."""
    if any(re.fullmatch(r"[A-Z]{3,}", word) for word in arguments) or arguments[-1:] == ["--config"]:
        return False
    takes_config = any("--config" in each.opts for each in COMMANDS[name].params)
    return "--config" in arguments if takes_config else any(not word.startswith("-") for word in arguments)


def check_arguments(name: str, arguments: list[str], keys_may_miss: bool) -> None:
    """Lets click parse them; with a config, loads it with the keys."""
    command = COMMANDS[name]
    try:
        context = command.make_context(name, list(arguments), **AS_THE_GROUP)
    except click.exceptions.Exit as done:  # --help
        if done.exit_code:
            raise
        return
    config = context.params.get("config_name")
    if not config:
        return
    config = {"my-model.yaml": "my.yaml"}.get(config, config)
    given = tuple(context.params.get("arguments") or ())
    if name == "run":
        _, given = map(tuple, flags.split_command("run", given, ()))
    if name == "sweep":  # the first of each grid's values
        given = tuple(re.sub(r"^([\w.]+=[^,\[{'\"]*),.*", r"\1", word) for word in given)
        given = tuple("precision.kind=none" if word == "precision.kind=all" else word for word in given)
    names = [word for word in given[:1] if "=" not in word]
    path = catalog.find_config(config)
    loaded_by = names[0] if names else catalog.recipe_of(path)
    overrides = [*given[len(names) :]]
    if keys_may_miss and not any(word.startswith("data.source=") for word in overrides):
        overrides.append("data.source=rows.jsonl")
    try:
        recipe.load(catalog.find_recipe(loaded_by), path, overrides)
    except Exception as error:
        if not (keys_may_miss and "unknown key 'data" in str(error)):
            raise
        recipe.load(catalog.find_recipe(loaded_by), path, overrides[:-1])


def check_program(command: Command) -> None:
    """A program of this repository is there and names the flags; a module of Python is there."""
    words = [word for word in command.words[1:] if word not in ("-q", "-x", "-P", "-n", "…")]
    if command.name == "pytest" or words[:2] == ["-m", "pytest"]:
        for word in words:
            if word.startswith("tests"):
                assert (ROOT / word).exists(), command
        return
    if words[:1] == ["-m"]:
        source = ROOT / (words[1].replace(".", "/") + ".py")
        if not source.is_file():
            source = ROOT / words[1].replace(".", "/") / "__main__.py"
        if not source.is_file():
            assert importlib.util.find_spec(words[1]), command
            return
    elif words[:1] == ["-c"]:
        compile(words[1], command.place, "exec")
        return
    else:
        if words[0] in OF_OTHERS:
            return
        (script, *_) = [word for word in words if re.search(r"\.(py|sh)$", word)]
        source = ROOT / script
        assert source.is_file(), command
    if command.name == "torchrun":
        return
    folder = source.parent
    text = "".join(each.read_text(encoding="utf-8") for each in folder.glob(f"*{source.suffix}"))
    for flag in [word.partition("=")[0] for word in words if word.startswith("--")]:
        option = flag.removeprefix("--")
        assert flag in text or option.replace("-", "_") in text, (
            f"{command.place}: {source.name} has no {flag}"
        )


def test_the_check_of_commands_names_each_that_is_wrong(check: Callable[[Command], None]) -> None:
    right = "lptune ls"
    wrong = (
        "lptune ru full_finetune --config llama3_2/1b data.source=a.jsonl",
        "lptune run full_finetune --config llama3_2/1c data.source=a.jsonl",
        "lptune run full_finetune --config llama3_2/1b data.source=a.jsonl optimizer.lrr=1",
        "lptune run full_finetune --config llama3_2/1b",  # no data
        "lptune plan --config llama3_2/1b --devise h100",
        "lptune verify",
        "lptune cat llama3_2/1c",
        "make nonsense",
        "python benchmarks/linear.py --no-such-flag",
        "python -m tests.proofs.nothing",
        "npm install",
    )
    given = [Command("here", tuple(shlex.split(line)), False) for line in (right, *wrong)]
    with pytest.raises(pytest.fail.Exception) as failed:
        holds_for_each(given, check, name=lambda command: f"<{command}>")
    assert re.findall("^<(.+?)>", str(failed.value), re.MULTILINE) == [*wrong]


def test_the_pages_have_about_as_many_commands_as_we_think() -> None:
    counted = Counter(each.name for each in ALL)
    assert counted["lptune"] > 120
    unused = set(NOT_OURS) - set(counted) - {"cd", "echo", "export", "git", "hf", "docker"}
    assert not unused, unused


def test_every_command_has_its_line_and_an_example_on_the_page_of_commands() -> None:
    page = ROOT / "docs" / "commands.md"
    text = page.read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[`([\w-]+)`\]\(#([\w-]+)\) \|", text, re.MULTILINE)
    names = [name for name, _ in listed]
    assert names == sorted(names)
    assert COMMANDS.keys() <= set(names)
    examples = {each.words[1] for each in commands(page) if each.name == "lptune" and not each.inline}
    assert COMMANDS.keys() <= examples | {"completion"}
    assert {place for _, place in listed} <= anchors(page)


def test_the_help_of_each_command_is_clean_at_80_columns() -> None:
    def check(name: str) -> None:
        command = COMMANDS[name]
        context = click.Context(
            command, info_name=name, terminal_width=80, max_content_width=80, **AS_THE_GROUP
        )
        assert max(map(len, command.get_help(context).splitlines())) <= 80
        assert len(command.get_short_help_str(200)) > 20

    holds_for_each(COMMANDS, check)
