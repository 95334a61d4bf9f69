"""bench/science: every run is a valid recipe, an interrupted program continues, and what its numbers allow to say."""

import json
import re
from argparse import Namespace
from shutil import rmtree

import pytest

from ending_files import end_run
from experiments import EXPERIMENTS
from largebatch.config import load_config
from largebatch.errors import UserError
from largebatch.plan import resolve
from largebatch.tools.sweep.points import RATE
from largebatch.tools.sweep.results import Results
from runs import Result, matrix, overrides_of, read_results, train, tuning

DIVERGING = 0.2  # the largest base learning rate of goyal_digits


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_run_is_a_valid_recipe(name):
    experiment = EXPERIMENTS[name]
    rates = set()
    for point in matrix(experiment, experiment.base_lrs[0], [3]):
        plan = resolve(load_config(experiment.recipe, overrides_of(experiment, point)), world_size=1)
        assert (plan.max_global_batch_size, plan.seed, plan.learning_rate.reference_batch_size) == (
            point.batch,
            3,
            experiment.reference,
        )
        # BatchNorm's micro-batch, Goyal's n, is the same at every batch size.
        assert plan.micro_batch_size <= experiment.reference
        rates.add((point.batch, repr(plan.learning_rate)))
    # At the reference all rules are one; elsewhere no two are the same.
    assert len(rates) == 1 + (len(experiment.batches) - 1) * len(experiment.rules)


class Trainer:
    """Takes the place of training, and writes what is read of a run."""

    def __init__(self):
        self.trained = []
        self.limit = None  # the runs after which Ctrl-C is pressed
        self.failing = set()

    def __call__(self, _, points, folder, *__):
        for point in points:
            if len(self.trained) == self.limit:
                raise KeyboardInterrupt
            self.trained.append(point.name)
            run_dir = folder / point.name
            run_dir.mkdir(exist_ok=True)
            (run_dir / "plan.json").touch()
            kind = "training" if point.settings[RATE] == DIVERGING else "finished"
            end_run(run_dir, "files" if point.name in self.failing else kind)
            evaluations = [{"step": step, "accuracy": step**2 / 100} for step in range(10)]
            (run_dir / "evaluations.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in evaluations))


def test_the_same_command_continues_and_trains_nothing_twice(tmp_path, monkeypatch):
    digits = EXPERIMENTS["goyal_digits"]
    recorded, *missing = points = tuning(digits, range(2))
    file, trainer = tmp_path / "results.jsonl", Trainer()
    line = json.dumps({"point": vars(recorded), "value": 0.5, "diverged": False, "seconds": 2.0})
    file.write_text(line + '\n{"point": {"rule": "any", "ba')  # cut short by a kill
    options = Namespace(num_processes=1, max_parallel=1, slurm=False, dry_run=False)
    monkeypatch.setattr("largebatch.tools.sweep.start._train_here", trainer)

    def command(points, *words):
        train(digits, points, file, tmp_path / "runs", list(words), options)

    trainer.limit = 3
    with pytest.raises(KeyboardInterrupt):
        command(points)
    trainer.limit, trainer.failing = None, {missing[-1].name}
    with pytest.raises(UserError, match=f"not finished: {re.escape(missing[-1].name)};"):
        command(points)
    assert sorted(trainer.trained) == sorted(point.name for point in missing)
    assert read_results(file).keys() == {*points[:-1]}
    trainer.failing.clear()
    trainer.trained.clear()
    command(points)
    assert trainer.trained == [missing[-1].name]
    results = read_results(file)
    assert results == {
        point: Result(point, 0.9, diverged=True) if point.base_lr == DIVERGING else Result(point, 0.51, diverged=False)
        for point in points
    } | {recorded: Result(recorded, 0.5, diverged=False)}
    assert file.read_text().splitlines()[0] == line
    assert len(file.read_text().splitlines()) == len(points)

    trainer.trained.clear()
    more = matrix(digits, 0.05, range(3))
    with pytest.raises(UserError, match="holds a sweep with other points"):
        command([*points, *more], "--train.stop_after_steps=2")
    command(more)
    assert sorted(trainer.trained) == sorted(point.name for point in more if point not in points)
    assert read_results(file).keys() == {*points, *more}
    # `largebatch report` has all seeds in one row.
    names = [group.name for group in Results.read(tmp_path / "runs").groups]
    assert len(set(names)) == len(names)
    # What is recorded needs no runs.
    rmtree(tmp_path / "runs")
    command(more)
    assert not (tmp_path / "runs").exists()
