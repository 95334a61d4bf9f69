"""The run folder: its layout, and who may write to it.

config.json        the resolved config
plan.json          the resolved plan
source/            a copy of the task's folder at the latest start, and its git commit; requeued jobs train with it
status.json        the outcome: running, finished, stopped or failed
metrics.jsonl      one line per logged step
evaluations.jsonl  one line per evaluation
history.jsonl      one line per start, change of recipe, skipped step, failed checkpoint, slow process, and end
summary.json       the final numbers
tensorboard/       the same numbers for TensorBoard
trackers/          the run's identity in each tracker (NAME.json), over all starts, and files of those that write some
checkpoints/       see `storage.layout`
model/             the final weights, for `from_pretrained`
attempts/          one file per start of the run, see `storage.attempts`
profile/           Chrome traces of the steps in `logging.profile`, one per process
stacks/            what the processes were doing when the run hung, and their collectives
slurm/             one folder per SLURM job, written by slurm/launch.sh
report.html        written by `largebatch report`; runs ignore it
stop               a file whose creation asks the run to stop; the run deletes it
lock               held by the run while it is running
"""

import fcntl
import itertools
import os
import time
import weakref
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from largebatch.config import RecipeConfig, as_json
from largebatch.errors import UserError
from largebatch.plan import RunPlan
from largebatch.run.source import keep_source
from largebatch.storage.attempts import Attempt, claim, is_restart_of, latest_attempt
from largebatch.storage.files import replace_file, replace_json_file
from largebatch.storage.layout import FORMAT
from largebatch.task_folders import folder_of


class RunFolder:
    """The folder of one run, which exists from `begin` on."""

    def __init__(self, path: Path):
        # A symbolic link stays as it is; the folder is its target.
        path = self.path = path.resolve()
        self.config_file = path / "config.json"
        self.plan_file = path / "plan.json"
        self.source_dir = path / "source"
        self.status_file = path / "status.json"
        self.metrics_file = path / "metrics.jsonl"
        self.evaluations_file = path / "evaluations.jsonl"
        self.history_file = path / "history.jsonl"
        self.summary_file = path / "summary.json"
        self.checkpoints_dir = path / "checkpoints"
        self.attempts_dir = path / "attempts"
        self.model_dir = path / "model"
        self.tensorboard_dir = path / "tensorboard"
        self.trackers_dir = path / "trackers"
        self.profile_dir = path / "profile"
        self.stacks_dir = path / "stacks"
        self.stop_file = path / "stop"
        self._lock: IO[bytes] | None = None
        # slurm/launch.sh may have been asked to stop, and have passed it on, while Python was starting.
        self._opened = float(os.environ.get("LARGEBATCH_BEGAN", time.time()))

    def check_usable(self) -> None:
        """Raise UserError, before anything is written, if the path is a file or holds files that are not a run's."""
        for place in (self.path, *self.path.parents):
            if place.exists() and not place.is_dir():
                raise UserError(f"--run-dir: {place} is a file; choose a folder")
        # A start that has just begun, or was killed at once, has no plan yet.
        names = [path.name for path in self.path.iterdir()] if self.path.is_dir() and not self.is_a_run else []
        if any(name not in ("lock", "slurm", "stop") and not name.startswith(".plan.json.") for name in names):
            raise UserError(
                f"--run-dir: {self.path} holds files that are not a run's; choose another folder, or an empty one"
            )

    @property
    def is_a_run(self) -> bool:
        """Whether it holds a run."""
        return any(file.exists() for file in (self.plan_file, self.config_file, self.status_file))

    def check_format(self) -> None:
        """Raise UserError if the latest attempt was made by a version of largebatch with another format."""
        # A damaged record says nothing, but checkpoints name their format, too.
        with suppress(OSError):
            latest = latest_attempt(self.attempts_dir)
            if latest is not None and latest.get("format") != FORMAT:
                raise UserError(
                    f"--run-dir: the run in {self.path} has format {latest.get('format')!r}, but this version of "
                    f"largebatch reads only {FORMAT!r}; --resume none starts over and moves it aside"
                )

    def hold(self) -> None:
        """Keep other runs out of an earlier run's folder from now on; UserError if another run is writing to it."""
        if self.is_a_run:
            try:
                self._lock = self._take_lock()
            except OSError as error:
                raise cannot_be_written(self.path, error) from error

    def begin(
        self, config: RecipeConfig, plan: RunPlan, in_place: bool, about: dict[str, Any]
    ) -> tuple[Attempt, Path | None]:
        """Begin an attempt, recorded with `about`, and write config, plan and source.

        Unless the attempt continues `in_place`, an earlier run is moved aside.

        Returns:
            The attempt, and where the earlier run was moved, if it was.

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
                    # It was not there when `hold` looked.
                    raise UserError(f"--run-dir: another run has just begun in {self.path}; choose another folder")
            # The plan first: it is what marks the folder as a run's.
            replace_file(self.plan_file, [memoryview(plan.to_json().encode())])
            replace_json_file(self.config_file, as_json(config))
            task = folder_of(type(config).__module__)
            # A requeued job trains with the source that is there.
            if task is not None and not task.is_relative_to(self.source_dir):
                keep_source(self.source_dir, task)
            attempt = claim(self.attempts_dir, about)
        except OSError as error:
            raise cannot_be_written(self.path, error) from error
        return attempt, moved

    def forget_old_request(self) -> None:
        """Delete a stop file that is older than this process, and so was meant for an earlier attempt."""
        if self.stop_file.exists() and self.stop_file.stat().st_mtime < self._opened:
            self.stop_file.unlink()

    def _keep_job_folder(self, moved: Path) -> None:
        """Move the folder of this process's SLURM job, which has been writing logs, and any request to stop back.

        `forget_old_request` later decides whether the request is old.
        """
        job = Path("slurm", os.environ.get("SLURM_JOB_ID", "none"))
        if (moved / job).is_dir():
            (self.path / job).parent.mkdir(parents=True)
            (moved / job).rename(self.path / job)
            if (moved / self.stop_file.name).exists():
                (moved / self.stop_file.name).rename(self.stop_file)

    def _take_lock(self) -> IO[bytes]:
        """Hold the folder for as long as the returned file is open; UserError if a running job holds it.

        A network file system may take a while to release the lock of a machine that is gone. SLURM notices and requeues
        its job, which is let in: the old attempt cannot publish once the new one has begun.
        """
        lock = (self.path / "lock").open("ab")
        # Loader processes would keep holding it when this one is killed.
        os.register_at_fork(after_in_child=partial(_close, weakref.ref(lock)))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = latest_attempt(self.attempts_dir)
            if holder is not None and is_restart_of(holder):
                return lock
            lock.close()
            raise UserError(
                f"--run-dir: another run is writing to {self.path}"
                + (f" ({_who(holder)})" if holder else "")
                + "; wait until it ends, or choose another folder"
            ) from None
        return lock


def cannot_be_written(path: Path, error: OSError) -> UserError:
    """The error for a run folder that the file system does not let a run write to."""
    return UserError(f"--run-dir: {path} cannot be written: {error}; choose another folder")


def _who(holder: dict[str, Any]) -> str:
    job = f"SLURM job {holder['slurm_job_id']}, " if holder.get("slurm_job_id") else ""
    return f"{job}process {holder['pid']} on {holder['host']}"


def _close(reference: "weakref.ref[IO[bytes]]") -> None:
    file = reference()
    if file is not None:
        file.close()
