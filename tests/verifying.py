"""What tests of `largebatch verify` share: tasks with a bug, the rows of a recipe, and the command."""

from pathlib import Path

import tasks
from largebatch.__main__ import main
from largebatch.config import load_config
from largebatch.tools.verify.verification import Combination, Row, Verification
from paths import ACCELERATE_CONFIGS, PYDOC

SGD = (
    '--optimizer={"name": "sgd", "weight_decay": 0.01, "momentum": 0.9, "nesterov": true, "clip_norm": null}',
    "--learning_rate.base_lr=0.1",
    "--learning_rate.warmup=null",
)


def verification_of(recipe: Path, overrides: tuple[str, ...], steps: int = 6) -> Verification:
    return Verification(load_config(recipe, overrides), recipe, overrides, ACCELERATE_CONFIGS, steps=steps)


def rows_of(recipe: Path, overrides: tuple[str, ...], *combinations: Combination, steps: int = 6) -> list[Row]:
    return list(verification_of(recipe, overrides, steps).rows(combinations))


def recipe_with(bug: str, folder: Path) -> Path:
    """The recipe of a user's own task: a copy of the shipped one, with a bug in its train.py."""
    script = tasks.copy("causal_lm", folder) / "train.py"
    script.write_text(f"{bug}\n{script.read_text()}")
    return script.with_name(PYDOC.name)


def verify(capfd, *words: str) -> tuple[int, str, str]:
    """Exit code, output and errors of the command, whose jobs are forked from the server of the other tests."""
    capfd.readouterr()
    tasks.link_accelerate_configs()
    code = main(["verify", *words])
    return code, *capfd.readouterr()
