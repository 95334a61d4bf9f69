"""A job's starts in its run folder, and their progress, which is counted in checkpoints."""

import argparse
import os
import re
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from largebatch.errors import UserError
from largebatch.storage.files import replace_json_file
from largebatch.storage.run_folder import RunFolder
from largebatch.system.endings import ENDINGS, Ending, parse_ending, read_endings
from largebatch.system.failures import Kind
from largebatch.system.regular_file import append, read_bytes
from largebatch.system.variables import whole_number
from largebatch.tools.job.decision import Evidence, Next
from largebatch.words import counted

ENDING = "ending.json"
SIGNALED = re.compile(r"Signal \d+ \((SIG[A-Z0-9]+)\) received by PID \d+")
# Sent by the launcher, to end the other processes.
ENDED_BY_THE_LAUNCHER = "SIGTERM"
# What a process also sends itself when a collective failed because another process went away.
ABORTED = "SIGABRT"
MEANINGS = {"SIGKILL": ", which the kernel sends for lack of memory", "SIGSEGV": ", a crash in compiled code"}


def add_start(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which start of which run it is."""
    parser.add_argument("--run-dir", type=Path, required=True, help="folder of the run")
    parser.add_argument("--start", type=int, required=True, help="how many times the job was restarted before")
    parser.add_argument(
        "--max-restarts", type=int, required=True, help="how many restarts are allowed at the same checkpoint"
    )


class JobStarts:
    """The starts of the job that LARGEBATCH_JOB_ID names, up to one of them; UserError if it names none.

    Args:
        options: Those of `add_start`.
    """

    def __init__(self, options: argparse.Namespace):
        job = os.environ.get("LARGEBATCH_JOB_ID")
        if not job:
            raise UserError("LARGEBATCH_JOB_ID is not set: this command is for a job's batch script, which sets it")
        self.run = RunFolder(options.run_dir)
        self.job = job
        self.start: int = options.start
        self.max_restarts: int = options.max_restarts
        self.job_dir = self.run.jobs_dir / job
        self.logs = self.job_dir / f"start_{self.start}"
        """The folder of this start."""
        self.checkpoint_step = self.run.checkpoint_step()
        """The step of the latest complete checkpoint; 0 if there is none."""
        too_large = {each.micro_batch_size for each in map(self.run.out_of_memory, self.run.attempts()) if each}
        self.progress = f"{self.checkpoint_step}_{len(too_large)}"
        """This step, and how many micro-batch sizes are known not to fit."""

    def begin(self) -> None:
        """Note the progress at which this start begins."""
        self.logs.mkdir(parents=True, exist_ok=True)
        append(self.job_dir / "starts", f"{self.progress}\n")

    def evidence(self, exit_code: int, asked_to_stop: str) -> Evidence:
        """What this start, which has ended, has left in the run folder."""
        begun = False
        endings = read_endings(self.logs / ENDINGS)
        for attempt in self.run.attempts():
            if (attempt.get("job_id"), attempt.get("restart")) == (self.job, self.start):
                begun = True
                # A process may have been able to write to only one of the folders.
                endings += self.run.endings_of(attempt)
        has_stop_file = False
        with suppress(OSError):
            # An older stop file was not for this start.
            has_stop_file = self.run.stop_file.stat().st_mtime >= whole_number("LARGEBATCH_BEGAN", 0)
        return Evidence(
            exit_code=exit_code,
            endings=endings + killed_processes(self.logs),
            begun_at=self.checkpoint_step if begun else None,
            asked_to_stop=asked_to_stop,
            has_stop_file=has_stop_file,
            earlier=self.earlier_failure(),
            reason_to_give_up=self.reason_to_give_up(),
        )

    def end(self, found: Next) -> None:
        """Keep how this start ended, for later starts."""
        failure = asdict(found.failure) if found.failure else {}
        with suppress(OSError):
            replace_json_file(self.logs / ENDING, {**failure, "code": found.code, "message": found.message})

    def earlier_failure(self) -> Ending | None:
        """The failure of the latest earlier start that has recorded how it ended; None if it did not fail."""
        for start in reversed(range(self.start)):
            with suppress(OSError):
                return parse_ending(read_bytes(self.job_dir / f"start_{start}" / ENDING))
        return None

    def reason_to_give_up(self) -> str | None:
        """Why there should be no further start, if the allowed number began at the latest checkpoint."""
        noted = b""
        with suppress(OSError):
            noted = read_bytes(self.job_dir / "starts")
        starts = noted.split().count(self.progress.encode())
        if starts <= self.max_restarts:
            return None
        return (
            f"giving up after {counted(starts, 'start')} without progress past step {self.checkpoint_step} "
            f"(LARGEBATCH_MAX_RESTARTS {self.max_restarts}); see {self.job_dir}"
        )


def killed_processes(logs: Path) -> list[Ending]:
    """The processes that were killed, from the logs of all nodes in the folder of a start, without torch."""
    found: list[Ending] = []
    for path in sorted(logs.glob("*.log")):
        with suppress(OSError), path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                signaled = SIGNALED.search(line)
                if signaled and signaled[1] != ENDED_BY_THE_LAUNCHER:
                    message = signaled[0] + MEANINGS.get(signaled[1], "")
                    is_consequence = signaled[1] == ABORTED
                    found.append(
                        Ending(Kind.KILLED, message, is_consequence=is_consequence, node=path.stem, file=str(path))
                    )
    return found
