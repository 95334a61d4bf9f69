"""Whether each sample of a data set can be read."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from tqdm import tqdm

from largebatch.data.loading import load
from largebatch.data.order import Indices
from largebatch.data.source import Batch, SampleSource
from largebatch.errors import DataError, UserError, reason_of
from largebatch.words import bulleted, counted

NAMES = {"num_train_samples": ("training", 0), "num_eval_samples": ("evaluation", None)}
"""What the sets are, and the epoch that their samples are fetched for."""
SAMPLES_AT_ONCE = 100
MAX_SHOWN = 20


def check_readable(opened: Mapping[str, SampleSource], counts: Mapping[str, int], num_workers: int) -> None:
    """Read each sample once, in loader processes as training does, except those that have checksums.

    Args:
        opened: The training and the evaluation set, by the config's fields for their numbers of samples, and further
            sets by their names.
        counts: Their numbers of samples.
        num_workers: How many loader processes read them.

    Raises:
        DataError: Some cannot be read; it names the first ones.
    """
    problems: list[str] = []
    num_wrong = 0
    for field, source in opened.items():
        which, epoch = NAMES.get(field, (field, None))
        if getattr(source, "has_checksums", False):
            continue
        starts = range(0, counts[field], SAMPLES_AT_ONCE)
        chunks = [(np.arange(start, min(start + SAMPLES_AT_ONCE, counts[field])), epoch) for start in starts]
        tried = load(_Tried(source), chunks, num_workers, torch.device("cpu"))
        for (indices, _), loaded in zip(chunks, tqdm(tried, which, len(chunks), disable=None), strict=True):
            wrong = indices[loaded.batch["cannot_be_read"].numpy()].tolist()
            num_wrong += len(wrong)
            for index in wrong[: MAX_SHOWN - len(problems)]:
                problems.append(f"{which} sample {index}: {_problem(source, epoch, index)}")
    if problems:
        more = ["…"] if num_wrong > MAX_SHOWN else []
        raise DataError(f"{counted(num_wrong, 'sample')} cannot be read:{bulleted([*problems, *more])}")


def _problem(source: SampleSource, epoch: int | None, index: int) -> str | None:
    """Why a sample cannot be read; None if it can be."""
    try:
        source.fetch(np.array([index]), epoch)
    except UserError as error:
        return str(error)
    # The `fetch` of a task may raise anything.
    except Exception as error:
        return reason_of(error)
    return None


@dataclass
class _Tried:
    """Whether samples of a source cannot be read, one by one."""

    source: SampleSource

    def __len__(self) -> int:
        return len(self.source)

    def fetch(self, indices: Indices, epoch: int | None) -> Batch:
        return {"cannot_be_read": torch.tensor([_problem(self.source, epoch, each) is not None for each in indices])}

    def weight(self, batch: Batch) -> int:
        return len(batch["cannot_be_read"])
