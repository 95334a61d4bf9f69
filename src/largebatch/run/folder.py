"""The run folder: what a run writes, where.

config.json        the resolved config
plan.json          the resolved plan
status.json        the outcome: running, finished, stopped or failed
metrics.jsonl      a line per logged step
evaluations.jsonl  a line per evaluation
history.jsonl      a line per start, change of recipe, skipped step, checkpoint that failed, and end
summary.json       the final numbers
tensorboard/       the same numbers for TensorBoard
checkpoints/       see `storage.layout`
model/             the final weights, for `from_pretrained`
attempts/          a file per start of the run, see `attempt`
profile/           what processes did in the steps of `logging.profile`: a Chrome trace each
stacks/            what processes were doing when the run hung
slurm/             a folder per SLURM job, written by slurm/launch.sh
report.html        written by `largebatch report`, with PNGs in report/; a run takes no notice of them
stop               whoever makes this file asks the run to stop; the run takes it away
lock               held by the run while it lasts
"""

import fcntl
import itertools
import os
import weakref
from functools import partial
from pathlib import Path
from typing import IO, Any

from largebatch.config import RecipeConfig, as_json
from largebatch.errors import UserError
from largebatch.plan import RunPlan
from largebatch.run.attempt import Attempt, claim, is_restart_of, latest_attempt
from largebatch.storage.files import replace_file, replace_json_file


class RunFolder:
    """The folder of one run.

    Args:
        path: Where it is or will be.
    """

    def __init__(self, path: Path):
        # A link stays one: what it points to is the folder.
        path = self.path = path.resolve()
        self.config_file = path / "config.json"
        self.plan_file = path / "plan.json"
        self.status_file = path / "status.json"
        self.history_file = path / "history.jsonl"
        self.checkpoints_dir = path / "checkpoints"
        self.attempts_dir = path / "attempts"
        self.profile_dir = path / "profile"
        self.stacks_dir = path / "stacks"
        self.stop_file = path / "stop"
        self._lock: IO[bytes] | None = None
        self.metrics_file = path / "metrics.jsonl"
        self.evaluations_file = path / "evaluations.jsonl"
        self.summary_file = path / "summary.json"
        self.model_dir = path / "model"
        self.tensorboard_dir = path / "tensorboard"

    def check_usable(self) -> None:
        """Refuse a path that is not a run's and not free, before anything is written.

        Raises:
            UserError: It is a file or below one, or a folder with something else in it.
        """
        for place in (self.path, *self.path.parents):
            if place.exists() and not place.is_dir():
                raise UserError(f"--run_dir: {place} is a file; write a folder")
        # A start that is just beginning, or was killed at once, has no plan yet.
        if self.path.is_dir() and not self.is_a_run and not all(_is_a_beginning(path) for path in self.path.iterdir()):
            raise UserError(
                f"--run_dir: {self.path} holds files that are not a run's; write another folder, or an empty one"
            )

    @property
    def is_a_run(self) -> bool:
        """Whether there is an earlier run in it."""
        return any(file.exists() for file in (self.plan_file, self.config_file, self.status_file))

    def hold(self) -> None:
        """Keep other runs out of an earlier run's folder, from now on.

        Raises:
            UserError: Another run is writing to it.
        """
        if not self.is_a_run:
            return
        try:
            self._lock = self._take_lock()
        except OSError as error:
            raise _cannot_be_written(self.path, error) from error

    def begin(
        self, config: RecipeConfig, plan: RunPlan, in_place: bool, about: dict[str, Any]
    ) -> tuple[Attempt, Path | None]:
        """Begin an attempt in the folder: with config and plan in it, and nothing of another run.

        Args:
            config: The resolved recipe.
            plan: Its plan.
            in_place: Whether to go on with the run that is there. If not, it is moved aside, never written over.
            about: What to record of the attempt.

        Returns:
            The attempt, and where the earlier run went, if it was moved.

        Raises:
            UserError: Another run is writing to the folder, or it cannot be written.
        """
        moved = None
        try:
            if self._lock is not None and not in_place:
                names = (self.path.with_name(f"{self.path.name}.{number}") for number in itertools.count(1))
                moved = next(name for name in names if not name.exists())
                self.path.rename(moved)
                self._keep_job_folder(moved)
                self._lock.close()
                self._lock = None
            if self._lock is None:
                self.path.mkdir(parents=True, exist_ok=True)
                self._lock = self._take_lock()
                if self.is_a_run:
                    # Since `hold` has looked.
                    raise UserError(f"--run_dir: another run has just begun in {self.path}; write another folder")
            # The plan first: it is what tells a run's folder from others.
            replace_file(self.plan_file, [memoryview(plan.to_json().encode())])
            replace_json_file(self.config_file, as_json(config))
            attempt = claim(self.attempts_dir, about)
        except OSError as error:
            raise _cannot_be_written(self.path, error) from error
        return attempt, moved

    def _keep_job_folder(self, moved: Path) -> None:
        """The SLURM job that this process runs in has been writing its logs into the folder that is moved aside.

        It may also have asked this run to stop; whether the request is older than the run is seen later.
        """
        job = Path("slurm", os.environ.get("SLURM_JOB_ID", "none"))
        if (moved / job).is_dir():
            (self.path / job).parent.mkdir(parents=True)
            (moved / job).rename(self.path / job)
            if (moved / self.stop_file.name).exists():
                (moved / self.stop_file.name).rename(self.stop_file)

    def _take_lock(self) -> IO[bytes]:
        """Hold the folder for as long as the returned file is open; a process that dies lets go of it.

        A network file system may not notice for a while that a machine is gone. SLURM does, and requeues its job: that
        is let in, and the new attempt keeps the old one from publishing.

        Raises:
            UserError: A running job holds it.
        """
        lock = (self.path / "lock").open("ab")
        # Loader processes would hold it on when this one is killed.
        os.register_at_fork(after_in_child=partial(_close, weakref.ref(lock)))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = latest_attempt(self.attempts_dir)
            if holder is not None and is_restart_of(holder):
                return lock
            lock.close()
            raise UserError(
                f"--run_dir: another run is writing to {self.path}"
                + (f" ({_who(holder)})" if holder else "")
                + "; wait for its end, or write another folder"
            ) from None
        return lock


def _who(holder: dict[str, Any]) -> str:
    job = f"SLURM job {holder['slurm_job_id']}, " if holder.get("slurm_job_id") else ""
    return f"{job}process {holder['pid']} on {holder['host']}"


def _is_a_beginning(path: Path) -> bool:
    return path.name in ("lock", "slurm", "stop") or path.name.startswith(".plan.json.")


def _close(reference: "weakref.ref[IO[bytes]]") -> None:
    file = reference()
    if file is not None:
        file.close()


def _cannot_be_written(path: Path, error: OSError) -> UserError:
    return UserError(f"--run_dir: {path} cannot be written: {error}; write another folder")
