"""TensorBoard and other trackers, through Accelerate's classes: a view of the run, never its record.

A run folder is one run in TensorBoard and in W&B, across all its starts; in any other tracker, each start is a run.
"""

import importlib.util
import json
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from queue import SimpleQueue
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, TensorBoardTracker, WandBTracker

from largebatch.config import RecipeConfig, as_json, flatten
from largebatch.errors import UserError
from largebatch.run.record.folder import RunFolder
from largebatch.storage.files import replace_json_file
from largebatch.storage.layout import read_object

PATIENCE_SECONDS = 60.0  # how long a tracker may take to connect, or to show what it was given, before it is dropped


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
        names = config.logging.trackers if is_main_process else []
        self._threads = [_TrackerThread(name, partial(connect, name, config, folder, first_step)) for name in names]
        # They connect before loader processes are forked.
        self.flush()

    def add(self, group: str, values: dict[str, float], step: int) -> None:
        """Show values by name, without waiting until they are shown."""
        named = {f"{group}/{name}": value for name, value in values.items()}
        for thread in self._threads:
            thread.call(lambda connection: connection.show(named, step))
        self._drop_broken(PATIENCE_SECONDS)

    def close(self) -> None:
        """End the run in each tracker, when it has shown all values."""
        for thread in self._threads:
            thread.call(lambda connection: connection.tracker.finish())
        self.flush()
        self._threads = []

    def flush(self) -> None:
        """Wait until all values are shown."""
        wait([call for thread in self._threads for call in thread.calls], PATIENCE_SECONDS)
        self._drop_broken(0.0)

    def _drop_broken(self, patience: float) -> None:
        problems = {thread: thread.problem(patience) for thread in self._threads}
        for thread, problem in problems.items():
            if problem is not None:
                thread.dropped = True
                self._say(f"WARNING: {thread.name} is dropped and gets no more values in this attempt: {problem}")
        self._threads = [thread for thread, problem in problems.items() if problem is None]


class _TrackerThread:
    """Calls a tracker, so that it holds up neither training nor the others, nor the end of the process.

    All calls are made in one thread, because MLflow keeps its state per thread.
    """

    def __init__(self, name: str, connect: "Callable[[], Connection]"):
        self.name = name
        self.dropped = False  # whether the calls that are left are no longer to be made
        self.calls: deque[Future[None]] = deque()  # those that may not be done
        self._busy_since = time.monotonic()  # when the latest call began that was made
        self._queue: SimpleQueue[tuple[Callable[[Any], Any], Future[None]]] = SimpleQueue()
        threading.Thread(target=self._work, name=f"tracker {name}", daemon=True).start()
        self.call(lambda _: connect())

    def call(self, function: "Callable[[Connection], Any]") -> None:
        """Call a function with the connection, after the calls before."""
        future: Future[None] = Future()
        if not self.calls:
            self._busy_since = time.monotonic()
        self.calls.append(future)
        self._queue.put((function, future))

    def problem(self, patience: float) -> str | None:
        """Why the tracker cannot be used: an exception, or a call that takes over `patience` seconds."""
        while self.calls and self.calls[0].done():
            if error := self.calls.popleft().exception():
                return f"{type(error).__name__}: {error}"
        if self.calls and time.monotonic() - self._busy_since >= patience:
            return f"it has not answered within {PATIENCE_SECONDS:g} s"
        return None

    def _work(self) -> None:
        connection = None
        while not self.dropped:
            function, future = self._queue.get()
            self._busy_since = time.monotonic()
            try:
                connection = function(connection) or connection
                future.set_result(None)
            # Some libraries raise SystemExit.
            except BaseException as error:
                future.set_exception(error)


class Connection:
    """A run in one tracker."""

    def __init__(self, tracker: GeneralTracker, config: RecipeConfig):
        self.tracker = tracker
        tracker.start()
        # Trackers accept no lists or nulls.
        fields = flatten(as_json(config)).items()
        kinds = str | int | float
        tracker.store_init_configuration(
            {field: value if isinstance(value, kinds) else json.dumps(value) for field, value in fields}
        )

    def show(self, values: dict[str, float], step: int) -> None:
        """Show values by name, at their step."""
        self.tracker.log(values, step=step)


class WeightsAndBiases(Connection):
    """The run of all starts, which trackers/wandb.json identifies: {"id": …, "last_step": the last number it has}.

    W&B ignores what is logged for earlier numbers. Steps that a restart repeats get the next ones, and charts are drawn
    over the training step.
    """

    def __init__(self, config: RecipeConfig, folder: RunFolder):
        self._file = folder.trackers_dir / "wandb.json"
        known = read_object(self._file)
        self._id: str = known.get("id") or secrets.token_hex(16)
        self._last_number = int(known.get("last_step", -1))
        self._last_step = -1  # the training step that was shown under the last number
        self._write()
        # Otherwise its hook at the process's exit would wait for the network without a limit.
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", str(PATIENCE_SECONDS))
        settings, name = config.logging, config.logging.tracker_run_name or folder.path.name
        directory = str(folder.trackers_dir)
        super().__init__(
            WandBTracker(settings.tracker_project, name=name, id=self._id, resume="allow", dir=directory), config
        )
        run = self.tracker.tracker
        run.define_metric("step")
        run.define_metric("*", step_metric="step")

    def show(self, values: dict[str, float], step: int) -> None:
        """Show values at a number that is never less than the one before."""
        if step != self._last_step:
            self._last_step, self._last_number = step, max(step, self._last_number + 1)
            # Written before it is shown, so that a later start knows of it.
            self._write()
        super().show({**values, "step": step}, self._last_number)

    def _write(self) -> None:
        replace_json_file(self._file, {"id": self._id, "last_step": self._last_number})


def connect(name: str, config: RecipeConfig, folder: RunFolder, first_step: int) -> Connection:
    """Begin, or continue, the run in a tracker."""
    if name == "tensorboard":
        # It hides what earlier starts have shown of later steps.
        hidden = {"purge_step": first_step + 1} if first_step else {}
        return Connection(TensorBoardTracker(folder.path.name, str(folder.tensorboard_dir), **hidden), config)
    folder.trackers_dir.mkdir(exist_ok=True)
    if name == "wandb":
        return WeightsAndBiases(config, folder)
    tracker_class = LOGGER_TYPE_TO_CLASS[name]
    own_folder = [str(folder.trackers_dir)] if tracker_class.requires_logging_directory else []
    return Connection(tracker_class(config.logging.tracker_project, *own_folder), config)
