"""The `largebatch` command line, also `python -m largebatch`: the parser of all commands, and how they end."""

import argparse
import inspect
import os
import signal
import sys
import textwrap
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module
from typing import NoReturn

from largebatch import __version__
from largebatch.errors import StorageError, UserError, is_transient, reason_of
from largebatch.words import PrintableOutput, printable

COMMANDS = {
    "plan": ("plan", "explain the plan of a recipe for a number of processes"),
    "verify": ("verify", "check that a recipe trains the same on every strategy, world size and micro-batch size"),
    "checkpoints": ("checkpoints", "list the checkpoints of a run"),
    "sweep": ("sweep", "train a recipe at several values of its fields, and compare the results"),
    "critical-batch": ("sweep.critical_batch", "find the largest batch that costs no loss at a step of a run"),
    "audit": ("audit", "check what the optimizer gets in your own training loop, however a batch is divided"),
    "advise": ("advise", "print the steps and samples of each batch size for the same loss, from the critical batch"),
    "report": ("report", "write one HTML file about a run, or about several to compare them"),
    "export": ("export", "write a checkpoint's weights for transformers' from_pretrained"),
    "prepare": ("prepare", "download, decode and tokenize a recipe's data before a job needs it"),
    "preflight": ("preflight", "check the nodes of a job before it trains on them"),
    "lint": ("slurm.lint", "find mistakes in recipes, batch scripts and configs, before a job waits in the queue"),
    "submit": ("slurm.submit", "plan and check a recipe's Slurm job, submit it, and say how to follow it"),
    "new": ("new", "copy a recipe to start a repository of your own"),
    "effective-batch": ("effective_batch", "find the effective batch of a script for another framework"),
    "schema": ("schema", "write the JSON Schema of a task's recipes"),
    "snapshot": ("slurm.snapshot", "copy what a job runs, so that later edits do not change it"),
    "job-begins": ("job.begins", "say whether a start of a job should train (slurm/launch.sh runs it)"),
    "job-ended": ("job.ended", "say whether a job should be started again (slurm/launch.sh runs it)"),
}
"""The module below `tools` of each command, and its line in the list of commands.

A module has `add_options(parser)`; `run(options)`, which returns the exit code, and whose docstring is the description
in `--help`; and `EPILOG`, which follows the options there as it is: examples, or who runs the command.
`options.refuse(message)` ends the program as a parse error does. If the parser's default `takes_overrides` is set to
True, words that are not options are `options.overrides`; otherwise they are refused.
"""
WIDTH = 100  # of descriptions
EXIT_CODES = "Exit codes: 0 done, 1 a check failed, 2 the input cannot be used."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 done, 1 a check failed, 2 the input cannot be used."""
    arguments = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    # What is printed quotes recipes, runs and files of other people.
    with redirect_stdout(PrintableOutput(sys.stdout)):
        return _run(arguments)


def _run(arguments: Sequence[str]) -> int:
    command = next((word for word in arguments if not word.startswith("-")), "")
    parser = build_parser(command)
    try:
        options, unknown = parser.parse_known_args(arguments)
        if unknown and not options.takes_overrides:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        options.overrides = unknown
        code: int = options.run(options)
        # Here, where a failure can still be handled, rather than when Python ends.
        sys.stdout.flush()
    except UserError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader has seen enough, as `head` does. Python writes what is left when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        # Such as a folder of somebody else, a name that is too long, or a full disk.
        passes = is_transient(error)
        remedy = "the same command tries again" if passes else "check that the path is right and that you may use it"
        print(printable(f"error: {reason_of(error)}; {remedy}"), file=sys.stderr)
        return (StorageError if passes else UserError).exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return code


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def build_parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of one command, whose module alone is imported; of none, that of the list of commands."""
    parser = _Parser(
        prog="largebatch",
        description="Plan large-batch training recipes, and verify that they train the same everywhere.",
        epilog=f"{EXIT_CODES} largebatch COMMAND --help has examples.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"largebatch {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    if command not in COMMANDS:
        for name, (_, help) in COMMANDS.items():
            commands.add_parser(name, help=help)
        return parser
    module = import_module(f"largebatch.tools.{COMMANDS[command][0]}")
    declared = commands.add_parser(
        command,
        description=textwrap.fill(str(inspect.getdoc(module.run)), WIDTH),
        epilog=f"{module.EPILOG}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    declared.set_defaults(run=module.run, refuse=declared.error, takes_overrides=False)
    module.add_options(declared)
    return parser


if __name__ == "__main__":
    sys.exit(main())
