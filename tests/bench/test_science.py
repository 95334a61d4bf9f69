"""bench/science: every run is a valid recipe, an interrupted program continues, and what its numbers allow to say."""

import json

import pytest

from experiments import EXPERIMENTS
from largebatch.config import load_config
from largebatch.plan import resolve
from runs import Result, make_runs, matrix, overrides_of, read_results, sweep


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_run_is_a_valid_recipe(name):
    experiment = EXPERIMENTS[name]
    for point in matrix(experiment, experiment.base_lrs[0], [3]):
        plan = resolve(load_config(experiment.recipe, overrides_of(experiment, point)), world_size=1)
        assert (plan.max_global_batch_size, plan.seed, plan.learning_rate.reference_batch_size) == (
            point.batch,
            3,
            experiment.reference,
        )
        # BatchNorm's micro-batch, Goyal's n, is the same at every batch size.
        assert plan.micro_batch_size <= experiment.reference


def test_an_interrupted_program_continues(tmp_path, monkeypatch):
    made = []

    def pretend(_, point, __):
        made.append(point)
        return Result(point, 0.25, diverged=False, seconds=1.0)

    monkeypatch.setattr("runs.make_run", pretend)
    digits = EXPERIMENTS["goyal_digits"]
    file, points = tmp_path / "results.jsonl", sweep(digits, range(2))
    line = json.dumps({"point": vars(points[0]), "value": 0.5, "diverged": False, "seconds": 2.0})
    file.write_text(line + '\n{"point": {"rule": "any", "ba')  # cut short by a kill
    assert len(list(make_runs(digits, points, file, (), jobs=2))) == len(points) - 1
    assert points[0] not in made
    assert read_results(file).keys() == set(points)
