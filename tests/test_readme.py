"""What the README shows is what the commands print, and the recipes it names are the ones there are."""

import shlex
import subprocess
import sys

import pytest

from largebatch.cli.verify import COLUMNS, LINE
from paths import RECIPES, ROOT, STRATEGIES

README = (ROOT / "README.md").read_text()


def shown_outputs() -> list[tuple[str, str]]:
    """Each `largebatch plan` of the README with the output below it."""
    blocks = [block.split("```")[0] for block in README.split("```console\n")[1:]]
    shown = [block.removeprefix("$ ").split("\n", 1) for block in blocks if block.startswith("$ largebatch plan")]
    return [(command, output) for command, output in shown]


def test_the_readme_shows_a_plan_and_an_error():
    assert len(shown_outputs()) == 2


@pytest.mark.parametrize(("command", "output"), shown_outputs())
def test_shown_output_is_the_real_one(command, output):
    words = [sys.executable, "-m", *shlex.split(command)]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stdout + result.stderr == output


def test_the_table_of_verify_has_the_columns_that_are_printed():
    assert LINE.format(*COLUMNS) in README.splitlines()


def test_every_recipe_and_strategy_has_its_row():
    for recipe in RECIPES:
        assert f"[`{recipe.parent.name}/{recipe.stem}`]" in README
        assert f"`{recipe.name}`" in (recipe.parent / "README.md").read_text()
    configs = {path.stem for path in ROOT.glob("recipes/accelerate_configs/*.yaml")}
    assert configs == set(STRATEGIES)
    for strategy in STRATEGIES:
        assert f"| `{strategy}` | `{strategy}.yaml` |" in README
