"""Counts what makes the host wait for the GPU between two logged steps of a recipe."""

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

# The first step and the last are logged, and engines settle in the second.
NUM_STEPS, FIRST, LAST = 6, 2, 5


def waits_of_a_recipe(recipe: Path, words: Sequence[str], run_dir: Path) -> tuple[int, dict[str, int]]:
    """Train a few steps in this process.

    Returns:
        The number of watched steps, and how often the host waited in them, by place.
    """
    from largebatch.run import Run
    from largebatch.run.step import Step
    from largebatch.tools.local_jobs.training import train

    steps = Run.steps
    waits = WaitsForCuda()
    window = ExitStack()

    def watched_steps(run: Run[Any], train_set: Any) -> Iterator[Step]:
        for step in steps(run, train_set):
            if step.index == FIRST:
                window.enter_context(waits)
            if step.index == LAST:
                window.close()
            yield step

    Run.steps = watched_steps  # type: ignore[method-assign]
    train(recipe, *words, f"--train.stop_after_steps={NUM_STEPS}", run_dir=run_dir)
    return LAST - FIRST, waits.places()


class WaitsForCuda:
    """CUDA's own warnings, by the line of Python that caused them."""

    def __enter__(self) -> None:
        self._stack = ExitStack()
        self._warned = self._stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        self._stack.callback(torch.cuda.set_sync_debug_mode, "default")
        torch.cuda.set_sync_debug_mode("warn")

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def places(self) -> dict[str, int]:
        """The number of waits by place."""
        waits = [each for each in self._warned if "synchronizing CUDA operation" in str(each.message)]
        return dict(Counter(f"{'/'.join(Path(each.filename).parts[-3:])}:{each.lineno}" for each in waits))
