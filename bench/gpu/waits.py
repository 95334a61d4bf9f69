"""Counts what makes the host wait for the GPU between two logged steps of a recipe."""

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from largebatch.run import Run, Step
from largebatch.tools.local_jobs.training import train

# The first step and the last are logged, and engines settle in the second.
NUM_STEPS = 6
FIRST = 2
LAST = 5


def waits_of_a_recipe(recipe: Path, words: Sequence[str], run_dir: Path) -> tuple[int, Counter[str]]:
    """Train a few steps in this process.

    Returns:
        The number of watched steps, and how often the host waited in them, by place: never, without a GPU.
    """
    steps = Run.steps
    window = ExitStack()
    places: Counter[str] = Counter()

    def watched_steps(run: Run[Any], train_set: Any) -> Iterator[Step]:
        for step in steps(run, train_set):
            if step.index == FIRST and torch.cuda.is_available():
                window.enter_context(waits_for_cuda(places))
            if step.index == LAST:
                window.close()
            yield step

    Run.steps = watched_steps  # type: ignore[method-assign]
    train(recipe, *words, f"--train.stop_after_steps={NUM_STEPS}", run_dir=run_dir)
    return LAST - FIRST, places


@contextmanager
def waits_for_cuda(places: Counter[str]) -> Iterator[None]:
    """Count CUDA's own warnings, by the line of Python that caused them."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        yield
        torch.cuda.set_sync_debug_mode("default")
    for each in warned:
        if "synchronizing CUDA operation" in str(each.message):
            places[f"{'/'.join(Path(each.filename).parts[-3:])}:{each.lineno}"] += 1
