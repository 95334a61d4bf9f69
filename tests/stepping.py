"""A run in a process of a job, up to its first step, and steps that are taken by hand."""

from pathlib import Path
from typing import Any

from torch import nn

from largebatch.backend.fsdp_units import shape_of
from largebatch.config import load_config
from largebatch.estimate.model_shape import ModelShape
from largebatch.optim import build_optimizer
from largebatch.run import Run, RunOptions, Step
from largebatch.task_folders import import_from


def prepared(recipe: Path, run_dir: Path, *words: str) -> tuple[Run, ModelShape, nn.Module, Any]:
    """A run, the shape of its model, the model that it trains, and the training set."""
    run = Run(load_config(recipe, words), RunOptions(run_dir))
    train_set, _ = run.load(import_from(recipe.parent, "data").sources)
    model = run.build(import_from(recipe.parent, "model").build_model)
    shape = shape_of(model, run.plan)
    model, _ = run.prepare(model, build_optimizer(model, run.plan))
    return run, shape, model, train_set


def take(step: Step, run: Run, model: nn.Module) -> None:
    """A step of a language model, whose loss is the sum of its logits' squares."""
    for batch in step.micro_batches():
        step.backward(model(input_ids=batch["input_ids"]).logits.square().sum())
    run.update(step)
