"""Runs a recipe's train.py in this process."""

import sys
from pathlib import Path
from typing import Any

from largebatch.task_folders import import_from


def train(recipe: Path, *overrides: str, run_dir: Path, moved_by: int | None = None) -> None:
    """Run `main` of the train.py next to a recipe, with the command line of a run.

    `moved_by` is the seed of the smallest rounding errors, by which starting weights are perturbed in this process;
    None perturbs nothing.
    """
    from largebatch.run import user_errors

    if moved_by is not None:
        _move_starting_weights(moved_by)
    sys.argv = ["train.py", "--config", str(recipe), "--run-dir", str(run_dir), *overrides]
    with user_errors():
        import_from(recipe.parent, "train").main()


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
