"""What README and docs show is what the commands print."""

import json
import re
import shlex

import pytest

from jobs import run_job
from largebatch.__main__ import main
from largebatch.task_folders import import_from
from largebatch.tools.verify.differences import read_run
from paths import ROOT

README, RECIPE_TABLE, STRATEGY_PAGE = (
    (ROOT / name).read_text() for name in ("README.md", "docs/recipes.md", "docs/strategies.md")
)
ON_H100S = ("--gpu", "h100", "--network", "400G/gpu")


def shown_outputs():
    """Each `largebatch plan` of the README and of the page on strategies with the output below it."""
    shown = r"(?ms)^```console\n\$ (largebatch plan.*?)\n(.*?)^```$"
    return [each for page in (README, STRATEGY_PAGE) for each in re.findall(shown, page)]


@pytest.mark.parametrize(("command", "output"), shown_outputs())
def test_shown_output_is_the_real_one(command, output, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    main(shlex.split(command)[1:])
    printed = capsys.readouterr()
    text = printed.out + printed.err
    if "…" not in output:
        assert text == output
        return
    # Of an excerpt, all lines in their order.
    lines = iter(text.splitlines())
    assert [line for line in output.splitlines() if line != "…" and line not in lines] == []


def test_gpu_hours_are_those_of_the_plan(monkeypatch, capsys):
    """Steps, and the product, of each row; the seconds of a step of one, which takes seconds to estimate."""
    monkeypatch.chdir(ROOT)
    rows = re.findall(
        r"(?m)^\| `(\w+)` \| (\d+) x `(\w+)`, \w+ \| ([\d,]+) \| (\S+) to (\S+) \| (\S+) to (\S+) \|$", RECIPE_TABLE
    )
    assert len(rows) == 15
    for name, processes, strategy, steps, *estimates in rows:
        assert main(["plan", name, "--world-size", processes, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["total_steps"] == int(steps.replace(",", ""))
        seconds = estimates[:2]
        hours = [float(each.replace(",", "")) for each in estimates[2:]]
        in_total = [float(each) * int(processes) * int(steps.replace(",", "")) / 3600 for each in seconds]
        assert hours == pytest.approx(in_total, rel=0.05)
        if name == "gpt2_124m":
            main(["plan", name, "--world-sizes", processes, *ON_H100S])
            assert re.search(rf"(?m)^  {strategy} .* {' to '.join(seconds)} ", capsys.readouterr().out)


def run_the_loop_that_is_shown(run_dir):
    """With what the recipe's script has, but for its loop."""
    recipe = ROOT / "recipes/causal_lm/gpt_pydoc.json"
    tiny = ("--model.num_layers=1", "--model.hidden_size=16", "--data.block_size=16", "--train.stop_after_steps=3")
    words = ["--config", str(recipe), "--run-dir", str(run_dir), "--logging.trackers=[]", *tiny]
    names = vars(import_from(recipe.parent, "train"))

    def evaluate_batch(batch):
        return {"tokens": batch["labels"].shape[1] * names["torch"].ones(len(batch["labels"]))}

    code = README.split("```python\n")[1].split("```")[0]
    with names["from_command_line"](names["Config"], words) as (config, options):
        exec(code, names | {"evaluate_batch": evaluate_batch, "config": config, "options": options})


@pytest.mark.slow
def test_the_loop_that_is_shown_trains(run_dir):
    run_job(run_the_loop_that_is_shown, run_dir)
    assert read_run(run_dir).evaluations[-1]["tokens"] == 16
    assert len(read_run(run_dir).weights) > 5
