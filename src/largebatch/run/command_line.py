"""A recipe's command line, and how it exits when the user's input cannot be used."""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, TypeVar

import torch
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from largebatch.backend.launch import is_launched
from largebatch.config import RecipeConfig, load_config
from largebatch.errors import RunStopped, UserError
from largebatch.system.endings import OwnEnding
from largebatch.system.failures import storage_errors
from largebatch.system.variables import whole_number_or_none
from largebatch.words import printable

SECONDS_FOR_THE_REPORT = 10
AFTER_A_MESSAGE = "note: the reason is the message above; what follows is the launcher's report that a process ended"
AFTER_A_TRACEBACK = (
    "note: the reason is the traceback above of the process that failed first, the last one in the launcher's report"
)

Config = TypeVar("Config", bound=RecipeConfig)


@dataclass(frozen=True)
class RunOptions:
    """The options of a run besides its recipe."""

    run_dir: Path  # the run's folder, whose name is the run's
    # "auto" for the latest checkpoint in the run's folder, if there is one; "none" to start over; or the folder of a
    # checkpoint.
    resume: str = "auto"
    # Fields of the config that may differ from the checkpoint's although they change the training.
    allow_change: tuple[str, ...] = ()
    recipe: Path | None = None  # the file from which the config was read, for the history
    # Seed of the rounding errors by which the initial weights are changed, to measure how they grow; None changes none.
    perturb_weights: int | None = None
    ending: OwnEnding = field(default_factory=OwnEnding)  # of this process, also by an exception in the recipe's code


@contextmanager
def from_command_line(
    config_class: type[Config], arguments: Sequence[str] | None = None
) -> Iterator[tuple[Config, RunOptions]]:
    """The recipe's validated config, and the options of the run, for a block that trains.

    What goes wrong in the block, or in the command line, ends the process as `user_errors` says. All problems of the
    config are listed at once.

    Args:
        config_class: The task's `Config`.
        arguments: The words of the command line; None for this process's.
    """
    ending = OwnEnding()
    with user_errors(ending):
        parser = _Parser(
            description="Run a recipe; start it with accelerate launch.",
            epilog="Any field of the config can be overridden: --batch.global_batch_size 512. "
            "The run prints the same text as `largebatch plan` when it starts.",
            allow_abbrev=False,
        )
        parser.add_argument("--config", type=Path, required=True, help="the recipe's JSON file")
        parser.add_argument("--run-dir", type=Path, help="folder of the run; default: runs/<name of the config>")
        parser.add_argument(
            "--resume",
            default="auto",
            help='"auto" (default): resume from the latest checkpoint in the run\'s folder, if any; "none": start '
            "over; or the folder of a checkpoint",
        )
        parser.add_argument(
            "--allow-change",
            action="append",
            default=[],
            metavar="FIELD,…",
            help="fields of the config that may differ from the checkpoint's",
        )
        parser.add_argument(
            "--perturb-weights",
            type=int,
            metavar="SEED",
            help="change each initial weight of one process by a rounding error; largebatch verify measures how they "
            "grow",
        )
        options, overrides = parser.parse_known_args(arguments)
        config = load_config(options.config, overrides, config_class.task_folder())
        if not isinstance(config, config_class):
            raise UserError(
                f"{config_class.__qualname__} is not the class Config of its task's config.py; pass that one"
            )
        fields = tuple(field.strip() for words in options.allow_change for field in words.split(",") if field.strip())
        run_dir = options.run_dir or Path("runs") / options.config.stem
        yield config, RunOptions(run_dir, options.resume, fields, options.config, options.perturb_weights, ending)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # So that it is reported like other errors in a recipe's command line, and the job is not started again.
        raise UserError(message)


@contextmanager
def user_errors(ending: OwnEnding) -> Iterator[None]:
    """Exit with a message and the error's exit code, without a traceback, when the user can fix what went wrong.

    An error that every process meets is printed by the first process of each machine, or of the job once the processes
    have joined. An error of one process alone is printed by that process. Who prints it also writes it as the ending of
    the process.
    """
    try:
        with storage_errors():
            yield
    except UserError as error:
        joined = torch.distributed.is_initialized()
        # In its machine, until the processes have joined.
        rank = whole_number_or_none("RANK" if joined else "LOCAL_RANK") or 0
        # To a launcher, any other code is a failure, which it reports, and some start again.
        as_asked = isinstance(error, RunStopped) and error.by_a_person and _has_a_launcher()
        exit_code = 0 if as_asked else error.exit_code
        alone = joined and not error.everywhere
        if alone or rank == 0:
            # Who has stopped the run has written why.
            if not isinstance(error, RunStopped):
                ending.fail(error)
            where = f"[rank {rank}] " if alone else ""
            message = f"{where}{error.title}: {error}"
            is_reported = _has_a_launcher() and exit_code
            if is_reported:
                message += f"\n{AFTER_A_MESSAGE}"
            # The disk of the log may be the one that is full.
            with suppress(OSError):
                print(printable(message), file=sys.stderr, flush=True)
            if is_reported:
                # The launcher's report, the last on the screen, ends with the message.
                error.args = (printable(str(error)),)
                error.__cause__ = None  # which also hides the context
                error.__traceback__ = None
                _record(error)
        else:
            # The launcher ends the job when a process exits, so the one that reports should exit first.
            time.sleep(SECONDS_FOR_THE_REPORT)
        sys.exit(exit_code)
    except Exception as error:
        ending.fail(error)
        _record(error)
        if _has_a_launcher():
            error.add_note(AFTER_A_TRACEBACK)
        raise


def _record(error: Exception) -> None:
    """Put an error, with its traceback, where torchrun looks for that of a worker, so that its report shows it."""
    with suppress(OSError):
        get_error_handler().record_exception(error)


def _has_a_launcher() -> bool:
    """Whether this process was started by torchrun or accelerate launch, which print a long traceback if it fails."""
    # For one process, accelerate launch sets nothing of torchrun's, and no WORLD_SIZE.
    alone = "WORLD_SIZE" not in os.environ
    return is_launched() or (alone and "ACCELERATE_MIXED_PRECISION" in os.environ)
