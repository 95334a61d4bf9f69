"""Whether all processes, and a run that resumes, read the same samples by the same indices: there is one order."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.linalg import norm
from numpy.typing import NDArray

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
    exact = set()
    # A source that draws from torch's generator must not change the initial weights.
    with backend.raise_on_all_ranks(), torch.random.fork_rng(devices=[]):
        for which, source, epoch in zip(("training", "evaluation"), sources, (0, None), strict=False):
            # One by one: more together may not fit, or not go into one tensor.
            chosen = np.random.default_rng(0).choice(len(source), min(SAMPLES, len(source)), replace=False)
            requests = [(index[None], epoch) for index in chosen]
            # As training does, in a loader process if it has any: what a source opens at the first `fetch`, such as a
            # file and the place in it, must not be shared by the loader processes that are forked later.
            for loaded in load(source, requests, min(1, num_workers), torch.device("cpu")):
                for name, tensor in loaded.batch.items():
                    what = f"{name!r} of the {which} samples"
                    # Numbers of classes and tokens, unlike pixels.
                    if not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.uint8):
                        exact.add(what)
                    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten()
                    excerpt = flat[:: 1 + len(flat) // NUMBERS].double().nan_to_num(0.0, LARGE, -LARGE)
                    mine[what] += excerpt.tolist()
    expected = backend.from_main_process(lambda: mine)
    with backend.raise_on_all_ranks():
        for what, numbers in expected.items():
            if not _are_alike(np.array(mine.get(what, [])), np.array(numbers), what in exact):
                raise DataError(
                    f"`fetch` in data.py returns another {what} than on rank 0, for the same indices; {REASONS}; other "
                    "files on that machine"
                )
        for what, numbers in before.items():
            if not _are_alike(np.array(expected.get(what, [])), np.array(numbers), what in exact):
                raise DataError(
                    f"{what} are not those that the checkpoint was trained with; restore the files, start over with "
                    f"--resume none, or go on with what there is now: --allow-change data. If no file has changed, "
                    f"{REASONS}"
                )
    return expected


def _are_alike(mine: NDArray[np.float64], expected: NDArray[np.float64], is_exact: bool) -> bool:
    """Whether numbers differ by no more than rounding and decoding may make of the same ones."""
    if is_exact:
        return np.array_equal(mine, expected)
    mean = expected.sum() / max(1, expected.size)
    allowed = PART_OF_VARIATION * norm(expected - mean) + PART_OF_SIZE * norm(expected)
    return mine.shape == expected.shape and bool(norm(mine - expected) <= allowed)
