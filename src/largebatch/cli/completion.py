"""`largebatch completion`: a script with which a shell completes the command."""

import argparse
import sys
from pathlib import Path

import shtab


def print_completion(parser: argparse.ArgumentParser, shell: str) -> None:
    """Print the script of a shell for the parser of the whole command line."""
    _complete_files(parser)
    sys.stdout.write(shtab.complete(parser, shell=shell) + "\n")


def _complete_files(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_files(command)
        elif action.type is Path:
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # where shtab looks for it
