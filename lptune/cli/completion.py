"""`lptune completion SHELL`, and what Tab offers: commands, recipes, configs, keys and their choices.

click's own protocol: the shell calls `lptune` with the words so far in COMP_WORDS and `_LPTUNE_COMPLETE` set,
and reads a candidate from each line. `attach` gives the parameters of all commands their candidates, by the
name of the parameter, so a new command with `--config` has them, too. It is called for a completion only:
other commands do not wait for it.

The scripts are click's. Only bash, which splits words at `=`, needs two changes: the parts are joined again,
and no space follows `precision.kind=`.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    add_completion_class,
    get_completion_class,
    split_arg_string,
)

from lptune.base.errors import UserError
from lptune.cli import catalog, recipe

VARIABLE = "_LPTUNE_COMPLETE"
_Candidates = Callable[[click.Context, str], Iterator[str]]


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script that lets SHELL complete commands, recipes, configs and keys with Tab.

    bash: eval "$(lptune completion bash)" in ~/.bashrc; zsh: eval "$(lptune completion zsh)" in ~/.zshrc,
    after compinit; fish: lptune completion fish > ~/.config/fish/completions/lptune.fish
    """
    group = context.find_root().command
    cls = _Bash if shell == "bash" else get_completion_class(shell)
    assert cls is not None
    click.echo(cls(group, {}, "lptune", VARIABLE).source().strip())


def prepare(group: click.Group) -> None:
    """Makes the commands of `group` answer a shell that completes, if one asks."""
    if VARIABLE in os.environ:
        add_completion_class(_Bash)
        attach(group)


class _Bash(BashComplete):
    source_template = BashComplete.source_template.replace(
        "COMPREPLY+=($value)", "COMPREPLY+=($value); [[ $value == *= ]] && compopt -o nospace"
    )

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words, of which bash makes three at `key=value`."""
        words, number = split_arg_string(os.environ["COMP_WORDS"]), int(os.environ["COMP_CWORD"])
        joined, before = list[str](), ""
        for word in words[: number + 1]:
            if joined and (word == "=" or before == "="):
                joined[-1] += word
            else:
                joined.append(word)
            before = word
        if number >= len(words):
            joined.append("")
        return joined[1:-1], joined[-1]

    def complete(self) -> str:
        """The candidates, each without what stands before `=`: bash completes the part behind it."""
        arguments, incomplete = self.get_completion_args()
        items = self.get_completions(arguments, incomplete)
        start = 0 if incomplete.startswith("-") else incomplete.rfind("=") + 1
        return "\n".join(f"{item.type},{item.value[start:]}" for item in items)


class _Word(click.types.StringParamType):
    """A word with candidates. It is for completion only, and converts nothing."""

    def __init__(self, candidates: _Candidates) -> None:
        self._candidates = candidates

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """The candidates that begin with `incomplete`; a name that is a path stands for the shell's files."""
        try:
            found = [word for word in self._candidates(ctx, incomplete) if word.startswith(incomplete)]
        except UserError:  # of a config that does not exist, for example: the command itself will say it
            return []
        items = [CompletionItem(word) for word in found if word != incomplete + "/"]
        is_path = "/" in incomplete or incomplete.startswith((".", "~"))
        if not items and (is_path or "=" in incomplete):
            items.append(CompletionItem(incomplete, type="file"))
        return items


def attach(group: click.Group) -> None:
    """Gives the parameters of all commands their candidates, by the name of the parameter or the option."""
    by_option: dict[str, _Candidates] = {
        "--config": _configs,
        "--recipe": _recipes,
        "--preset": _presets,
        "--teacher-preset": _presets,
        "--device": _devices,
    }
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        by_argument: dict[str, _Candidates] = {
            "arguments": _recipe_and_settings,
            "name": _both,
            "preset": _presets,
            "repo": _hub_ids,
            "words": _sections_and_keys if name == "keys" else _both,
        }
        for param in command.params:
            table, key = (
                (by_option, param.opts[0])
                if isinstance(param, click.Option)
                else (by_argument, param.name or "")
            )
            if key in table and not isinstance(param.type, (click.Path, click.Choice)):
                param.type = _Word(table[key])


def _recipes(_: click.Context, __: str) -> Iterator[str]:
    yield from catalog.recipes()


def _configs(ctx: click.Context, _: str) -> Iterator[str]:
    """The configs, those of the named recipe if it has some."""
    names = list(catalog.configs())
    wanted = _named(ctx)[0]
    of_recipe = [name for name in names if catalog.recipe_of(catalog.configs()[name]) == wanted]
    yield from of_recipe or names


def _both(_: click.Context, __: str) -> Iterator[str]:
    yield from catalog.recipes()
    yield from catalog.configs()


def _presets(_: click.Context, __: str) -> Iterator[str]:
    from lptune import models

    yield from models.preset_names()


def _devices(_: click.Context, __: str) -> Iterator[str]:
    from lptune.hardware.devices import DEVICES

    yield from (device.key for device in DEVICES)


def _hub_ids(_: click.Context, __: str) -> Iterator[str]:
    from lptune.cli.ls import hub_id

    yield from sorted({hub_id(path) for path in catalog.configs().values()} - {""})


def _sections_and_keys(ctx: click.Context, _: str) -> Iterator[str]:
    from lptune.config.documented import sections

    name = ctx.params.get("recipe_name") or catalog.DEFAULT_RECIPE
    cls: Any = recipe.config_class(catalog.find_recipe(name))
    for section in sections(cls):
        yield from ([section.name] if section.name else [])
        yield from (key.name for key in section.keys)


def _recipe_and_settings(ctx: click.Context, incomplete: str) -> Iterator[str]:
    """RECIPE first, then key=value: keys that are not given yet, and behind `=` the choices of the key."""
    from lptune.config.documented import keys

    wanted, given = _named(ctx)
    settings = [word for word in given if "=" in word]
    if len(settings) == len(given) and not settings and "=" not in incomplete:
        yield from catalog.recipes()
        if ctx.info_name == "validate":
            yield from catalog.configs()
    if wanted is None:
        return
    key, separator, _ = incomplete.partition("=")
    cls: Any = recipe.config_class(catalog.find_recipe(wanted))
    for each in keys(cls):
        if separator and each.name == key:
            values = each.choices or (("true", "false") if each.type == "true or false" else ())
            yield from (f"{key}={value}" for value in (*values, *["null"] * each.nullable))
        elif not separator and not any(word.startswith(f"{each.name}=") for word in settings):
            yield f"{each.name}="


def _named(ctx: click.Context) -> tuple[str | None, Sequence[str]]:
    """The recipe that the words so far mean, by its name or by --config, and the words; None: no recipe."""
    # Behind `--config`, whose value is missing, click leaves the words unparsed.
    words: Any = ctx.params.get("arguments") or ctx.args
    given = [word for word in words if not word.startswith("-")]
    recipes = catalog.recipes()
    wanted = next((word for word in given if word in recipes or word.endswith(".py")), None)
    config = ctx.params.get("config_name") or next((word for word in given if catalog.is_config(word)), None)
    if wanted is None and config is not None:
        wanted = catalog.recipe_of(catalog.find_config(config))
    return wanted, given
