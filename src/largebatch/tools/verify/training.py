"""Runs a recipe's train.py in this process."""

import sys
from pathlib import Path
from typing import Any

from largebatch.task_folders import run_as_main


def train(recipe: Path, *overrides: str, run_dir: Path, moved_by: int | None = None) -> None:
    """Run a recipe as if the train.py next to it were started from the command line.

    `moved_by` is the seed of the smallest rounding errors, by which starting weights are perturbed in this process;
    None perturbs nothing.
    """
    if moved_by is not None:
        _move_starting_weights(moved_by)
    script = recipe.with_name("train.py")
    sys.argv = [str(script), "--config", str(recipe), "--run-dir", str(run_dir), *overrides]
    run_as_main(script)


def _move_starting_weights(seed: int) -> None:
    """Zeros stay zero."""
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from largebatch.run import Run

    prepare = Run.prepare

    def prepare_moved(run: Run[Any], model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        # After `prepare`, because a large model has no weights before.
        prepared = prepare(run, model, optimizer)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                up = torch.randint(0, 2, weight.shape, generator=generator).to(weight)
                weight.mul_(1 + (2 * up - 1) * torch.finfo(weight.dtype).eps)
        return prepared

    Run.prepare = prepare_moved  # type: ignore[method-assign,assignment]
