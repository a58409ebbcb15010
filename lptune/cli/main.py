"""`lptune`: the group of commands, and the one place where an exception becomes an exit code.

    0    done
    2    the user's input is wrong (UserError, click's usage errors): one line on stderr, no traceback
    3    training diverged (DivergedError): one line
    1    a bug of ours: the traceback
    130  Ctrl-C, of any command but `run`; 143 SIGTERM, 129 SIGHUP (lptune/cli/interrupts.py)
    141  the output pipe of a command that only prints was closed (`lptune ls | head -1`)

The exit code of a recipe (143: stopped by a signal) arrives as SystemExit and is passed on.
Commands import torch inside their function, so that `--help` and `validate` answer at once.
"""

import re
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import click

from lptune import __version__
from lptune.base.errors import DivergedError, UserError, closest
from lptune.base.text import with_addresses
from lptune.cli import tools
from lptune.cli.cat import cat
from lptune.cli.completion import completion, prepare
from lptune.cli.cp import cp
from lptune.cli.data import data
from lptune.cli.download import download
from lptune.cli.export import export
from lptune.cli.keys import keys_command
from lptune.cli.ls import ls
from lptune.cli.new_checkpoint import new_checkpoint
from lptune.cli.plan import plan
from lptune.cli.run import run
from lptune.cli.streams import OutputLostError
from lptune.cli.validate import validate
from lptune.cli.verify import verify
from lptune.launch.outcome import leave_line


class _Commands(click.Group):
    """The commands of the core, and those of the tools, which are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*self.commands, *tools.commands()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.commands:
            lines = tools.commands()
            # For a misspelt name all of them: click suggests the nearest of `commands`.
            for name in lines.keys() & {cmd_name} or lines.keys() - self.commands.keys():
                _add(tools.command(name), lines[name])
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Without importing a tool."""
        here = {name: command.short_help or "" for name, command in self.commands.items()}
        with formatter.section("Commands"):
            formatter.write_dl(sorted((tools.commands() | here).items()))


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    epilog=with_addresses("Documentation: docs/README.md"),
    context_settings={"max_content_width": 110, "help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="lptune")
@click.pass_context
def cli(context: click.Context) -> None:
    """Full fine-tuning of Hugging Face checkpoints in low precision."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


_COMMANDS = {
    cat: "Print a recipe or a config",
    completion: "Print the script that completes words by Tab",
    cp: "Copy a recipe or a config, to change it",
    data: "Show packed rows as the model will see them",
    download: "Download a checkpoint from the Hugging Face hub",
    export: "Make a Hugging Face folder of a checkpoint",
    keys_command: "List keys, their defaults and their meaning",
    ls: "List recipes and configs, with sizes",
    new_checkpoint: "Write a checkpoint with random weights, for trials",
    plan: "Memory, collectives and disk of a run, without a GPU",
    run: "Run a recipe with a config",
    validate: "Check a config without running it",
    verify: "Check a checkpoint, a Hugging Face folder or a run",
}
"""The commands of the core, each with its line in the list of all."""


def _add(command: click.Command, line: str) -> None:
    """Makes `command` one of `lptune`, described by `line` in the list of all."""
    command.short_help = line
    command.help = with_addresses(command.help or "")
    cli.add_command(command)
    for option in command.params:
        if isinstance(option, click.Option) and option.help:
            option.help = with_addresses(option.help)


for _command, _line in _COMMANDS.items():
    _add(_command, _line)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit; see the module's docstring for the codes."""
    prepare(cli)
    try:
        code = cli.main(args=arguments, prog_name="lptune", standalone_mode=False)
        sys.stdout.flush()  # an error at exit would be printed by Python, not here
    except OutputLostError as error:
        sys.exit(error.exit_code) if error.exit_code == 141 else fail(str(error), error.exit_code)
    except (UserError, DivergedError) as error:
        fail(str(error), error.exit_code)
    except click.UsageError as error:
        fail(_usage_line(error))
    except click.ClickException as error:
        fail(error.format_message())
    except (KeyboardInterrupt, click.Abort):
        sys.exit(130)
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


def fail(message: str, code: int = 2) -> NoReturn:
    """Print `error: <message>` as one line on stderr and exit with `code`."""
    message = " ".join(message.split())
    leave_line(message)
    click.echo(f"error: {message}", err=True)
    sys.exit(code)


_ELSEWHERE = {
    **dict.fromkeys(("train", "finetune", "fine-tune", "sft", "tune"), "run full_finetune --config CONFIG"),
    "pretrain": "run continued_pretrain --config CONFIG",
    "dpo": "run full_dpo --config CONFIG",
    **dict.fromkeys(("chat", "generate", "inference"), "run generate --config generation model.path=FOLDER"),
    **dict.fromkeys(("eval", "evaluate"), "run evaluate --config evaluation model.path=FOLDER"),
    "serve": "export RUN FOLDER, and docs/export.md for servers",
}
"""A command of other tools -> what does it here."""


def _usage_line(error: click.UsageError) -> str:
    """click's message, with the nearest command for a misspelt one, and how to get help."""
    message = error.format_message().rstrip(".")
    misspelt = re.match(r"No such command '(.*?)'", message)
    if misspelt and (here := _ELSEWHERE.get(misspelt[1])):
        message = f"{misspelt[0]}; here that is: lptune {here}"
    elif misspelt and misspelt[0] == message:  # click has not named the nearest one itself
        message += closest(misspelt[1], cli.commands)
    return f"{message}; see `{error.ctx.command_path if error.ctx else 'lptune'} --help`"


if __name__ == "__main__":
    main()
