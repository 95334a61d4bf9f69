"""The run folder: its layout, and who may write to it.

config.json        the resolved config
plan.json          the resolved plan
source/            a copy of the task's folder at the latest start, and its git commit
status.json        the outcome: running, finished, stopped or failed
metrics.jsonl      one line per logged step
evaluations.jsonl  one line per evaluation
noise_scale.jsonl  one line per measurement of the gradient noise scale
answers/           written by fine-tuning's `evaluation.answers`: one file per evaluation
history.jsonl      one line per start, change of recipe, skipped step, failed checkpoint, and end
summary.json       the final numbers
tensorboard/       the same numbers for TensorBoard
trackers/          files of trackers, such as the id and the last number of the run in W&B (wandb.json)
checkpoints/       see `storage.layout`
model/             the final weights, for `from_pretrained`
attempts/          one file per start of the run, see `storage.attempts`
profile/           of the steps in `logging.profile`: each process's Chrome trace, and where their time went
stacks/            what the processes were doing when the run hung, and their collectives
jobs/              one folder per job of a scheduler, with one per start of it (logs, and how it ended), and copies of
                   what the jobs run
report.html        written by `largebatch report`; runs ignore it
stop               a file whose creation asks the run to stop; the run deletes it
stop.<job>         the same for the batch script of that job, which other jobs do not obey
lock               held by the run while it is running
"""

import fcntl
import itertools
import os
import re
import time
import weakref
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from largebatch.config import RecipeConfig, as_json
from largebatch.errors import UserError, file_errors
from largebatch.plan import RunPlan
from largebatch.run.watch.stop import BATCH_SCRIPT, STOP_FILE
from largebatch.storage.attempts import Attempt, claim, is_restart_of, job_start, latest_attempt
from largebatch.storage.files import replace_file, replace_json_file
from largebatch.storage.source_code import keep_source
from largebatch.system.variables import whole_number
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
        self.noise_scale_file = path / "noise_scale.jsonl"
        self.history_file = path / "history.jsonl"
        self.summary_file = path / "summary.json"
        self.checkpoints_dir = path / "checkpoints"
        self.attempts_dir = path / "attempts"
        self.model_dir = path / "model"
        self.tensorboard_dir = path / "tensorboard"
        self.trackers_dir = path / "trackers"
        self.profile_dir = path / "profile"
        self.stacks_dir = path / "stacks"
        self.job: str | None = job_start()["job_id"]
        self.stop_files = {STOP_FILE: path / "stop"}
        """The files that ask this job to stop, by the reason that they give."""
        if self.job:
            self.stop_files[BATCH_SCRIPT] = path / f"stop.{self.job}"
        self._lock: IO[bytes] | None = None
        # The batch script may have been asked to stop, and have passed it on, while Python was starting.
        self.opened = whole_number("LARGEBATCH_BEGAN", 0) or time.time()

    def check_usable(self) -> None:
        """Raise UserError, before anything is written, if the path is a file or holds files that are not a run's."""
        names: list[str] = []
        with self.writing(), suppress(FileNotFoundError):
            # A start that has just begun, or was killed at once, has no plan yet.
            names = [] if self.is_a_run else [path.name for path in self.path.iterdir()]
        ours = re.compile(r"lock|jobs|stop(\..*)?|\.plan\.json\..*")
        if not all(map(ours.fullmatch, names)):
            raise UserError(
                f"--run-dir: {self.path} holds files that are not a run's; choose another folder, or an empty one"
            )

    @property
    def is_a_run(self) -> bool:
        """Whether it holds a run."""
        return any(file.exists() for file in (self.plan_file, self.config_file, self.status_file))

    def hold(self) -> None:
        """Keep other runs out of an earlier run's folder from now on, and delete requests to stop an earlier start.

        Raises:
            UserError: Another run is writing to the folder, or it cannot be written.
        """
        with self.writing():
            # A folder without a run may have requests, too, and other starts that prepare to begin in it.
            if self.path.is_dir():
                self._lock = self._take_lock()
            for file in _stop_files_in(self.path):
                if file.lstat().st_mtime < self.opened:
                    file.unlink(missing_ok=True)

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
        with self.writing():
            if self._lock is not None and self.is_a_run and not in_place:
                names = (self.path.with_name(f"{self.path.name}.{number}") for number in itertools.count(1))
                moved = next(name for name in names if not name.exists())
                self._move_to(moved)
            if self._lock is None:
                self.path.mkdir(parents=True, exist_ok=True)
                self._lock = self._take_lock()
                if self.is_a_run:
                    # It was not there when `hold` looked.
                    raise UserError(f"--run-dir: another run has just begun in {self.path}; choose another folder")
            # The plan first: it is what marks the folder as a run's.
            replace_file(self.plan_file, [memoryview(plan.to_json().encode())])
            replace_json_file(self.config_file, as_json(config))
            task = folder_of(type(config))
            # Someone may train with the source of an earlier start.
            if not task.is_relative_to(self.source_dir):
                keep_source(self.source_dir, task, about.get("recipe"))
            attempt = claim(self.attempts_dir, about)
        return attempt, moved

    def writing(self) -> AbstractContextManager[None]:
        """Raise OSErrors of a block that writes to the folder as `file_errors` does."""
        return file_errors(f"--run-dir: {self.path} cannot be written", "choose another folder")

    def forget_requests(self) -> None:
        """Delete the requests to stop this job; one that stays is older than the next start, which deletes it."""
        for file in self.stop_files.values():
            with suppress(OSError):
                file.unlink()

    def _move_to(self, moved: Path) -> None:
        """Move the run, but not what jobs have here: this one runs the code in its folder, others wait in the queue."""
        moved.mkdir()
        kept = {"lock", "jobs", *(file.name for file in _stop_files_in(self.path))}
        markers = {self.plan_file, self.config_file, self.status_file}
        # What marks the folder as a run's is last, so that after a crash in between it still is one.
        for found in sorted(self.path.iterdir(), key=markers.__contains__):
            if found.name not in kept:
                found.rename(moved / found.name)

    def _take_lock(self) -> IO[bytes]:
        """Hold the folder for as long as the returned file is open; UserError if a running job holds it.

        A network file system may take a while to release the lock of a machine that is gone. The scheduler notices and
        restarts its job, which is let in: the old attempt cannot publish once the new one has begun.
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


def _stop_files_in(folder: Path) -> list[Path]:
    """The requests to stop in a run's folder, of whichever job. A folder is none: it could not be deleted like one."""
    return [file for file in (*folder.glob("stop"), *folder.glob("stop.*")) if not file.is_dir()]


def _who(holder: dict[str, Any]) -> str:
    job = f"job {holder['job_id']}, " if holder.get("job_id") else ""
    return f"{job}process {holder['pid']} on {holder['host']}"


def _close(reference: "weakref.ref[IO[bytes]]") -> None:
    file = reference()
    if file is not None:
        file.close()
