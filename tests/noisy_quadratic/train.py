"""A noisy quadratic; its evaluation is the exact loss per dimension, without the noise."""

from largebatch.task_folders import load_package

__package__ = load_package(__file__)  # so that a script can import the modules of its folder (PEP 366)

import torch

from largebatch.optim import build_optimizer
from largebatch.run import Run, from_command_line

from .config import Config
from .data import sources
from .model import build_model


def main(config, options):
    run = Run(config, options)
    train_set, eval_set = run.load(sources)
    model = run.build(build_model)
    model, _ = run.prepare(model, build_optimizer(model, run.plan))

    def evaluate_batch(batch):
        exact = model(torch.zeros_like(batch["target"])).double() / config.model.dimensions
        return {"loss": (exact, torch.ones_like(exact))}

    for step in run.steps(train_set):
        for batch in step.micro_batches():
            step.backward(model(batch["target"]).sum())
        run.update(step)
        if run.should_evaluate:
            run.evaluate(eval_set, evaluate_batch)
    run.finish()


if __name__ == "__main__":
    with from_command_line(Config) as (config, options):
        main(config, options)
