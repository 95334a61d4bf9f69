"""TensorBoard and other trackers, through Accelerate's classes: a view of the run, never its record.

A run folder is one run in TensorBoard and in W&B, across all its starts; in any other tracker, each start is a run.
"""

import importlib.util
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, TensorBoardTracker, WandBTracker

from largebatch.config import RecipeConfig, as_json, flatten
from largebatch.errors import UserError
from largebatch.storage.files import replace_json_file
from largebatch.storage.layout import read_object
from largebatch.storage.run_folder import RunFolder

PATIENCE_SECONDS = 60.0  # how long a tracker may take to connect, or to show what is left at the end


def check_trackers(names: Sequence[str]) -> None:
    """Raise UserError for a tracker whose package is missing."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"logging.trackers: {name} is not installed; pip install {name}, or remove it there")


class Trackers:
    """Trackers of a run; one that fails or hangs is dropped with a warning.

    Args:
        names: Their names in the recipe.
        connect: Begins, or continues, the run in the tracker of a name.
        say: Called with a warning for the user.
    """

    def __init__(self, names: Sequence[str], connect: Callable[[str], GeneralTracker], say: Callable[[str], None]):
        self._say = say
        self._threads = [_TrackerThread(name, connect) for name in names]
        # They connect before loader processes are forked.
        self.flush()

    def add(self, group: str, values: dict[str, float], step: int) -> None:
        """Show values by name, without waiting until they are shown."""
        named = {f"{group}/{name}": value for name, value in values.items()}
        for thread in self._threads:
            thread.call(lambda tracker: tracker.log(named, step=step))
        self._drop_broken()

    def close(self) -> None:
        """End the run in each tracker, when it has shown all values."""
        for thread in self._threads:
            thread.call(lambda tracker: tracker.finish())
        self.flush()
        self._threads = []

    def flush(self) -> None:
        """Wait until all values are shown; a tracker that is not done in time is dropped."""
        for thread in self._threads:
            thread.mark()
        end = time.monotonic() + PATIENCE_SECONDS
        for thread in self._threads:
            if thread.problem is None and not thread.caught_up.wait(end - time.monotonic()):
                thread.problem = f"it has not answered within {PATIENCE_SECONDS:g} s"
        self._drop_broken()

    def _drop_broken(self) -> None:
        broken = [thread for thread in self._threads if thread.problem]
        for each in broken:
            self._say(f"WARNING: {each.name} is dropped and gets no more values in this attempt: {each.problem}")
        self._threads = [thread for thread in self._threads if thread not in broken]


class _TrackerThread(threading.Thread):
    """Calls a tracker, so that it holds up neither training nor the others, nor the end of the process.

    All calls are made in one thread, because MLflow keeps its state per thread.
    """

    def __init__(self, name: str, connect: Callable[[str], GeneralTracker]):
        super().__init__(name=name, daemon=True)
        self.problem: str | None = None  # why the tracker can no longer be used
        self._connect = connect
        self._calls: SimpleQueue[Callable[[GeneralTracker], Any]] = SimpleQueue()
        self.caught_up = threading.Event()
        self.start()

    def call(self, function: Callable[[GeneralTracker], Any]) -> None:
        """Call a function with the tracker, after the calls before."""
        self._calls.put(function)

    def mark(self) -> None:
        """Set `caught_up` after the calls before."""
        self.caught_up.clear()
        self.call(lambda _: self.caught_up.set())

    def run(self) -> None:
        try:
            tracker = self._connect(self.name)
            while self.problem is None:
                self._calls.get()(tracker)
        # Some libraries raise SystemExit.
        except BaseException as error:
            self.problem = f"{type(error).__name__}: {error}"
            self.caught_up.set()


class WeightsAndBiases(WandBTracker):  # type: ignore[misc]  # Accelerate has no types
    """The run of all starts, which trackers/wandb.json identifies: {"id": …, "last_step": the last number it has}.

    W&B ignores what is logged for earlier numbers. Steps that a restart repeats get the next ones, and charts are drawn
    over the training step.
    """

    def __init__(self, config: RecipeConfig, folder: RunFolder):
        folder.trackers_dir.mkdir(exist_ok=True)
        self._file = folder.trackers_dir / "wandb.json"
        known = read_object(self._file)
        self._id: str = known.get("id") or secrets.token_hex(16)
        self._last_number = int(known.get("last_step", -1))
        self._last_step = -1  # the training step that was shown under the last number
        self._write()
        # Otherwise its hook at the process's exit would wait for the network without a limit.
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", str(PATIENCE_SECONDS))
        settings, name = config.logging, config.logging.tracker_run_name or folder.path.name
        super().__init__(settings.tracker_project, name=name, id=self._id, resume="allow", dir=str(folder.trackers_dir))

    def start(self) -> None:
        super().start()
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, values: dict[str, float], step: int) -> None:
        """Show values at a number that is never less than the one before."""
        if step != self._last_step:
            self._last_step, self._last_number = step, max(step, self._last_number + 1)
            # Written before it is shown, so that a later start knows of it.
            self._write()
        super().log({**values, "step": step}, self._last_number)

    def _write(self) -> None:
        replace_json_file(self._file, {"id": self._id, "last_step": self._last_number})


def connect(name: str, config: RecipeConfig, folder: RunFolder, first_step: int) -> GeneralTracker:
    """Begin, or continue, a run in a tracker.

    Args:
        name: The tracker's name in the recipe.
        config: The recipe's config.
        folder: The run's folder, of which an attempt has begun.
        first_step: TensorBoard hides what was shown of later steps before.
    """
    tracker: GeneralTracker
    if name == "tensorboard":
        # It hides what earlier starts have shown of later steps.
        hidden = {"purge_step": first_step + 1} if first_step else {}
        tracker = TensorBoardTracker(folder.path.name, str(folder.tensorboard_dir), **hidden)
    elif name == "wandb":
        tracker = WeightsAndBiases(config, folder)
    else:
        tracker = LOGGER_TYPE_TO_CLASS[name](config.logging.tracker_project)
    tracker.start()
    # Trackers accept no lists or nulls.
    fields = flatten(as_json(config)).items()
    kinds = str | int | float
    tracker.store_init_configuration(
        {field: value if isinstance(value, kinds) else json.dumps(value) for field, value in fields}
    )
    return tracker
