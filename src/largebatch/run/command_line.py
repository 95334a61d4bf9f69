"""A recipe's command line, and how it exits when the user's input cannot be used."""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from largebatch.config import RecipeConfig, load_config
from largebatch.errors import RunStopped, UserError
from largebatch.run.record import report_failure

SECONDS_FOR_THE_REPORT = 10

Config = TypeVar("Config", bound=RecipeConfig)


@dataclass(frozen=True)
class RunOptions:
    """What a run is told besides its recipe."""

    run_dir: Path
    """Folder of the run; its name is the run's name."""
    resume: str = "auto"
    """"auto" resumes from the newest checkpoint of this same run in its folder, if there is one; "none" starts over;
    anything else is the folder of a checkpoint to resume from."""
    allow_change: tuple[str, ...] = ()
    """Fields of the config that may differ from the checkpoint's, though they change the training."""
    recipe: Path | None = None
    """The file that the config was read from, recorded in the history."""


def parse_command_line(config_class: type[Config], arguments: Sequence[str] | None = None) -> tuple[Config, RunOptions]:
    """The recipe's validated config, and the options of the run; ConfigError has all problems at once.

    `--config FILE` is required; `--run-dir DIR` is runs/<name of FILE> by default; `--resume` is auto, none or the path
    of a checkpoint; `--allow-change FIELD,…` names what may differ from it. Every other option overrides a field
    of the config: `--batch.global_batch_size 512`.
    """
    parser = argparse.ArgumentParser(
        description="Run a recipe; start it with accelerate launch.",
        epilog="Any field of the config can be overridden: --batch.global_batch_size 512. "
        "The same text as `largebatch plan` is printed at the start.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, required=True, help="the recipe's JSON file")
    parser.add_argument("--run-dir", type=Path, help="folder of the run; default: runs/<name of the config>")
    parser.add_argument(
        "--resume",
        default="auto",
        help='"auto" (default): resume from the newest checkpoint of this run in its folder, or start; "none": start '
        "over; or the folder of a checkpoint",
    )
    parser.add_argument(
        "--allow-change",
        dest="allow_change",
        action="append",
        default=[],
        metavar="FIELD,…",
        help="fields of the config that may differ from the checkpoint's",
    )
    options, overrides = parser.parse_known_args(arguments)
    config = load_config(options.config, overrides, config_class)
    fields = tuple(field.strip() for words in options.allow_change for field in words.split(",") if field.strip())
    run_dir = options.run_dir or Path("runs") / options.config.stem
    return config, RunOptions(run_dir, options.resume, fields, options.config)


@contextmanager
def user_errors() -> Iterator[None]:
    """Exit with a message and the error's exit code, without a traceback, when the user can fix what went wrong.

    Errors that every process meets are printed once: before the processes have joined, by the first process of each
    machine, and later by the first of the job. An error of one process alone is printed by it.
    """
    try:
        yield
    except UserError as error:
        rank = int(os.environ.get("RANK", 0))
        joined = torch.distributed.is_available() and torch.distributed.is_initialized()
        first_here = int(os.environ.get("LOCAL_RANK", 0)) == 0
        prints = (rank == 0 if error.everywhere else True) if joined else first_here
        if prints:
            if not isinstance(error, RunStopped):
                # The same start would fail again.
                report_failure(str(error), resume=False)
                if error.exit_code == UserError.exit_code:
                    _tell_the_batch_script(str(error))
            where = f"[rank {rank}] " if joined and not error.everywhere else ""
            print(f"{where}{error.title}: {error}", file=sys.stderr, flush=True)
            _tell_the_launcher(f"{error.title}: {error}")
        else:
            # The launcher ends the job when the first process exits, which should be the one that reports.
            time.sleep(SECONDS_FOR_THE_REPORT)
        sys.exit(error.exit_code)
    except Exception as error:
        report_failure(f"{type(error).__name__}: {error}", resume=True)
        raise


def _tell_the_batch_script(message: str) -> None:
    """Leave the reason where slurm/launch.sh looks for it: a start that is refused may not write to the run folder."""
    path = os.environ.get("LARGEBATCH_REFUSAL")
    if path:
        with suppress(OSError):
            Path(path).write_text(message, encoding="utf-8")


def _tell_the_launcher(message: str) -> None:
    """Put the message where torch's launcher looks for a worker's traceback, so that its own report shows it too."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        failure = {"message": message, "extraInfo": {"py_callstack": message, "timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": failure}), encoding="utf-8")
