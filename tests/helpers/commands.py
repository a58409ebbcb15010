"""The commands of `lptune`, by name, those of the tools too, which it imports when they are called."""

import click

from lptune.cli.main import cli

_CONTEXT = click.Context(cli)
COMMANDS = {name: cli.get_command(_CONTEXT, name) for name in cli.list_commands(_CONTEXT)}
