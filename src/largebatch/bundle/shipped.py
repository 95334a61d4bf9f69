"""Where the recipes are that this installation has, with their scripts and configs."""

from pathlib import Path

import largebatch
from largebatch.errors import UserError
from largebatch.spelling import did_you_mean

PACKAGE = Path(largebatch.__file__).parent


def shipped_folder() -> Path:
    """The folder of recipes/, slurm/ and ds_configs/: in the package where a wheel has put them (setup.py), and at the
    top of the checkout elsewhere.

    Raises:
        UserError: There are none.
    """
    for folder in (PACKAGE / "shipped", PACKAGE.parent.parent):
        if (folder / "recipes").is_dir():
            return folder
    raise UserError(f"{PACKAGE} has no recipes: install largebatch from its wheel, or from a whole checkout")


def find_recipe(name: str) -> Path:
    """The JSON file of a shipped recipe.

    Args:
        name: Such as gpt2_124m or causal_lm/gpt2_124m.

    Raises:
        UserError: There is none of that name.
    """
    task, _, stem = name.removesuffix(".json").rpartition("/")
    recipes = {path.stem: path for path in shipped_folder().glob("recipes/*/*.json")}
    if stem in recipes and task in ("", recipes[stem].parent.name):
        return recipes[stem]
    raise UserError(f"--recipe {name}: no such recipe{_choices(stem, sorted(recipes))}")


def find_accelerate_config(strategy: str) -> Path:
    """The Accelerate config of a strategy.

    Raises:
        UserError: There is none of that name.
    """
    configs = {path.stem: path for path in shipped_folder().glob("recipes/accelerate_configs/*.yaml")}
    if strategy in configs:
        return configs[strategy]
    raise UserError(f"--strategy {strategy}: no such strategy{_choices(strategy, sorted(configs))}")


def _choices(name: str, known: list[str]) -> str:
    return f"{did_you_mean(name, known)}; write one of {', '.join(known)}"
