"""The best evaluation's checkpoint: which one it is, and that it is there whatever happens."""

import pytest
from test_every_step_of_a_save import DIED, NEW, OLD, interruption, save_interrupted

from jobs import train, train_in_job
from largebatch.config import load_config
from largebatch.config.sections import KeepBest
from largebatch.run.checkpoint.best import Best
from largebatch.storage.files import read_json_lines
from largebatch.storage.layout import BestEvaluation, read_object
from largebatch.storage.run_folder import RunFolder
from paths import PYDOC
from problems import problem_of
from processes import forked
from resuming import TINY_GPT
from saving import FakeRun, usable


def found(best, values):
    """The steps, from 1, whose values are better than all before."""
    return [step for step, value in enumerate(values, 1) if best.is_found(step, {"loss": value})]


@pytest.mark.parametrize(("mode", "steps"), [("min", [1, 3, 6]), ("max", [1, 2, 5])])
def test_better_than_all_before(mode, steps):
    best = Best(KeepBest(mode=mode), None)
    assert found(best, [3.0, 4.0, 2.0, 2.0, 5.0, 1.0]) == steps
    assert best.latest.step == steps[-1]


def test_a_checkpoint_that_was_not_written_is_not_the_best():
    best = Best(KeepBest(mode="min"), None)
    assert found(best, [3.0, 2.0]) == [1, 2]
    best.forget(2)
    assert best.latest == BestEvaluation("loss", "min", 1, 3.0)
    assert best.is_found(3, {"loss": 2.5})
    # Its checkpoint is written once more.
    best.forget(3)
    best.remember(3)
    assert best.latest.step == 3


def test_what_the_checkpoint_of_the_start_says():
    before = BestEvaluation("loss", "min", 4, 2.0)
    assert not Best(KeepBest(mode="min"), before).is_found(5, {"loss": 2.5})
    # Values of another metric cannot be compared.
    assert Best(KeepBest(metric="perplexity", mode="min"), before).is_found(5, {"perplexity": 12.0})
    assert not Best(None, before).is_found(5, {"loss": 1.0})


def test_a_metric_that_no_evaluation_has():
    best = Best(KeepBest(metric="shifted/loss", mode="min"), None)
    assert best.not_found() is None
    for other in ("loss", "ema/loss"):
        assert not best.is_found(1, {other: 1.0})
    assert best.not_found().endswith("no evaluation so far had 'shifted/loss', but only ema/loss, loss")
    # Once after each evaluation.
    assert best.not_found() is None
    assert not best.is_found(2, {"loss": 1.0})
    assert best.is_found(2, {"shifted/loss": 1.0})
    assert best.not_found() is None


def test_a_set_that_is_evaluated_less_often():
    best = Best(KeepBest(metric="shifted/loss", mode="min"), None, ["shifted"])
    assert not best.is_found(1, {"loss": 1.0})
    assert best.not_found() is None
    assert not best.is_found(2, {"shifted/accuracy": 1.0})
    assert "but only shifted/accuracy" in best.not_found()


@pytest.mark.parametrize(
    ("metric", "problem"),
    [
        ("ema/loss", "averaged weights need optimizer.ema_half_life; write it, or another one"),
        ("then/score", "checkpoint.then follows what is kept; write a number of an evaluation"),
    ],
)
def test_metrics_that_there_are_not(metric, problem):
    load_config(PYDOC, ['--checkpoint.keep_best={"metric": "schema/loss", "mode": "min"}'])
    assert problem_of(f'--checkpoint.keep_best={{"metric": "{metric}", "mode": "min"}}').endswith(problem)


@pytest.mark.slow
def test_a_death_at_any_step_of_a_save_leaves_the_best(tmp_path):
    """The best is older than the one checkpoint that is kept besides, and none after it is better."""
    best = BestEvaluation("loss", "min", 2, 1.0)

    def begun(path):
        run = FakeRun(path, keep_last=1)
        for step in (2, OLD):
            run.save(step, best)
        return run

    run = begun(tmp_path / "whole")
    with interruption(run.checkpoints) as calls:
        run.save(NEW, best)
    for number in range(len(calls)):
        run = begun(tmp_path / str(number))
        assert forked(save_interrupted, run, number, "before", best) == DIED
        assert 2 in usable(run.checkpoints), number


WORDS = (*TINY_GPT, "--train.stop_after_steps=12", '--evaluation.every={"steps": 2}', "--checkpoint.keep_last=1")


@pytest.mark.slow
def test_a_run_keeps_its_best(run_dir):
    words = (*WORDS, '--checkpoint.keep_best={"metric": "perplexity", "mode": "max"}')
    # Stopped in the middle, and resumed.
    train_in_job(PYDOC, run_dir, *words, "--train.stop_after_steps=7")
    train_in_job(PYDOC, run_dir, *words, strategy="fsdp")
    values = {line["step"]: line["perplexity"] for line in read_json_lines(run_dir / "evaluations.jsonl")}
    step = max(values, key=values.get)
    best = {"metric": "perplexity", "mode": "max", "step": step, "value": values[step]}
    assert read_object(run_dir / "summary.json")["best"] == best
    entries = RunFolder(run_dir).checkpoints()
    assert [entry.step for entry in entries] == sorted({12, step}, reverse=True)


@pytest.mark.slow
def test_a_run_without_the_metric_says_so(run_dir, capfd):
    words = (*WORDS, '--checkpoint.keep_best={"metric": "f1", "mode": "max"}', "--train.stop_after_steps=4")
    train(PYDOC, *words, run_dir=run_dir)
    assert capfd.readouterr().out.count("no evaluation so far had 'f1', but only loss, perplexity") == 2
