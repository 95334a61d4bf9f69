"""A loss or gradient that is not finite stops every process, names step and rank, and writes no weights."""

import pytest

from jobs import failure_of, train
from paths import PYDOC
from tasks import SMALL

pytestmark = pytest.mark.slow


def train_poisoned(run_dir, recipe, words, bad_steps, bad_rank, where):
    """Train with a loss, its gradient, or a loss without its gradient that is NaN in some steps of one process.

    Or with both a thousand times as large.
    """
    import torch

    from largebatch.run import Step

    backward = Step.backward

    def poisoned(self, loss_sum):
        if self.index + 1 in bad_steps and self._backend.rank == bad_rank:
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
    train(recipe, *words, run_dir=run_dir)


def failure(run_dir, *words, bad_steps, where="loss", strategy="ddp"):
    """The report of a run of which the second process is poisoned."""
    report = failure_of(train_poisoned, run_dir, PYDOC, words, bad_steps, 1, where, strategy=strategy)
    assert "exit code 1" in report
    assert "Traceback" not in report
    assert not (run_dir / "model").exists()
    return report


WORDS = (*SMALL, "--train.stop_after_steps=12", "--logging.every=5")


# Also if an evaluation comes before the next log point.
@pytest.mark.parametrize("words", [(), ("--evaluation.every.epochs=0.08",)])
def test_names_the_step_between_log_points_and_the_rank(words, run_dir):
    """Step 7 is logged with step 10; from step 8 on all ranks are bad, and rank 1 was the first."""
    report = failure(run_dir, *WORDS, *words, bad_steps={7})
    assert "error: the loss is nan at step 7 on rank 1;" in report
    assert "error: the loss is nan at step 8" not in report
    assert "no weights were written" in report


def test_gradient_of_the_last_step(run_dir):
    """The loss was finite, but the update would have destroyed the weights that are about to be saved."""
    report = failure(run_dir, *WORDS, bad_steps={12}, where="gradient", strategy="zero2")
    assert "the gradient's norm is" in report
    assert "at step 12" in report
