"""The shipped `slurm/prepare.sbatch` as an array of three on a test cluster; a shard of its text takes a second."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from paths import PYDOC, ROOT
from slurm_cluster import Cluster

NUM_TASKS = 3
PATIENCE = 600.0
LINE = "".join(map(chr, range(32, 127))) * 10


class PreparingArray:
    """A text, and the jobs that prepare it on a test cluster.

    Args:
        cluster: The cluster.
        folder: The folder of the text, the logs, and the prepared data.
        num_rows: Number of rows of the text, each with about a kilobyte; a shard has about 1,000.
    """

    def __init__(self, cluster: Cluster, folder: Path, num_rows: int):
        self.cluster = cluster
        self.folder = folder
        self.rows = [f"{number} {LINE}" for number in range(num_rows)]
        text = folder / "text.jsonl"
        text.write_text("".join(json.dumps({"text": row}) + "\n" for row in self.rows))
        activate = folder / "activate"
        activate.write_text(f"source {sys.prefix}/bin/activate\n")
        data = {"source": "datasets", "path": "json", "data_files": {"train": str(text), "eval": str(text)}}
        data |= {"tokenizer": "bytes", "block_size": 64, "num_train_samples": 1000, "num_eval_samples": 10}
        self.data = json.dumps(data | {"eval_split": "train"})
        self.activate = activate
        self.home = folder / "cache"  # HF_HOME of the next job

    def submit(self, **changes: str) -> str:
        """Submit the array, with these variables, and return the job's number."""
        # Slurm would wait for memory that the hosts do not have.
        options = (f"--array=0-{NUM_TASKS - 1}", "--cpus-per-task=1", "--mem-per-cpu=0", "--time=20")
        words = (f"--output={self.folder}/%a.log", "slurm/prepare.sbatch", str(PYDOC.relative_to(ROOT)))
        command = ("sbatch", "--parsable", *options, *words, "--data", self.data)
        settings = {"LARGEBATCH_ENV": str(self.activate), "HF_HOME": str(self.home), **changes}
        return self.cluster.command(*command, environment=settings, cwd=ROOT).strip()

    def has_begun(self) -> bool:
        """Whether a task has begun to write tokens."""
        return any(self.home.glob("largebatch/*"))

    def has_ended(self, job: str) -> bool:
        """Whether no task of the job waits or runs."""
        return not self.cluster.command("squeue", "--noheader", f"--jobs={job}").strip()

    def kill(self, job: str, task: int) -> None:
        """Kill all processes of a task."""
        self.cluster.command("scancel", "--signal=KILL", "--full", f"{job}_{task}")

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Wait until a condition holds; after ten minutes, fail with the tasks' logs."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.1)

    def logs(self) -> str:
        """The logs of the last job's tasks."""
        return "\n".join(file.read_text() for file in sorted(self.folder.glob("?.log")))

    def manifests(self) -> list[Path]:
        """The manifest, once all shards are prepared."""
        return list(self.home.glob("largebatch/*/manifest.json"))

    def shards(self) -> dict[Path, int]:
        """The JSON of the finished shards, and when they were written."""
        return {path: path.stat().st_mtime_ns for path in self.home.glob("largebatch/*/0*.json")}

    def tokens(self) -> bytes:
        """The tokens of all shards, 16 bits for each character."""
        (manifest,) = self.manifests()
        return b"".join((manifest.parent / f"{number:05d}.tokens").read_bytes() for number in range(len(self.shards())))

    def expected_tokens(self) -> bytes:
        """The tokens of the text's rows, each with its end-of-text token."""
        return "".join(f"{row}\0" for row in self.rows).encode("utf-16-le")
