"""Who may write to a run's folder: a run holds it from its start on, and begins an attempt in it."""

import fcntl
import itertools
import os
import time
import weakref
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from largebatch.config import RecipeConfig
from largebatch.errors import UserError, file_errors
from largebatch.plan import RunPlan
from largebatch.storage.attempts import Attempt, claim, is_restart_of, job_start, latest_attempt
from largebatch.storage.run_folder import RunFolder
from largebatch.storage.source_code import keep_source
from largebatch.system.endings import StopReason
from largebatch.system.presence import exists, is_folder
from largebatch.system.variables import whole_number


class OwnFolder(RunFolder):
    """The folder of this process's run, which exists from `begin` on."""

    def __init__(self, path: Path):
        # A symbolic link stays as it is; the folder is its target.
        super().__init__(path.resolve())
        self.obeyed_stop_files = {StopReason.STOP_FILE: self.stop_file}
        """The files that ask this job to stop, by the reason that they give."""
        if job := job_start()["job_id"]:
            self.obeyed_stop_files[StopReason.BATCH_SCRIPT] = self.stop_file_of(job)
        self._lock: IO[bytes] | None = None
        # The batch script may have been asked to stop, and have passed it on, while Python was starting.
        self.opened = whole_number("LARGEBATCH_BEGAN", 0) or time.time()

    def check_usable(self) -> None:
        """Raise UserError, before anything is written, if the path is a file or holds files that are not a run's."""
        found: set[Path] = set()
        with self.writing(), suppress(FileNotFoundError):
            if not self.is_a_run:
                found = set(self.path.iterdir())
        # A start that has just begun, or was killed at once, has no plan yet.
        unfinished_plans = self.path.glob(f".{self.plan_file.name}.*")
        if found - {self.lock_file, self.jobs_dir, *self.stop_files(), *unfinished_plans}:
            raise UserError(
                f"--run-dir: {self.path} holds files that are not a run's; choose another folder, or an empty one"
            )

    def hold(self) -> None:
        """Keep other runs out of an earlier run's folder from now on, and delete requests to stop an earlier start.

        Raises:
            UserError: Another run is writing to the folder, or it cannot be written.
        """
        with self.writing():
            # A folder without a run may have requests, too, and other starts that prepare to begin in it.
            if is_folder(self.path):
                self._lock = self._take_lock()
            for file in self.stop_files():
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
                moved = next(name for name in names if not exists(name))
                self._move_to(moved)
            if self._lock is None:
                self.path.mkdir(parents=True, exist_ok=True)
                self._lock = self._take_lock()
                if self.is_a_run:
                    # It was not there when `hold` looked.
                    raise UserError(f"--run-dir: another run has just begun in {self.path}; choose another folder")
            # The plan first: it is what marks the folder as a run's.
            self.write_plan(plan)
            self.write_config(config)
            task = config.task_folder()
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
        for file in self.obeyed_stop_files.values():
            with suppress(OSError):
                file.unlink()

    def _move_to(self, moved: Path) -> None:
        """Move the run, but not what jobs have here: this one runs the code in its folder, others wait in the queue."""
        moved.mkdir()
        kept = {self.lock_file, self.jobs_dir, *self.stop_files()}
        markers = {self.plan_file, self.config_file, self.attempts_dir}
        # What marks the folder as a run's, or as a finished one's, is last, so that it still is one after a crash.
        for found in sorted(self.path.iterdir(), key=lambda path: path in markers):
            if found not in kept:
                found.rename(moved / found.name)

    def _take_lock(self) -> IO[bytes]:
        """Hold the folder for as long as the returned file is open; UserError if a running job holds it.

        A network file system may take a while to release the lock of a machine that is gone. The scheduler notices and
        restarts its job, which is let in: the old attempt cannot publish once the new one has begun.
        """
        lock = self.lock_file.open("ab")
        # Loader processes would keep holding it when this one is killed.
        os.register_at_fork(after_in_child=partial(_close, weakref.ref(lock)))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = latest_attempt(self.attempts_dir)
            if holder is not None and is_restart_of(holder):
                return lock
            lock.close()
            who = ""
            if holder is not None:
                job = f"job {holder['job_id']}, " if holder.get("job_id") else ""
                who = f" ({job}process {holder['pid']} on {holder['host']})"
            raise UserError(
                f"--run-dir: another run is writing to {self.path}{who}; wait until it ends, or choose another folder"
            ) from None
        return lock


def _close(reference: "weakref.ref[IO[bytes]]") -> None:
    file = reference()
    if file is not None:
        file.close()
