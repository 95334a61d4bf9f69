"""Loading micro-batches, in this process or in worker processes."""

import operator
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from largebatch.data.order import Indices
from largebatch.data.source import Batch, SampleSource
from largebatch.errors import DataError

Request = tuple[Indices, int | None]
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Loaded(NamedTuple):
    """A micro-batch, and what it counts in the loss."""

    batch: Batch
    weight: int


class _Requests(Dataset[Loaded | DataError]):
    """A sample source as a data set whose "index" is a request for a whole micro-batch.

    What cannot be loaded is returned, not raised: a loader process would wrap its own traceback around the message.
    """

    def __init__(self, source: SampleSource):
        self.source = source

    def __getitem__(self, request: Any) -> Loaded | DataError:
        indices, epoch = request
        try:
            batch = self.source.fetch(indices, epoch)
            return Loaded(batch, _weight(self.source, batch))
        except DataError as error:
            return error


def _weight(source: SampleSource, batch: Batch) -> int:
    weight = source.weight(batch)
    try:
        return operator.index(weight)
    except TypeError:
        raise DataError(
            f"{type(source).__name__}.weight(batch) returned {weight!r}; return a whole number, as what is counted"
        ) from None


def load(source: SampleSource, requests: Iterable[Request], num_workers: int, device: torch.device) -> Iterator[Loaded]:
    """The batches of the requests, in their order, on `device`.

    Args:
        source: Where the samples are.
        requests: Pairs of sample indices and epoch; taken ahead of need where there are workers.
        num_workers: Loader processes; 0 loads in this process.
        device: Where the tensors go; on a GPU through pinned memory, without waiting for the copy.
    """
    if not num_workers and device.type == "cpu":
        # torch's loader would do the same, and take longer than a small batch.
        for indices, epoch in requests:
            batch = source.fetch(indices, epoch)
            yield Loaded(batch, _weight(source, batch))
        return
    for loaded in _load_on_host(_Requests(source), requests, num_workers, pin=device.type == "cuda"):
        if isinstance(loaded, DataError):
            raise loaded
        batch = {name: tensor.to(device, non_blocking=True) for name, tensor in loaded.batch.items()}
        yield Loaded(batch, loaded.weight)


def _load_on_host(
    samples: _Requests, requests: Iterable[Request], num_workers: int, pin: bool
) -> Iterator[Loaded | DataError]:
    loader = DataLoader(
        samples,
        batch_size=None,
        sampler=requests,
        num_workers=num_workers,
        pin_memory=pin,
        worker_init_fn=_leave_signals_to_the_training if num_workers else None,
        # A generator of its own: the loader must not draw from the one that seeds dropout.
        generator=torch.Generator(),
    )
    with _stop_signals_blocked():
        # This starts the loader processes.
        iterator = iter(loader)
    yield from iterator


@contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """In this thread, and in the processes that it forks, where they stay so."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave_signals_to_the_training(_: int) -> None:
    """A signal to the whole job must not end loader processes before the training has saved: they obey it alone."""
    threading.Thread(target=_end_when_the_training_says_so, daemon=True).start()


def _end_when_the_training_says_so() -> None:
    while signal.sigwaitinfo(STOP_SIGNALS).si_pid != os.getppid():
        pass
    os._exit(0)


def check_size(source: SampleSource, expected: int, which: Literal["train", "eval"]) -> None:
    """Compare one of the data sets with the size that the recipe, and so the plan, says.

    Raises:
        DataError: They differ.
    """
    if len(source) != expected:
        raise DataError(
            f"data.num_{which}_samples: the recipe says {expected}, but the data has {len(source)} samples; write "
            f'{len(source)}, correct the data\'s path, or take a part of it: data.{which}_split "SPLIT[:{expected}]"'
        )
