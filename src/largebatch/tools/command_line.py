"""The `largebatch` command line: one parser of all commands, and what is common to their ends."""

import argparse
import io
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from largebatch import __version__
from largebatch.errors import UserError
from largebatch.tools.options import EXIT_CODES

COMMANDS = (
    "plan verify checkpoints report export train_tokenizer preflight lint submit new effective_batch schema completion"
)
"""Modules beside this one, in the order of `--help`. What a command needs but its parser, it imports when it runs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 done, 1 a check failed, 2 the input cannot be used."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names of files may have bytes that are not text.
        sys.stdout.reconfigure(errors="surrogateescape")
    parser = build_parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown and not options.takes_overrides:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    options.overrides = unknown
    try:
        code: int = options.run(options)
        # Here, where it can still be told, rather than when Python ends.
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # Whoever reads has seen enough, such as `head`. When Python ends it writes what is left.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return code


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="largebatch",
        description="Plan large-batch training recipes, and prove that they train the same everywhere.",
        epilog=f"{EXIT_CODES} largebatch COMMAND --help has examples.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"largebatch {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS.split():
        import_module(f"largebatch.tools.{command}").add_parser(commands)
    return parser
