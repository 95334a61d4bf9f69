"""Jobs on a real Slurm cluster of three hosts on this machine."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paths import ROOT
from slurm_cluster import Cluster, start, stop, why_not
from slurm_job import Job

NUM_HOSTS = 3


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    reason = why_not()
    if reason:
        pytest.skip(f"no Slurm cluster can be started here: {reason}")
    # What a killed test session has left.
    stop()
    yield start(NUM_HOSTS)
    stop()


Submit = Callable[..., Job]


@pytest.fixture
def submit(cluster: Cluster, tmp_path: Path) -> Iterator[Submit]:
    """Submits a shipped batch script, as from a login node."""
    jobs = []

    def submit_script(
        script: str, *words: str, options: tuple[str, ...] = (), name: str = "run", **settings: str
    ) -> Job:
        environment = {
            "LARGEBATCH_ENV": str(Path(sys.prefix) / "bin" / "activate"),
            "RUN_DIR": str(tmp_path / name),
            **settings,
        }
        log = tmp_path / f"{name}.log"
        command = ("sbatch", "--parsable", f"--output={log}", *options, f"slurm/{script}.sbatch", *words)
        number = cluster.command(*command, environment=environment, cwd=ROOT).strip()
        job = Job(cluster, number, Path(environment["RUN_DIR"]), log)
        jobs.append(job)
        return job

    yield submit_script
    for job in jobs:
        subprocess.run(["scancel", job.id], env=cluster.environment, check=False)
    cluster.wait_until_idle()
