"""A loss or gradient that is not finite stops every process, names step and rank, and writes no weights."""

from collections.abc import Callable
from pathlib import Path

import pytest

from jobs import failure_of, train
from paths import PYDOC
from tasks import SMALL

pytestmark = pytest.mark.slow


def poison(is_bad: Callable[[int, int], bool], where: str) -> None:
    """Make the loss, its gradient, or the loss without its gradient NaN, at the steps and ranks for which `is_bad`.

    Or make both a thousand times as large.
    """
    import torch

    from largebatch.run import Step

    backward = Step.backward

    def poisoned(self, loss_sum):
        if is_bad(self.index + 1, self._backend.rank):
            if where == "spike":
                loss_sum = loss_sum * 1000.0
            if where == "loss":
                loss_sum = loss_sum * float("nan")
            if where == "loss alone":
                loss_sum = loss_sum + float("nan")
            if where == "gradient":
                # A finite loss with a gradient that is not: the square root at zero.
                loss_sum = loss_sum + torch.sqrt(loss_sum * 0.0)
        backward(self, loss_sum)

    Step.backward = poisoned


def train_with_nan(run_dir: Path, bad_step: int, bad_rank: int, where: str, *overrides: str) -> None:
    from largebatch.run.run import Run

    poison(lambda step, rank: (step, rank) == (bad_step, bad_rank), where)
    if where == "evaluation":
        evaluate = Run.evaluate
        Run.evaluate = lambda self, eval_set, per_sample: evaluate(
            self, eval_set, lambda batch: {"loss": per_sample(batch)["loss"][0] * float("inf")}
        )
    words = ("--train.stop_after_steps=12", "--logging.every=5", *overrides)
    train(PYDOC, *SMALL, *words, run_dir=run_dir)


def failure(run_dir: Path, strategy: str, step: int, rank: int, where: str, *overrides: str) -> str:
    report = failure_of(train_with_nan, run_dir, step, rank, where, *overrides, strategy=strategy)
    assert not (run_dir / "model").exists()
    assert "exit code 1" in report
    assert "no weights were written" in report
    assert "Traceback" not in report
    return report


@pytest.mark.parametrize(
    ("strategy", "words"),
    # An evaluation before the next log point.
    [("zero3", ()), ("ddp", ("--evaluation.every.epochs=0.08",))],
)
def test_names_the_step_between_log_points_and_the_rank(strategy, words, tmp_path):
    """Step 7 is logged with step 10; from step 8 on all ranks are bad, and rank 1 was the first."""
    report = failure(tmp_path / "run", strategy, 7, 1, "loss", *words)
    assert "error: the loss is nan at step 7 on rank 1;" in report
    assert "error: the loss is nan at step 8" not in report


def test_gradient_of_the_last_step(tmp_path):
    """The loss was finite, but the update would have destroyed the weights that are about to be saved."""
    report = failure(tmp_path / "run", "zero2", step=12, rank=1, where="gradient")
    assert "the gradient's norm is" in report
    assert "at step 12" in report


def test_evaluation(tmp_path):
    report = failure(tmp_path / "run", "ddp", step=99, rank=0, where="evaluation")
    assert "the evaluation's loss is inf after step 12" in report
