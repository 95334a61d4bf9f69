"""Segmentation of made-up maps: the mean is over all labeled pixels of a global batch."""

from largebatch.task_folders import load_package

__package__ = load_package(__file__)  # so that a script can import the modules of its folder (PEP 366)

from torch.nn.functional import cross_entropy

from largebatch.optim import build_optimizer
from largebatch.run import Run, from_command_line

from .config import Config
from .data import UNLABELED, sources
from .model import build_model


def main(config, options):
    run = Run(config, options)
    train_set, eval_set = run.load(sources)
    model = run.build(build_model)
    model, _ = run.prepare(model, build_optimizer(model, run.plan))

    def losses(batch):
        logits = model(batch["map"].to(run.dtype)).to(run.dtype)
        each = cross_entropy(logits, batch["labels"], ignore_index=UNLABELED, reduction="none")
        return each * batch["weights"].to(run.dtype)

    def evaluate_batch(batch):
        return {"loss": (losses(batch).sum(dim=(1, 2)), batch["weights"].sum(dim=(1, 2)))}

    for step in run.steps(train_set):
        for batch in step.micro_batches():
            step.backward(losses(batch).sum())
        run.update(step)
        if run.should_evaluate:
            run.evaluate(eval_set, evaluate_batch)
    run.finish()


if __name__ == "__main__":
    with from_command_line(Config) as (config, options):
        main(config, options)
