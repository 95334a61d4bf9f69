"""The published figure of a recipe: which runs are inside, what removes it, and where it is shown."""

import json

import numpy as np
import pytest
from scipy.special import stdtrit

from largebatch.__main__ import main
from largebatch.config import as_json, load_config
from largebatch.config.differences import differences
from largebatch.errors import ConfigError
from largebatch.plan import RunPlan, explain, resolve
from largebatch.plan.expected import compare, range_of
from largebatch.storage.files import read_json_lines
from paths import DIGITS, IMAGENET
from reading_reports import Page
from run_folders import write_run

FIGURE = {"metric": "accuracy", "value": 0.95, "spread": 0.01, "seeds": 5, "after": {"epochs": 20}, "source": "a paper"}
TARGET = FIGURE | {"after": {"epochs": 10}, "spread": 0.5, "reached": "at_least"}


def config_with(expected):
    return load_config(DIGITS, ["--expected", json.dumps(expected)])


def plan_with(expected):
    return resolve(config_with(expected), 2)


def evaluations(plan, accuracies):
    """A line after each epoch."""
    steps = plan.total_steps // 20
    return [{"step": steps * number, "accuracy": each} for number, each in enumerate(accuracies, 1)]


def test_the_quantiles_are_those_of_scipy():
    expected = plan_with(FIGURE).expected
    for seeds in (*range(2, 40), 100, 10**6):
        low, high = range_of(expected.model_copy(update={"seeds": seeds}))
        margin = stdtrit(seeds - 1, 0.975) * 0.01 * np.sqrt(1 + 1 / seeds)
        assert (high - low) / 2 == pytest.approx(margin, rel=2e-3), seeds


def test_a_value_after_some_epochs():
    plan = plan_with(FIGURE)
    low, high = range_of(plan.expected)
    for last, verdict in ((0.95, "inside"), (low - 1e-4, "outside"), (high + 1e-4, "outside")):
        figure = compare(plan, evaluations(plan, [0.95] * 19 + [last]))
        assert (figure.found, figure.verdict) == (last, verdict)
    # What was measured before is not compared, nor are other numbers.
    figure = compare(plan, [*evaluations(plan, [0.95] * 19), {"step": plan.total_steps, "loss": 0.1}])
    assert (figure.found, figure.verdict) == (None, "unknown")


def test_when_a_target_was_reached():
    plan = plan_with(TARGET)
    assert range_of(plan.expected) == pytest.approx((10 - 1.52, 10 + 1.52), abs=0.01)
    for first, verdict in ((8, "outside"), (9, "inside"), (11, "inside"), (12, "outside")):
        figure = compare(plan, evaluations(plan, [0.9] * (first - 1) + [0.95, 0.94, 0.94]))
        assert (figure.found, figure.verdict) == (first, verdict)
    never = [compare(plan, evaluations(plan, [0.9] * epochs)) for epochs in (0, 11, 12)]
    assert [(each.found, each.verdict) for each in never] == [(None, "unknown"), (None, "unknown"), (None, "outside")]
    at_most = plan_with(TARGET | {"reached": "at_most", "value": 0.5})
    assert compare(at_most, evaluations(at_most, [0.9] * 9 + [0.4])).verdict == "inside"


def test_one_seed_has_no_range():
    plan = plan_with(FIGURE | {"seeds": 1, "spread": 0.0})
    figure = compare(plan, evaluations(plan, [0.9] * 20))
    assert (figure.found, figure.low, figure.verdict) == (0.9, None, "unknown")
    assert "of one seed, no range is known" in str(figure)


def test_a_recipe_without_a_figure():
    plan = plan_with(None)
    assert compare(plan, evaluations(plan, [0.9] * 20)) is None
    assert "Expected" not in explain(plan, "")


def test_the_plan_shows_it_and_keeps_it_in_json():
    plan = plan_with(FIGURE)
    shown = explain(plan, "").partition("Expected")[2]
    assert "accuracy 0.95 ± 0.01 after 20 epochs: mean and standard deviation of 5 seeds" in shown
    assert "published in a paper" in shown
    assert RunPlan.from_json(plan.to_json()) == plan
    assert "accuracy at least 0.95 first after 10 ± 0.5 epochs" in explain(plan_with(TARGET), "")


@pytest.mark.parametrize(
    ("overrides", "stays"),
    [
        ("", True),
        ("--seed=3", True),
        ("--logging.every=3 --evaluation.every=null --compute.compile=off", True),
        ("--batch.global_batch_size=4096 --expected.value=0.9", True),
        ("--batch.global_batch_size=4096", False),
        ("--optimizer.weight_decay=0.1", False),
        ("--evaluation.max_samples=100", False),
        # BatchNorm's statistics are part of the loss.
        ("--batch.micro_batch_size=8", False),
    ],
)
def test_other_settings_have_no_figure(overrides, stays):
    assert (load_config(IMAGENET, overrides.split()).expected is not None) == stays


def test_another_place_of_the_same_data_keeps_it():
    words = ["--data.path=parquet", "--data.eval_split=validation"]
    words.append('--data.data_files={"train": "train-*", "eval": "val-*"}')
    assert load_config(IMAGENET, words).expected == load_config(IMAGENET).expected is not None


@pytest.mark.parametrize("wrong", [{"seeds": 0}, {"after": {"tokens": 5}}])
def test_wrong_figures(wrong):
    """No seed, and tokens of data that has none."""
    (name,) = wrong
    with pytest.raises(ConfigError, match=rf"expected\.{name}"):
        config_with(FIGURE | wrong)


def test_a_figure_may_be_added_to_an_unfinished_run():
    assert differences(as_json(load_config(DIGITS)), config_with(FIGURE)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("figure", [FIGURE, TARGET])
def test_the_report_says_where_the_run_is(run_dir, figure):
    plan = write_run(run_dir, ("--expected", json.dumps(figure)), steps=range(50, 441, 10))
    assert main(["report", str(run_dir)]) == 0
    page = Page(run_dir / "report.html")
    assert str(compare(plan, read_json_lines(run_dir / "evaluations.jsonl"))) in page.text
