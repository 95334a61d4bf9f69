"""`largebatch completion`: a script with which a shell completes the command."""

import argparse
import sys
from pathlib import Path

from largebatch.tools.options import Commands, add_command


def add_parser(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "completion",
        run,
        help="print a script with which a shell completes this command",
        description="Print a script with which a shell completes subcommands, options, their values and files.",
        epilog="""examples, in a shell or its startup file:
  eval "$(largebatch completion bash)\"""",
    )
    parser.add_argument("shell", choices=["bash", "zsh", "tcsh"], help="the shell")


def run(options: argparse.Namespace) -> int:
    """Print the script of a shell for the whole command line."""
    import shtab

    from largebatch.tools.command_line import build_parser

    parser = build_parser()
    _complete_files(parser, shtab.FILE)
    sys.stdout.write(shtab.complete(parser, shell=options.shell) + "\n")
    return 0


def _complete_files(parser: argparse.ArgumentParser, files: object) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_files(command, files)
        elif action.type is Path:
            action.complete = files  # type: ignore[attr-defined]  # where shtab looks for it
