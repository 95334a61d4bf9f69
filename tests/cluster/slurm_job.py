"""A submitted job, as a test looks at it."""

import itertools
import os
import re
import signal
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from largebatch.storage.files import read_json_lines
from largebatch.storage.run_folder import RunFolder
from processes import is_running
from slurm_cluster import Cluster

# Seconds to wait for anything. Machines differ, and a limit costs nothing where all is well.
PATIENCE = 600.0


def wait_for(condition, logs):
    """Wait until a condition holds, and return what it gives; after ten minutes, fail with the logs."""
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline, logs()
        time.sleep(0.2)
    return found


def wait_for_empty_queue(cluster, logs):
    """Wait until no job is left in the queue."""
    wait_for(lambda: not cluster.command("squeue", "--noheader").strip(), logs)


class Process(NamedTuple):
    """What /proc says of one."""

    command: str
    environment: dict[str, str]


@dataclass
class Job:
    """A submitted job, or with no id what runs in a folder without Slurm."""

    cluster: Cluster
    id: str
    run_dir: Path
    log_file: Path

    @property
    def log(self):
        return self.log_file.read_text() if self.log_file.exists() else ""

    @property
    def state(self):
        return self.show("JobState")

    @property
    def exit_code(self):
        return self.show("ExitCode")

    def show(self, name):
        """A field of what Slurm says of the job."""
        shown = self.cluster.command("scontrol", "show", "job", self.id)
        return re.search(rf"(?<!\S){name}=(\S*)", shown)[1]

    @property
    def last_step(self):
        lines = read_json_lines(self.run_dir / "metrics.jsonl")
        return lines[-1]["step"] if lines else 0

    @property
    def logs(self):
        """The folder of its first start."""
        return self.run_dir / f"jobs/{self.id}/start_0"

    @property
    def starts(self):
        return self.log.count(f" job {self.id}, start ")

    @property
    def ending(self):
        return RunFolder(self.run_dir).ending()

    def wait_until(self, condition):
        """Wait for something that comes while the job lives."""
        polls = itertools.count()

        def holds():
            # Before the look at the condition, which may be met by the job's last act.
            state = self.state if next(polls) % 20 == 0 else ""
            if condition(self):
                return True
            assert state not in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"), f"{state}\n{self.log}"
            return False

        wait_for(holds, lambda: self.log)

    def wait_for_training(self, start):
        """Wait until the start of this number, from 1, has gone further than those before it."""
        self.wait_until(lambda job: job.starts == start)
        before = self.last_step
        self.wait_until(lambda job: job.last_step > before)

    def wait_for_end(self):
        """Wait for the state that the job ends in."""
        going_on = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")
        return wait_for(lambda: (state := self.state) not in going_on and state, lambda: self.log)

    def processes(self):
        """Its living processes, on all hosts, by their ids."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                lines = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            # It has ended meanwhile.
            except OSError:
                continue
            environment = dict(line.split("=", 1) for line in lines if "=" in line)
            # Another cluster may have a job of this number.
            is_mine = (environment.get("RUN_DIR"), environment.get("SLURM_JOB_ID", "")) == (str(self.run_dir), self.id)
            if is_mine and is_running(folder.name):
                found[int(folder.name)] = Process(command, environment)
        return found

    def rank(self, rank):
        """The process of a rank; LookupError if there is none."""
        for pid, process in self.processes().items():
            if process.environment.get("RANK") == str(rank) and "train.py" in process.command:
                return pid
        raise LookupError(rank)

    @contextmanager
    def paused(self, rank):
        """Stop a rank, and so all steps, since the other ranks wait for it; yields its process."""
        pid = self.rank(rank)
        os.kill(pid, signal.SIGSTOP)
        yield pid
        # It may have been killed.
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def assert_no_survivors(self, command=""):
        """Wait until the job has no process with this in its command."""

        def left():
            return [process.command for process in self.processes().values() if command in process.command]

        wait_for(lambda: not left(), lambda: str(left()))
