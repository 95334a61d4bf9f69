"""TensorBoard and other trackers, through Accelerate: a view of the run, never its record."""

import importlib.util
import json
from collections.abc import Callable, Sequence

from accelerate import Accelerator

from largebatch.config import RecipeConfig, as_json, flatten
from largebatch.errors import UserError


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
        # They take no lists and nulls.
        fields = {
            name: value if isinstance(value, str | int | float) else json.dumps(value)
            for name, value in flatten(as_json(config)).items()
        }
        options = {"tensorboard": {"purge_step": first_step + 1}} if first_step else {}
        accelerator.init_trackers(run_name, config=fields, init_kwargs=options)

    def add(self, group: str, values: dict[str, float], step: int) -> None:
        """Show values by name; a tracker that cannot be written is given up with a warning."""
        try:
            self._accelerator.log({f"{group}/{name}": value for name, value in values.items()}, step=step)
        except OSError as error:
            self._say(f"WARNING: the trackers cannot be written: {error}; they get no more numbers of this attempt")
            self._accelerator.trackers = []
