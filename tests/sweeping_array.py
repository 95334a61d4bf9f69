"""An array of jobs that train the points of a sweep on a test cluster."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from largebatch.storage.layout import read_object
from largebatch.storage.run_folder import RunFolder
from paths import ROOT
from slurm_cluster import Cluster
from slurm_job import PATIENCE, Job


class SweepingArray:
    """A command with `--slurm` on a test cluster, and the points that its array trains.

    Args:
        cluster: The cluster.
        folder: The folder of the sweep.
        words: The command, without `--folder` and `--slurm`.
        environment: Variables of the command.
    """

    def __init__(self, cluster: Cluster, folder: Path, words: Sequence[str], environment: Mapping[str, str]):
        self.cluster = cluster
        self.folder = folder
        self.environment = environment
        self.words = [*words, f"--folder={folder}", "--slurm", "--nodes=1", "--cpus-per-task=1"]
        self.number = ""

    def command(self) -> str:
        """Give the command, and return its output; the array's number is kept if it has submitted one."""
        words = (sys.executable, "-m", "largebatch", *self.words)
        output = self.cluster.command(*words, environment=self.environment, cwd=ROOT)
        if submitted := re.search(r"^job (\d+)$", output, re.MULTILINE):
            self.number = submitted[1]
        return output

    @property
    def points(self) -> list[Path]:
        """The points' run folders, in the order of their numbers."""
        return [self.folder / point["name"] for point in read_object(self.folder / "sweep.json")["points"]]

    def job(self, index: int) -> Job:
        """The job of a point that trains, or has trained."""
        name = f"{self.number}_{index}"
        number = Job(self.cluster, name, self.points[index], self.folder).show("JobId")
        return Job(self.cluster, number, self.points[index], self.folder / f"points/{index}.log")

    def lose_host_of(self, index: int) -> list[Path]:
        """Cut off the host that trains a point, kill all that it trains, and return their folders."""
        host = self.job(index).show("NodeList")
        self.cluster.cut_off(host)
        running = self.cluster.command("squeue", "--noheader", f"--nodelist={host}", "--states=running", "--format=%K")
        for number in running.split():
            for pid in self.job(int(number)).processes():
                # One may have ended with another.
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return [self.points[int(number)] for number in running.split()]

    def wait_for(self, condition: Callable[[], Any]) -> Any:
        """Wait until a condition holds, and return what it gives; after ten minutes, fail with the points' logs."""
        deadline = time.monotonic() + PATIENCE
        while not (found := condition()):
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.05)
        return found

    def wait_for_end(self) -> None:
        """Wait until no job is left in the queue."""
        self.wait_for(lambda: not self.cluster.command("squeue", "--noheader").strip())

    def logs(self) -> str:
        """The output of the points' jobs."""
        return "\n".join(file.read_text() for file in (self.folder / "points").glob("*.log"))

    def outcomes(self) -> set[str | None]:
        """How the points have ended; None for one that has not."""
        endings = [RunFolder(point).ending() for point in self.points]
        return {ending and ending.kind for ending in endings}
