"""What is wrong with a recipe, as its reader is told."""

import pytest

from largebatch.config import load_config
from largebatch.errors import ConfigError
from paths import PYDOC


def problems_of(*overrides: str, recipe=PYDOC, task=None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, overrides, task)
    return caught.value.problems


def problem_of(*overrides: str, recipe=PYDOC) -> str:
    (problem,) = problems_of(*overrides, recipe=recipe)
    return problem
