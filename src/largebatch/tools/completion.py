"""`largebatch completion`: shell completion of the command."""

import argparse
from pathlib import Path

from largebatch.tools.options import Commands, add_command, recipe_file


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "completion",
        run,
        help="print a shell's completion script for this command",
        description="Print a script that makes a shell complete subcommands, options, their values and file names.",
        epilog="""examples, in a shell or its startup file:
  eval "$(largebatch completion bash)\"""",
    )
    parser.add_argument("shell", choices=["bash", "zsh", "tcsh"], help="the shell")


def run(options: argparse.Namespace) -> int:
    import shtab

    from largebatch.tools.command_line import build_parser

    parser = build_parser()
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for command in commands.choices.values():
        for action in command._actions:
            if action.type in (Path, recipe_file):
                action.complete = shtab.FILE  # where shtab looks for it
    print(shtab.complete(parser, shell=options.shell))
    return 0
