"""A submitted job, as a test looks at it."""

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from largebatch.storage.files import read_json_lines
from largebatch.storage.run_folder import RunFolder
from largebatch.system.endings import Ending
from slurm_cluster import Cluster

# Seconds to wait for anything. Machines differ, and a limit costs nothing where all is well.
PATIENCE = 600.0


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
    def log(self) -> str:
        return self.log_file.read_text() if self.log_file.exists() else ""

    @property
    def state(self) -> str:
        return self.show("JobState")

    @property
    def exit_code(self) -> str:
        return self.show("ExitCode")

    def show(self, name: str) -> str:
        """A field of what Slurm says of the job."""
        for word in self.cluster.command("scontrol", "show", "job", self.id).split():
            if word.startswith(f"{name}="):
                return word.removeprefix(f"{name}=")
        raise LookupError(name)

    @property
    def last_step(self) -> int:
        lines = read_json_lines(self.run_dir / "metrics.jsonl")
        return lines[-1]["step"] if lines else 0

    @property
    def logs(self) -> Path:
        """The folder of its first start."""
        return self.run_dir / f"jobs/{self.id}/start_0"

    @property
    def starts(self) -> int:
        return self.log.count(f" job {self.id}, start ")

    @property
    def ending(self) -> Ending | None:
        return RunFolder(self.run_dir).ending()

    def wait_until(self, condition: Callable[["Job"], bool], seconds: float = PATIENCE) -> None:
        """Wait for something that comes while the job lives."""
        deadline = time.monotonic() + seconds
        for polls in itertools.count():
            # Before the look at the condition, which may be met by the job's last act.
            state = self.state if polls % 10 == 0 else ""
            if condition(self):
                return
            assert time.monotonic() < deadline, f"not in {seconds:.0f} s; {self.state}\n{self.log}"
            assert state not in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"), f"{state}\n{self.log}"
            time.sleep(0.2)

    def wait_for_training(self, start: int) -> None:
        """Wait until the start of this number, from 1, has gone further than those before it."""
        self.wait_until(lambda job: job.starts == start)
        before = self.last_step
        self.wait_until(lambda job: job.last_step > before)

    def wait_for_end(self, seconds: float = PATIENCE) -> str:
        """Wait for the state that the job ends in."""
        deadline = time.monotonic() + seconds
        while (state := self.state) in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
            assert time.monotonic() < deadline, f"still {state} after {seconds:.0f} s\n{self.log}"
            time.sleep(0.5)
        return state

    def processes(self) -> dict[int, Process]:
        """Its living processes, on all hosts, by their ids."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                lines = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                is_zombie = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
            # It has ended meanwhile.
            except OSError:
                continue
            environment = dict(line.split("=", 1) for line in lines if "=" in line)
            # Another cluster may have a job of this number.
            is_mine = (environment.get("RUN_DIR"), environment.get("SLURM_JOB_ID", "")) == (str(self.run_dir), self.id)
            if is_mine and not is_zombie:
                found[int(folder.name)] = Process(command, environment)
        return found

    def rank(self, rank: int) -> int:
        """The process of a rank; LookupError if there is none."""
        for pid, process in self.processes().items():
            if process.environment.get("RANK") == str(rank) and "train.py" in process.command:
                return pid
        raise LookupError(rank)

    @contextmanager
    def paused(self, rank: int) -> Iterator[int]:
        """Stop a rank, and so all steps, since the other ranks wait for it; yields its process."""
        pid = self.rank(rank)
        os.kill(pid, signal.SIGSTOP)
        yield pid
        # It may have been killed.
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def assert_no_survivors(self, command: str = "", seconds: float = PATIENCE) -> None:
        """Wait until the job has no process with this in its command."""
        deadline = time.monotonic() + seconds
        while left := [process.command for process in self.processes().values() if command in process.command]:
            assert time.monotonic() < deadline, left
            time.sleep(0.5)
