"""TensorBoard and W&B, through Accelerate's classes: a view of the run, never its record.

In both, a run folder is one run across all its starts.
"""

import importlib.util
import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from accelerate.tracking import GeneralTracker, TensorBoardTracker, WandBTracker

from largebatch.config import RecipeConfig, as_json, flatten
from largebatch.errors import UserError
from largebatch.storage.files import replace_json_file
from largebatch.storage.layout import read_object
from largebatch.storage.run_folder import RunFolder

# How long W&B may wait for its server, in seconds: when it connects, and when it sends what is left, also at the
# process's exit.
TIME_LIMITS = {"WANDB_INIT_TIMEOUT": "30", "WANDB_FINISH_TIMEOUT": "60"}


def check_trackers(names: Sequence[str]) -> None:
    """Raise UserError for a tracker whose package is missing."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"logging.trackers: {name} is not installed; pip install {name}, or remove it there")


class Trackers:
    """Trackers of a run; one that fails is dropped with a warning.

    They are called where the run calls: TensorBoard writes to files, and W&B sends in threads of its own.

    Args:
        names: Their names in the recipe.
        config: The recipe's config.
        folder: The run's folder, of which an attempt has begun.
        first_step: Steps of earlier attempts. TensorBoard hides what was shown of later ones.
        say: Called with a warning for the user.
    """

    def __init__(
        self,
        names: Sequence[str],
        config: RecipeConfig,
        folder: RunFolder,
        first_step: int,
        say: Callable[[str], None],
    ):
        self._say = say
        self._trackers: dict[str, GeneralTracker] = {}
        # They connect before loader processes are forked.
        for name in names:
            with self._dropped_if_it_fails(name):
                tracker: GeneralTracker
                if name == "wandb":
                    tracker = WeightsAndBiases(config, folder)
                else:
                    tracker = TensorBoardTracker(
                        folder.path.name, str(folder.tensorboard_dir), purge_step=first_step + 1
                    )
                tracker.start()
                # Trackers accept no lists or nulls.
                kinds = str | int | float
                fields = flatten(as_json(config)).items()
                tracker.store_init_configuration(
                    {field: value if isinstance(value, kinds) else json.dumps(value) for field, value in fields}
                )
                self._trackers[name] = tracker

    def add(self, group: str, values: dict[str, float], step: int) -> None:
        """Show values by name."""
        named = {f"{group}/{name}": value for name, value in values.items()}
        for name, tracker in list(self._trackers.items()):
            with self._dropped_if_it_fails(name):
                tracker.log(named, step=step)

    def close(self) -> None:
        """End the run in each tracker, when it has shown all values."""
        for name, tracker in list(self._trackers.items()):
            with self._dropped_if_it_fails(name):
                tracker.finish()
        self._trackers.clear()

    @contextmanager
    def _dropped_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        # Some libraries raise SystemExit.
        except (Exception, SystemExit) as error:
            self._trackers.pop(name, None)
            problem = f"{type(error).__name__}: {error}"
            self._say(f"WARNING: {name} is dropped and gets no more values in this attempt: {problem}")


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
        super().__init__(
            config.logging.tracker_project,
            name=folder.path.name,
            id=self._id,
            resume="allow",
            dir=str(folder.trackers_dir),
        )

    def start(self) -> None:
        for variable, limit in TIME_LIMITS.items():
            os.environ.setdefault(variable, limit)
        super().start()
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, values: dict[str, float], step: int) -> None:
        """Show values at a number that is never less than the one before."""
        if step != self._last_step:
            self._last_step = step
            self._last_number = max(step, self._last_number + 1)
            # Written before it is shown, so that a later start knows of it.
            self._write()
        super().log({**values, "step": step}, self._last_number)

    def _write(self) -> None:
        replace_json_file(self._file, {"id": self._id, "last_step": self._last_number})
