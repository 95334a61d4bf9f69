"""A language model of the sequences; a sample's loss is the mean of its tokens'."""

# The page's blocks use and define such names.
# ruff: noqa: F401, F821, B007

from largebatch.task_folders import load_package

__package__ = load_package(__file__)  # so that a script can import the modules of its folder (PEP 366)

import torch
from safetensors.torch import load_model
from torch.nn.functional import cross_entropy

from largebatch.optim import build_optimizer
from largebatch.run import Run, from_command_line

from .config import Config
from .data import sources
from .model import build_model

# cookbook: train.py


def main(config, options):
    run = Run(config, options)
    # cookbook: train.py, the data
    model = run.build(build_model)
    # cookbook: train.py, after run.build
    # cookbook: train.py, before run.prepare
    optimizer = build_optimizer(model, run.plan)
    model, optimizer = run.prepare(model, optimizer)

    def losses(batch):
        """The loss of each sample; shape (batch,)."""
        logits = model(input_ids=batch["tokens"]).logits[:, :-1].to(run.dtype)
        return cross_entropy(logits.transpose(1, 2), batch["tokens"][:, 1:], reduction="none").mean(dim=1)

    def evaluate_batch(batch):
        return {"loss": losses(batch)}

    # cookbook: train.py, before the loop
    for step in run.steps(train_set):
        for batch in step.micro_batches():
            # cookbook: train.py, for each micro-batch
            pass
        run.update(step)
        # cookbook: train.py, after run.update
    run.finish()


if __name__ == "__main__":
    with from_command_line(Config) as (config, options):
        main(config, options)
