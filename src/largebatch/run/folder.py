"""The run folder: what a run writes, where.

config.json        the resolved config
plan.json          the resolved plan
metrics.jsonl      a line per logged step
evaluations.jsonl  a line per evaluation
summary.json       the final numbers
tensorboard/       the same numbers for TensorBoard
model/             the final weights, for `from_pretrained`
lock               held by the run while it lasts
"""

import fcntl
import itertools
import json
from pathlib import Path
from typing import IO, Any

from largebatch.config import RecipeConfig
from largebatch.errors import UserError
from largebatch.plan import RunPlan


class RunFolder:
    """The folder of one run.

    Args:
        path: Where it is or will be.
    """

    def __init__(self, path: Path):
        # A link stays one: what it points to is the folder.
        path = self.path = path.resolve()
        self.plan_file = path / "plan.json"
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
        if self.path.is_dir() and not self.plan_file.exists() and any(self.path.iterdir()):
            raise UserError(
                f"--run_dir: {self.path} holds files that are not a run's; write another folder, or an empty one"
            )

    def create(self, config: RecipeConfig, plan: RunPlan) -> Path | None:
        """Make the folder with config and plan in it. An earlier run's folder is moved aside, never written over.

        Returns:
            Where the earlier run went, if there was one.

        Raises:
            UserError: Another run is writing to the folder, or it cannot be written.
        """
        moved = None
        try:
            if self.plan_file.exists():
                self._take_lock().close()
                names = (self.path.with_name(f"{self.path.name}.{number}") for number in itertools.count(1))
                moved = next(name for name in names if not name.exists())
                self.path.rename(moved)
            self.path.mkdir(parents=True, exist_ok=True)
            # The plan first: it is what tells a run's folder from others.
            self.plan_file.write_text(plan.to_json(), encoding="utf-8")
            self._lock = self._take_lock()
            resolved = config.model_dump(mode="json", by_alias=True, exclude={"schema_"})
            write_json(self.path / "config.json", resolved)
        except OSError as error:
            raise UserError(f"--run_dir: {self.path} cannot be written: {error}; write another folder") from error
        return moved

    def _take_lock(self) -> IO[bytes]:
        """Hold the folder for as long as the returned file is open; a process that dies lets go of it.

        Raises:
            UserError: A running job holds it.
        """
        lock = (self.path / "lock").open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise UserError(
                f"--run_dir: another run is writing to {self.path}; wait for its end, or write another folder"
            ) from None
        return lock


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON; a reader sees the old file or the whole new one."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def append_json_line(path: Path, value: Any) -> None:
    """Append `value` as one line of JSON."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(value) + "\n")
