"""A run of the task noisy_quadratic, and the loss of its branches in closed form."""

from pathlib import Path

import jobs
from largebatch.storage.files import read_json_lines
from paths import ROOT

QUADRATIC = ROOT / "tests/noisy_quadratic/quadratic.json"
STEP = 128  # the branches begin after this step, and train on so many samples
WINDOW = 512
RATE = 0.02
BATCH = 4
VARIANCE = 200.0


def expected_loss(multiple: int, before: float) -> float:
    """The loss at the end of the window, of a branch with a multiple of the batch and, by the linear rule, of the rate.

    Of steps w -= rate (w - noise): E[w^2] decays, and each adds the variance of the gradient over the batch.
    """
    rate = RATE * multiple
    batch = BATCH * multiple
    decay = (1 - rate) ** 2
    left = decay ** (WINDOW // batch)
    return left * before + rate**2 * VARIANCE / batch * (1 - left) / (1 - decay) / 2


def train(run_dir: Path, last_step: int) -> float:
    """Train up to a step, and return the loss after `STEP`."""
    words = (f"--train.stop_after_steps={last_step}", f"--evaluation.every.steps={STEP}")
    jobs.train_in_job(QUADRATIC, run_dir, *words, strategy="single")
    losses = {line["step"]: line["loss"] for line in read_json_lines(run_dir / "evaluations.jsonl")}
    return losses[STEP]
