"""Whether all processes, and a run that resumes, read the same samples by the same indices: there is one order."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from numpy.linalg import norm

from largebatch.backend.base import Backend
from largebatch.data.loading import load
from largebatch.data.source import SampleSource
from largebatch.errors import DataError

Numbers = Mapping[str, list[float]]
# Of each set, from all over it, because the first ones may all have one label.
SAMPLES = 8
# Numbers of each tensor of a sample that are compared, at most.
NUMBERS = 50
# Stands for infinity.
LARGE = 1e30
# Other samples differ by about as much as a tensor varies. Another CPU or library may round or decode them a little
# differently, which is no reason to refuse them.
PART_OF_VARIATION = 0.1
PART_OF_SIZE = 1e-3

REASONS = (
    "possible reasons: the order of a set of strings, or `hash` of one, which each process has for itself (sort them); "
    "the order of os.listdir or glob (sort it); random numbers that do not come from `derive_seed`"
)


def check_same_samples(sources: Sequence[SampleSource], num_workers: int, backend: Backend, before: Numbers) -> Numbers:
    """Raise DataError on all processes if the training or evaluation samples of one are not those of the main process,
    or not those of `before`: what this function returned when the run began.

    Every process must call this.
    """
    mine: dict[str, list[float]] = defaultdict(list)
    again: dict[str, list[float]] = defaultdict(list)
    exact = set()
    # A source that draws from torch's generator must not change the initial weights.
    with backend.raise_on_all_ranks(), torch.random.fork_rng(devices=[]):
        for which, source, epoch in zip(("training", "evaluation"), sources, (0, None), strict=False):
            # One by one: more together may not fit, or not go into one tensor.
            chosen = np.random.default_rng(0).choice(len(source), min(SAMPLES, len(source)), replace=False)
            requests = [(index[None], epoch) for index in chosen]
            # As training does, in a loader process if it has any: what a source opens at the first `fetch`, such as a
            # file and the place in it, must not be shared by the loader processes that are forked later.
            # All of them twice, to find random numbers that are others the second time.
            batches = load(source, 2 * requests, min(1, num_workers), torch.device("cpu"))
            for number, (batch, _) in enumerate(batches):
                numbers = mine if number < len(requests) else again
                for name, tensor in batch.items():
                    what = f"{name!r} of the {which} samples"
                    numbers[what] += _excerpt(tensor)
                    # Numbers of classes and tokens, unlike pixels.
                    if not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.uint8):
                        exact.add(what)
        _compare(
            again,
            mine,
            exact,
            "`fetch` in data.py returns another {} when it is called again, for the same indices and epoch: let it "
            "depend on these alone (random numbers: draw them from `derive_seed(seed, name, epoch, index)`)",
            part_of_variation=0,
        )
    expected = backend.from_main_process(lambda: mine)
    with backend.raise_on_all_ranks():
        _compare(
            mine,
            expected,
            exact,
            f"`fetch` in data.py returns another {{}} than on rank 0, for the same indices; {REASONS}; other files on "
            "that machine",
        )
        _compare(
            expected,
            before,
            exact,
            "{} are not those that the checkpoint was trained with; restore the files, start over with --resume none, "
            f"or go on with what there is now: --allow-change data. If no file has changed, {REASONS}",
        )
    return expected


def _excerpt(tensor: torch.Tensor) -> list[float]:
    """Some of a tensor's numbers, from all over it."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.flatten()
    excerpt = flat[:: 1 + len(flat) // NUMBERS].double().nan_to_num(0.0, LARGE, -LARGE)
    return list(excerpt.tolist())


def _compare(
    mine: Numbers,
    expected: Numbers,
    exact: Collection[str],
    told: str,
    part_of_variation: float = PART_OF_VARIATION,
) -> None:
    """Raise DataError if numbers differ by more than rounding and decoding may make of the same ones."""
    for what, numbers in expected.items():
        theirs = np.array(numbers)
        own = np.array(mine.get(what, []))
        if what not in exact and own.shape == theirs.shape:
            variation = norm(theirs - theirs.sum() / max(1, theirs.size))
            if norm(own - theirs) <= part_of_variation * variation + PART_OF_SIZE * norm(theirs):
                continue
        if not np.array_equal(own, theirs):
            raise DataError(told.format(what))
