"""TensorBoard and other trackers, through Accelerate: a view of the run, never its record."""

import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator

from largebatch.config import RecipeConfig, as_json, flatten
from largebatch.errors import UserError

SECONDS_UNTIL_SHOWN = 2  # TensorBoard's own thread writes that often


def check_trackers(names: Sequence[str]) -> None:
    """Refuse a tracker whose package is missing; Accelerate leaves it out.

    Raises:
        UserError: One is missing.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"logging.trackers: {name} is not installed; pip install {name}, or leave it out")


class Trackers:
    """The trackers that the recipe names.

    Args:
        accelerator: Has been started with their names.
        config: What they show of the recipe.
        run_name: What they call the run.
        first_step: What an interrupted attempt has shown of later steps is hidden.
        say: Shows a warning.
    """

    def __init__(
        self, accelerator: Accelerator, config: RecipeConfig, run_name: str, first_step: int, say: Callable[[str], None]
    ):
        self._accelerator = accelerator
        self._say = say
        self._shown = accelerator.is_main_process
        # They take no lists and nulls.
        fields = {
            name: value if isinstance(value, str | int | float) else json.dumps(value)
            for name, value in flatten(as_json(config)).items()
        }
        options: dict[str, Any] = {"flush_secs": SECONDS_UNTIL_SHOWN}
        if first_step:
            options["purge_step"] = first_step + 1
        accelerator.init_trackers(run_name, config=fields, init_kwargs={"tensorboard": options})

    def add(self, group: str, values: dict[str, float], step: int) -> None:
        """Show values by name; a tracker that cannot be written is given up with a warning."""
        if not self._shown:
            return
        named = {f"{group}/{name}": value for name, value in values.items()}
        with self._given_up_on_errors():
            for tracker in self._accelerator.trackers:
                if tracker.name == "tensorboard":
                    self._add_to_tensorboard(tracker.tracker, named, step)
                else:
                    tracker.log(named, step=step)

    def flush(self) -> None:
        """Write what TensorBoard's thread has not written yet; to be called before the end."""
        with self._given_up_on_errors():
            for tracker in self._accelerator.trackers if self._shown else []:
                if tracker.name == "tensorboard":
                    tracker.tracker.flush()

    @contextmanager
    def _given_up_on_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._say(f"WARNING: the trackers cannot be written: {error}; they get no more numbers of this attempt")
            self._accelerator.trackers = []

    def _add_to_tensorboard(self, writer: Any, values: dict[str, float], step: int) -> None:
        """As Accelerate does, but for waiting until all is written, and with one record for all values."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        writer.file_writer.add_summary(summary, step)
