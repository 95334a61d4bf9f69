"""TensorBoard and other trackers, through Accelerate: a view of the run, never its record."""

import importlib.util
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from accelerate import Accelerator

from largebatch.config import RecipeConfig, as_json, flatten
from largebatch.errors import UserError

SECONDS_UNTIL_SHOWN = 1.0


def check_trackers(names: Sequence[str]) -> None:
    """Raise UserError for a tracker whose package is missing; Accelerate would silently skip it."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"logging.trackers: {name} is not installed; pip install {name}, or remove it")


class Trackers:
    """The trackers with which the accelerator was started; what they show of steps after `first_step` is hidden."""

    def __init__(
        self, accelerator: Accelerator, config: RecipeConfig, run_name: str, first_step: int, say: Callable[[str], None]
    ):
        self._accelerator = accelerator
        self._say = say
        self._pending: list[tuple[dict[str, float], int, float]] = []
        self._flushed = -math.inf
        # Trackers accept no lists and nulls.
        fields = {
            name: value if isinstance(value, str | int | float) else json.dumps(value)
            for name, value in flatten(as_json(config)).items()
        }
        options = {"tensorboard": {"purge_step": first_step + 1}} if first_step else {}
        accelerator.init_trackers(run_name, config=fields, init_kwargs=options)

    def add(self, group: str, values: dict[str, float], step: int) -> None:
        """Show values by name, within a second or with the next ones."""
        if not self._accelerator.trackers or not self._accelerator.is_main_process:
            return
        self._pending.append(({f"{group}/{name}": value for name, value in values.items()}, step, time.time()))
        if time.monotonic() - self._flushed >= SECONDS_UNTIL_SHOWN:
            self.flush()

    def flush(self) -> None:
        """Show values that are still waiting; trackers that cannot be written are dropped with a warning."""
        pending, self._pending = self._pending, []
        self._flushed = time.monotonic()
        try:
            for tracker in self._accelerator.trackers if pending else []:
                if tracker.name == "tensorboard":
                    _add_to_tensorboard(tracker.tracker, pending)
                else:
                    for values, step, _ in pending:
                        tracker.log(values, step=step)
        except OSError as error:
            self._say(f"WARNING: the trackers cannot be written: {error}; they get no more values in this attempt")
            self._accelerator.trackers = []


def _add_to_tensorboard(writer: Any, pending: Sequence[tuple[dict[str, float], int, float]]) -> None:
    """As Accelerate does, but with one record for all values of a step, and without waiting for the disk each time."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    for values, step, seconds in pending:
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        writer.file_writer.add_summary(summary, step, seconds)
    writer.flush()
