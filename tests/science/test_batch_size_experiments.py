"""bench/science: which runs are made, going on after an interruption, and what their numbers allow to say."""

import json
from dataclasses import replace

import pytest

from experiments import EXPERIMENTS, Ordering
from largebatch.config import load_config
from largebatch.plan import resolve
from report import summary, table
from runs import ANY_RULE, Point, Result, make_runs, matrix, overrides_of, read_results, sweep
from verdicts import Cell, best_base_lr, cells_of, flat_up_to, verdict, verdicts

DIGITS = EXPERIMENTS["goyal_digits"]
GRADUAL, NONE, CONSTANT, SQRT, UNSCALED = DIGITS.rules


def test_which_runs_are_made():
    assert sweep(DIGITS, range(2))[:3] == [
        Point("any", 16, 0.0125, 0),
        Point("any", 16, 0.0125, 1),
        Point("any", 16, 0.025, 0),
    ]
    points = matrix(replace(DIGITS, batches=(16, 64)), 0.05, [7])
    assert points == [Point("any", 16, 0.05, 7), *(Point(rule, 64, 0.05, 7) for rule in DIGITS.rules)]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_run_is_a_valid_recipe(name):
    experiment = EXPERIMENTS[name]
    for point in matrix(experiment, experiment.base_lrs[0], [3]):
        plan = resolve(load_config(experiment.recipe, overrides_of(experiment, point)), world_size=1)
        assert (plan.global_batch_size, plan.seed, plan.reference_batch_size) == (point.batch, 3, experiment.reference)
        # BatchNorm's micro-batch, Goyal's n, is the same at every batch size.
        assert plan.micro_batch_size <= experiment.reference
    for ordering in experiment.orderings:
        assert {ordering.lower, ordering.higher} <= experiment.rules.keys()
        assert ordering.batch in experiment.batches


def test_learning_rates_of_the_rules():
    """At 512, 32 times the reference batch of 16: two steps an epoch, and five epochs of warmup."""
    rates = {}
    for rule in DIGITS.rules:
        plan = resolve(load_config(DIGITS.recipe, overrides_of(DIGITS, Point(rule, 512, 0.01, 0))), world_size=1)
        rates[rule] = (plan.lr_at(0), plan.peak_lr, plan.schedule.warmup // 512)
    assert rates[GRADUAL] == pytest.approx((0.01, 0.32, 10))
    assert rates[NONE] == pytest.approx((0.32, 0.32, 0))
    assert rates[CONSTANT] == pytest.approx((0.01, 0.32, 10))
    assert rates[SQRT] == pytest.approx((0.01, 0.01 * 32**0.5, 10))
    assert rates[UNSCALED] == pytest.approx((0.01, 0.01, 0))


def test_an_interrupted_program_goes_on(tmp_path, monkeypatch):
    made = []

    def pretend(_, point, __):
        made.append(point)
        return Result(point, 0.25, diverged=False, seconds=1.0)

    monkeypatch.setattr("runs.make_run", pretend)
    file, points = tmp_path / "results.jsonl", sweep(DIGITS, range(2))
    file.write_text(json.dumps({"point": vars(points[0]), "value": 0.5, "diverged": False, "seconds": 2.0}) + "\n")
    with file.open("a") as lines:
        lines.write('{"point": {"rule": "any", "ba')  # cut short by a kill
    assert len(list(make_runs(DIGITS, points, file, (), jobs=2))) == len(points) - 1
    assert points[0] not in made
    results = read_results(file)
    assert results.keys() == set(points)
    assert results[points[0]].value == 0.5
    assert list(make_runs(DIGITS, points, file, (), jobs=2)) == []


@pytest.mark.slow
def test_a_real_run_and_one_that_diverges(tmp_path):
    words = ("--train.stop_after_steps=2", "--data.num_workers=0")
    small = replace(DIGITS, overrides=(*DIGITS.overrides, '--evaluation.every={"steps": 1}'), last=2)
    (result,) = make_runs(small, [Point(ANY_RULE, 16, 0.01, 0)], tmp_path / "a.jsonl", words, jobs=1)
    assert 0.5 < result.value < 1
    assert not result.diverged
    (result,) = make_runs(small, [Point(ANY_RULE, 16, 1e11, 0)], tmp_path / "b.jsonl", ("--logging.every=1",), jobs=1)
    assert (result.value, result.diverged) == (0.9, True)


def test_mean_and_deviation():
    cell = Cell((0.1, 0.2, 0.3))
    assert (cell.mean, cell.std) == (pytest.approx(0.2), pytest.approx(0.1))
    assert Cell((0.1,)).std == 0


@pytest.mark.parametrize(
    ("lower", "higher", "found"),
    [
        ((0.10, 0.12), (0.20, 0.22), "holds"),
        ((0.20, 0.22), (0.10, 0.12), "does not hold"),
        ((0.10, 0.20), (0.14, 0.24), "cannot be told"),
        ((0.1, 0.1), (0.1, 0.1), "cannot be told"),
        ((0.1,), (0.9,), "cannot be told"),
        # The difference 0.1 is 1.99 and 2.01 standard errors of sqrt(2 d**2 / 2) = d.
        ((0.0, 2**0.5 * 0.1 / 1.99), (0.1, 0.1 + 2**0.5 * 0.1 / 1.99), "cannot be told"),
        ((0.0, 2**0.5 * 0.1 / 2.01), (0.1, 0.1 + 2**0.5 * 0.1 / 2.01), "holds"),
    ],
)
def test_verdicts_on_planted_numbers(lower, higher, found):
    assert verdict(Cell(lower), Cell(higher)) == found


def results_of(values: dict[tuple[str, int], tuple[float, ...]], base_lr: float = 0.05) -> list[Result]:
    return [
        Result(Point(rule, batch, base_lr, seed), value, diverged=value == 0.9, seconds=1.0)
        for (rule, batch), found in values.items()
        for seed, value in enumerate(found)
    ]


def test_tables_of_recorded_results():
    values = {
        (ANY_RULE, 16): (0.02, 0.04),
        (GRADUAL, 32): (0.03, 0.03),
        (GRADUAL, 512): (0.10, 0.12),
        (NONE, 512): (0.20, 0.9),
        (UNSCALED, 512): (0.40, 0.42),
    }
    results = results_of(values) + results_of({(GRADUAL, 32): (0.5,)}, base_lr=0.1)
    cells = cells_of(results, DIGITS, base_lr=0.05)
    lines = table(cells, DIGITS).splitlines()
    assert lines[0] == "| rule | 16 | 32 | 512 |"
    assert lines[2] == f"| {GRADUAL} | 3.0 ± 1.4 | 3.0 ± 0.0 | 11.0 ± 1.4 |"
    assert lines[3] == f"| {NONE} | 3.0 ± 1.4 |  | 55.0 ± 49.5 (1 of 2 diverged) |"
    assert flat_up_to(cells, replace(DIGITS, batches=(16, 32, 512)), GRADUAL) == 32
    assert [found for *_, found in verdicts(cells, DIGITS.orderings)] == ["cannot be told", "holds"]
    text = summary("x", cells, DIGITS, ["settings"])
    assert (
        f"| {GRADUAL} | {UNSCALED} | 512 | 23.74 against 41.67, table 2a | 11.0 ± 1.4 against 41.0 ± 1.4: **holds** |"
        in text
    )
    assert "over 2 seeds: test error in per cent, median of the last 5 evaluations" in text


def test_the_base_rate_is_the_one_with_the_lowest_mean_at_the_reference():
    results = [*results_of({(ANY_RULE, 16): (0.05, 0.01)}, 0.05), *results_of({(ANY_RULE, 16): (0.02, 0.02)}, 0.1)]
    results += results_of({(GRADUAL, 512): (0.0, 0.0)}, 0.2)
    assert best_base_lr({result.point: result for result in results}, DIGITS) == 0.1


def test_an_ordering_without_its_runs_is_left_out():
    cells = {(GRADUAL, 512): Cell((0.1, 0.1))}
    assert verdicts(cells, [Ordering(GRADUAL, NONE, 512, "")]) == []
