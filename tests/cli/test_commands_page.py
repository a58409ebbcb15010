"""docs/commands.md names every command, and its examples are commands that exist."""

import itertools
import re
import shlex
from pathlib import Path

import click

from lptune.cli import catalog, recipe
from lptune.cli.main import cli
from lptune.config import key_paths
from tests.helpers.commands import COMMANDS
from tests.helpers.each import holds_for_each

PAGE = (Path(__file__).parents[2] / "docs" / "commands.md").read_text(encoding="utf-8")
EXAMPLES = [
    shlex.split(line, comments=True)
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
]
HERE = [words for words in EXAMPLES if words[1] in COMMANDS]


def test_every_command_has_its_line_in_the_table_and_an_example() -> None:
    listed = re.findall(r"^\| \[`([\w-]+)`\]\(#([\w-]+)\) \|", PAGE, re.MULTILINE)
    assert [name for name, _ in listed] == sorted(name for name, _ in listed)
    assert COMMANDS.keys() <= {name for name, _ in listed}
    assert COMMANDS.keys() <= {words[1] for words in EXAMPLES} | {"completion"}
    headings = {line.lower().replace(" ", "-") for line in re.findall(r"^## (.+)$", PAGE, re.MULTILINE)}
    assert {place for _, place in listed} <= headings


def test_each_example_has_options_names_and_keys_that_exist() -> None:
    holds_for_each(HERE, check_example, name=" ".join)


def check_example(words: list[str]) -> None:
    command = COMMANDS[words[1]]
    options = {name for param in command.params for name in param.opts} | {"--help"}
    assert {word for word in words if word.startswith("--")} <= options
    for option, value in itertools.pairwise(words):
        if option == "--config":
            assert catalog.find_config(value)
    keys = {key for path in catalog.recipes().values() for key in key_paths(recipe.config_class(path))}
    assert {word.partition("=")[0] for word in words if re.match(r"[\w.]+=", word)} <= keys
    if words[1] == "run":
        assert {words[2], words[-1], *words} & catalog.recipes().keys()


def test_the_help_of_each_command_is_clean_at_80_columns() -> None:
    def check(name: str) -> None:
        command = COMMANDS[name]
        # As the group makes it: a command keeps the help option of the first context that asks for it, and
        # one without `-h` would leave other tests of this process without it.
        context = click.Context(
            command,
            info_name=name,
            terminal_width=80,
            max_content_width=80,
            help_option_names=cli.context_settings["help_option_names"],
        )
        assert max(map(len, command.get_help(context).splitlines())) <= 80
        assert len(command.get_short_help_str(200)) > 20

    holds_for_each(COMMANDS, check)
