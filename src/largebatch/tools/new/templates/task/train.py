"""Regression on made-up points: the smallest complete task, to be changed piece by piece."""

from largebatch.task_folders import load_package

__package__ = load_package(__file__)  # so that a script can import the modules of its folder (PEP 366)

import torch

from largebatch.data.source import Batch
from largebatch.optim import build_optimizer
from largebatch.run import Run, RunOptions, from_command_line

from .config import Config
from .data import sources
from .model import build_model


def main(config: Config, options: RunOptions) -> None:
    run = Run(config, options)
    train_set, eval_set = run.load(sources)
    model = run.build(build_model)
    model, _ = run.prepare(model, build_optimizer(model, run.plan))

    def losses(batch: Batch) -> torch.Tensor:
        """The loss of each sample; shape (batch,)."""
        predicted: torch.Tensor = model(batch["x"].to(run.dtype))
        return (predicted.to(run.dtype) - batch["y"].to(run.dtype)).square()

    for step in run.steps(train_set):
        for batch in step.micro_batches():
            step.backward(losses(batch).sum())  # a sum: the library divides by the whole global batch
        run.update(step)
        if run.should_evaluate:
            run.evaluate(eval_set, lambda batch: {"loss": losses(batch)})
    run.finish()


if __name__ == "__main__":
    with from_command_line(Config) as (config, options):
        main(config, options)
