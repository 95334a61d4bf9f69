"""TensorBoard and other trackers, through Accelerate's classes: a view of the run, never its record.

A run folder is one run in each tracker, across all its starts. By which id a tracker knows it is in trackers/NAME.json:

    {"id": …, "last_step": the last step number that W&B has}
"""

import importlib.util
import json
import math
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from largebatch.config import RecipeConfig, as_json, flatten
from largebatch.errors import UserError
from largebatch.run.record.folder import RunFolder
from largebatch.storage.files import replace_json_file
from largebatch.storage.layout import read_object

SECONDS_UNTIL_SHOWN = 1.0
PATIENCE_SECONDS = 60.0  # how long a tracker may take to connect, or to show what it was given, before it is dropped

Values = tuple[dict[str, float], int, float]  # values by name, their step, and the time in seconds since 1970

GIVEN_IDS: dict[str, Callable[[Any], str]] = {
    "mlflow": lambda run: str(run.info.run_id),
    "clearml": lambda task: str(task.id),
}
"""How to read the id of a run from trackers that choose it themselves."""


def check_trackers(names: Sequence[str]) -> None:
    """Raise UserError for a tracker whose package is missing."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"logging.trackers: {name} is not installed; pip install {name}, or remove it there")


class Trackers:
    """The recipe's trackers, on the main process only; one that fails or hangs is dropped with a warning.

    Args:
        config: The recipe's config.
        folder: The run's folder, of which an attempt has begun.
        first_step: TensorBoard hides what was shown of later steps before.
        is_main_process: Whether this is the process with trackers.
        say: Called with a warning for the user.
    """

    def __init__(
        self,
        config: RecipeConfig,
        folder: RunFolder,
        first_step: int,
        is_main_process: bool,
        say: Callable[[str], None],
    ):
        self._say = say
        self._pending: list[Values] = []
        self._flushed = -math.inf
        names = config.logging.trackers if is_main_process else []
        self._trackers = [_Tracker(name, partial(_Connection, name, config, folder, first_step)) for name in names]
        # They connect before loader processes are forked.
        self._wait()

    def add(self, group: str, values: dict[str, float], step: int) -> None:
        """Show values by name, within a second or with the next ones."""
        if self._trackers:
            self._pending.append(({f"{group}/{name}": value for name, value in values.items()}, step, time.time()))
            if time.monotonic() - self._flushed >= SECONDS_UNTIL_SHOWN:
                self._hand_over()

    def flush(self) -> None:
        """Wait until all values are shown."""
        self._hand_over()
        self._wait()

    def close(self) -> None:
        """Show what is left, and end the run in each tracker."""
        self._hand_over()
        for tracker in self._trackers:
            tracker.call(_Connection.finish)
        self._wait()
        self._trackers = []

    def _hand_over(self) -> None:
        pending, self._pending = self._pending, []
        self._flushed = time.monotonic()
        for tracker in self._trackers if pending else []:
            tracker.call(partial(_Connection.show, pending=pending))
        self._drop_broken(PATIENCE_SECONDS)

    def _wait(self) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        for tracker in self._trackers:
            tracker.wait(deadline - time.monotonic())
        self._drop_broken(0.0)

    def _drop_broken(self, patience: float) -> None:
        problems = {tracker: tracker.problem(patience) for tracker in self._trackers}
        for tracker, problem in problems.items():
            if problem is not None:
                self._say(f"WARNING: {tracker.name} is dropped and gets no more values in this attempt: {problem}")
                tracker.drop()
        self._trackers = [tracker for tracker, problem in problems.items() if problem is None]


class _Tracker:
    """A tracker with a thread of its own, so that it holds up neither training nor the others."""

    def __init__(self, name: str, connect: Callable[[], "_Connection"]):
        self.name = name
        self._calls: deque[Callable[[_Connection], None]] = deque()
        self._changed = threading.Condition()
        self._busy_since: float | None = time.monotonic()
        self._error: BaseException | None = None
        self._is_dropped = False
        threading.Thread(target=self._work, args=(connect,), name=f"tracker {name}", daemon=True).start()

    def call(self, call: Callable[["_Connection"], None]) -> None:
        """Make the call in the thread, after those before it."""
        with self._changed:
            self._calls.append(call)
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Return when everything is done, or has failed, or after this many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or (self._busy_since is None and not self._calls), seconds)

    def problem(self, patience: float) -> str | None:
        """Why the tracker cannot be used, such as a call that has taken longer than `patience` seconds."""
        with self._changed:
            if self._error is not None:
                return f"{type(self._error).__name__}: {self._error}"
            if self._busy_since is None or time.monotonic() - self._busy_since < patience:
                return None
            return f"it has not answered within {PATIENCE_SECONDS:g} s"

    def drop(self) -> None:
        """Let the thread end after its current call."""
        with self._changed:
            self._is_dropped = True

    def _work(self, connect: Callable[[], "_Connection"]) -> None:
        try:
            connection = connect()
            while True:
                with self._changed:
                    self._busy_since = None
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._calls)
                    if self._is_dropped:
                        return
                    self._busy_since = time.monotonic()
                    call = self._calls.popleft()
                call(connection)
        # Some libraries raise SystemExit.
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()


class _Connection:
    """The run in one tracker; all calls are made in the tracker's thread, because MLflow keeps its state per thread."""

    def __init__(self, name: str, config: RecipeConfig, folder: RunFolder, first_step: int):
        self._name = name
        self._file = folder.trackers_dir / f"{name}.json"
        known = read_object(self._file)
        self._id: str | None = known.get("id") or (None if name in GIVEN_IDS else secrets.token_hex(16))
        self._last_step = int(known.get("last_step", -1))
        self._last_shown = (-1, -1)  # the last step, and the number under which it was shown
        # TensorBoard's run is its folder.
        if name != "tensorboard":
            folder.trackers_dir.mkdir(exist_ok=True)
            self._write()
        run_name = config.logging.tracker_run_name or folder.path.name
        project = folder.path.name if name == "tensorboard" else config.logging.tracker_project
        self._tracker: GeneralTracker = LOGGER_TYPE_TO_CLASS[name](
            project, **self._arguments(folder, run_name, first_step)
        )
        self._tracker.start()
        run = self._tracker.tracker
        if name == "wandb":
            # Charts are drawn over the training step, even where a restart repeated steps.
            run.define_metric("step")
            run.define_metric("*", step_metric="step")
        if name in GIVEN_IDS:
            self._id = GIVEN_IDS[name](run)
            self._write()
        if name != "mlflow" or not known.get("id"):
            # MLflow accepts no changed parameters. Trackers accept no lists or nulls.
            fields = flatten(as_json(config)).items()
            kinds = str | int | float
            self._tracker.store_init_configuration(
                {field: value if isinstance(value, kinds) else json.dumps(value) for field, value in fields}
            )

    def show(self, pending: Sequence[Values]) -> None:
        if self._name == "tensorboard":
            _add_to_tensorboard(self._tracker.tracker, pending)
            return
        steps = [step for _, step, _ in pending]
        if self._name == "wandb":
            steps = [self._increasing(step) for step in steps]
            # Written before they are shown, so that a later start knows of all of them.
            self._write()
        for (values, step, _), number in zip(pending, steps, strict=True):
            self._tracker.log({**values, "step": step} if self._name == "wandb" else values, step=number)

    def finish(self) -> None:
        self._tracker.finish()

    def _increasing(self, step: int) -> int:
        """The step, or the next number after those that W&B has, because it ignores what is logged for earlier ones."""
        if step != self._last_shown[0]:
            self._last_step = max(step, self._last_step + 1)
            self._last_shown = (step, self._last_step)
        return self._last_shown[1]

    def _write(self) -> None:
        replace_json_file(self._file, {"id": self._id, "last_step": self._last_step})

    def _arguments(self, folder: RunFolder, run_name: str, first_step: int) -> dict[str, Any]:
        """What the tracker's class needs to create the run, or to find the one that an earlier start created."""
        if self._name == "tensorboard":
            hidden = {"purge_step": first_step + 1} if first_step else {}
            return {"logging_dir": str(folder.tensorboard_dir), **hidden}
        if self._name == "wandb":
            # Otherwise its hook at the process's exit would wait for the network without a limit.
            os.environ.setdefault("WANDB_FINISH_TIMEOUT", str(PATIENCE_SECONDS))
            return {"name": run_name, "id": self._id, "resume": "allow", "dir": str(folder.trackers_dir)}
        if self._name == "mlflow":
            return {"run_name": run_name, "run_id": self._id}
        if self._name == "trackio":
            # It finds a run by its name.
            assert self._id is not None
            return {"name": f"{run_name}-{self._id[:8]}", "resume": "allow"}
        # ClearML would add the last step to all later ones, and record a second time what TensorBoard gets.
        again = {"reuse_last_task_id": self._id, "continue_last_task": 0} if self._id else {"reuse_last_task_id": False}
        return {"task_name": run_name, "auto_connect_frameworks": False, **again}


def _add_to_tensorboard(writer: Any, pending: Sequence[Values]) -> None:
    """As Accelerate does, but with one record for all values of a step, and without waiting for the disk each time."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    for values, step, seconds in pending:
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        writer.file_writer.add_summary(summary, step, seconds)
    writer.flush()
