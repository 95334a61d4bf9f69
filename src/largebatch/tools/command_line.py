"""The `largebatch` command line: the parser of all commands, and how they end."""

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
    "plan verify checkpoints report export prepare preflight slurm.lint slurm.submit new "
    "effective_batch schema slurm.snapshot job"
)
"""Modules below `tools`, in the order of `--help`: `add_parser` declares its command. They import what
they need when they run, not before."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 done, 1 a check failed, 2 the input cannot be used."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # File names may have bytes that are not text.
        sys.stdout.reconfigure(errors="surrogateescape")
    parser = build_parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown and not options.takes_overrides:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    options.overrides = unknown
    try:
        code: int = options.run(options)
        # Here, where a failure can still be handled, rather than when Python ends.
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader has seen enough, as `head` does. Python writes what is left when it ends.
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
        description="Plan large-batch training recipes, and verify that they train the same everywhere.",
        epilog=f"{EXIT_CODES} largebatch COMMAND --help has examples.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"largebatch {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS.split():
        import_module(f"largebatch.tools.{command}").add_parser(commands)
    return parser
