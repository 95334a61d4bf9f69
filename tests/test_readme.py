"""What README and docs show is what the commands print, and every recipe and strategy has its row."""

import shlex
import sys

import pytest

from jobs import run_job
from largebatch.task_folders import import_from
from largebatch.tools.command_line import main
from largebatch.tools.verify.differences import read_run
from largebatch.tools.verify.table import HEADER
from paths import RECIPES, ROOT, STRATEGIES

README, RECIPE_TABLE, STRATEGY_PAGE = (
    (ROOT / name).read_text() for name in ("README.md", "docs/recipes.md", "docs/strategies.md")
)


def shown_outputs() -> list[tuple[str, str]]:
    """Each `largebatch plan` of the README and of the page on strategies with the output below it."""
    blocks = [block.split("```")[0] for page in (README, STRATEGY_PAGE) for block in page.split("```console\n")[1:]]
    shown = [block.removeprefix("$ ").split("\n", 1) for block in blocks if block.startswith("$ largebatch plan")]
    return [(command, output) for command, output in shown]


@pytest.mark.parametrize(("command", "output"), shown_outputs())
def test_shown_output_is_the_real_one(command, output, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    main(shlex.split(command)[1:])
    printed = capsys.readouterr()
    assert printed.out + printed.err == output


def test_the_table_of_verify_has_the_columns_that_are_printed():
    assert HEADER in README.splitlines()


def run_the_loop_that_is_shown(run_dir):
    """With what the recipe's script has, but for its loop."""
    recipe = ROOT / "recipes/causal_lm/gpt_pydoc.json"
    tiny = ("--model.num_layers=1", "--model.hidden_size=16", "--data.block_size=16", "--train.stop_after_steps=3")
    sys.argv = ["train.py", "--config", str(recipe), "--run-dir", str(run_dir), "--logging.trackers=[]", *tiny]
    names = vars(import_from(recipe.parent, "train"))

    def evaluate_batch(batch):
        return {"tokens": batch["labels"].shape[1] * names["torch"].ones(len(batch["labels"]))}

    (code,) = (block.split("```")[0] for block in README.split("```python\n")[1:])
    exec(code, names | {"evaluate_batch": evaluate_batch})


@pytest.mark.slow
def test_the_loop_that_is_shown_trains(tmp_path):
    run_job(run_the_loop_that_is_shown, tmp_path / "run")
    assert read_run(tmp_path / "run").evaluations[-1]["tokens"] == 16
    assert len(read_run(tmp_path / "run").weights) > 5


def test_every_recipe_and_strategy_has_its_row():
    for recipe in RECIPES:
        assert f"\n| [`{recipe.parent.name}/{recipe.stem}`](" in RECIPE_TABLE
        assert f"\n| `{recipe.name}` |" in (recipe.parent / "README.md").read_text()
    configs = {path.stem for path in ROOT.glob("recipes/accelerate_configs/*.yaml")}
    assert configs == {*STRATEGIES, "zero3_offload"}
    for strategy in configs:
        assert f"\n| `{strategy}` | `{strategy}.yaml` |" in README
