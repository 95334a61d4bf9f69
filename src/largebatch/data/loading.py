"""Loading micro-batches, in this process or in worker processes."""

import operator
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from largebatch.config.data import Data
from largebatch.data.order import Indices
from largebatch.data.source import Batch, SampleSource
from largebatch.errors import DataError, reason_of
from largebatch.system.endings import STOP_SIGNALS

# A weight is a whole number of these parts of 1, which are summed as int64: exactly, in any order.
WEIGHT_UNITS = 2**20
Request = tuple[Indices, int | None]


class Loaded(NamedTuple):
    """A micro-batch, and its weight in the loss."""

    batch: Batch
    weight: float  # a multiple of 1 / WEIGHT_UNITS


class _MicroBatches(Dataset[Loaded | DataError]):
    """A sample source as a data set whose "index" is a request for a whole micro-batch.

    Errors are returned, not raised: a loader process would wrap its own traceback around the message.
    """

    def __init__(self, source: SampleSource):
        self.source = source

    def __getitem__(self, request: Any) -> Loaded | DataError:
        indices, epoch = request
        try:
            # Strided memory would be copied to a GPU through memory that is not page-locked, and the host would wait.
            fetched = self.source.fetch(indices, epoch)
            batch = {name: _whole(self.source, name, tensor) for name, tensor in fetched.items()}
            if get_worker_info() is not None:
                _share(batch)
            return Loaded(batch, sum_of_weights(self.source, batch))
        except DataError as error:
            return error


def _whole(source: SampleSource, name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise DataError(
            f"{type(source).__name__}.fetch returned {name!r} as {type(tensor).__name__}; "
            "return tensors: torch.from_numpy(array)"
        )
    return tensor.contiguous()


def sum_of_weights(source: SampleSource, batch: Batch) -> float:
    """What the samples of a micro-batch weigh; DataError if they cannot be summed exactly."""
    weight = source.weight(batch)
    called = f"{type(source).__name__}.weight(batch)"
    if isinstance(weight, torch.Tensor) and weight.is_floating_point() and weight.dim():
        units = weight.double() * WEIGHT_UNITS
        wrong = weight[~((units >= 0) & (units.frac() == 0))]
        if wrong.numel():
            raise DataError(
                f"{called} returned a weight of {wrong[0]:.9g}, but weights must be multiples of 2^-20, so that their "
                "sum does not depend on its order; round them in `fetch`: (weights * 2**20).round() / 2**20"
            )
        return int(units.long().sum()) / WEIGHT_UNITS
    try:
        return operator.index(weight)
    except TypeError:
        raise DataError(f"{called} returned {weight!r}; return a whole number, or a float tensor of weights") from None


def _share(batch: Batch) -> None:
    """Move a batch to shared memory here: where torch does it, nobody would learn that it fails, and all would wait."""
    try:
        for tensor in batch.values():
            tensor.share_memory_()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        size = sum(tensor.nbytes for tensor in batch.values())
        raise DataError(
            f"a loader process has no shared memory for a batch of {size:,} bytes ({reason_of(error)}); write "
            "data.num_workers 0, or enlarge /dev/shm (docker run --shm-size 16g, mount -o remount,size=16g /dev/shm)"
        ) from error


def load(source: SampleSource, requests: Iterable[Request], num_workers: int, device: torch.device) -> Iterator[Loaded]:
    """The batches of the requests, in their order, on `device`.

    Args:
        source: The data set.
        requests: Pairs of sample indices and epoch; loader processes take them ahead of need.
        num_workers: Number of loader processes; 0 loads in this process.
        device: Where the tensors go; on a GPU through pinned memory, without waiting for the copy.
    """
    samples = _MicroBatches(source)
    on_gpu = device.type == "cuda"
    if num_workers or on_gpu:
        micro_batches = _load_on_host(samples, requests, num_workers, pin=on_gpu)
    else:
        # As torch's loader does, which would take longer than loading a small batch.
        micro_batches = map(samples.__getitem__, requests)
    move = _copy_on_side_stream if on_gpu else _moved
    for loaded in micro_batches:
        if isinstance(loaded, DataError):
            raise loaded
        yield Loaded(move(loaded.batch, device), loaded.weight)


def _moved(batch: Batch, device: torch.device) -> Batch:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def _copy_on_side_stream(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch to a GPU while it computes what it was given before."""
    copying = _copy_stream(device)
    computing = torch.cuda.current_stream(device)
    with torch.cuda.stream(copying):
        copies = _moved(batch, device)
    computing.wait_stream(copying)
    for tensor in copies.values():
        # Its memory belongs to the other stream, and must not be given to a later batch while this one is used.
        tensor.record_stream(computing)
    return copies


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    # One for all sources, because memory that is freed stays with its stream.
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _load_on_host(
    samples: _MicroBatches, requests: Iterable[Request], num_workers: int, pin: bool
) -> Iterator[Loaded | DataError]:
    loader = DataLoader(
        samples,
        batch_size=None,
        sampler=requests,
        num_workers=num_workers,
        # The default from Python 3.14 on, forkserver, cannot import a task's classes by name.
        multiprocessing_context="fork" if num_workers else None,
        pin_memory=pin,
        worker_init_fn=_ignore_stop_signals,
        # Its own generator: the loader must not draw from the one that seeds dropout.
        generator=torch.Generator(),
    )
    # Loader processes are forked here, and keep these signals blocked.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        iterator = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    yield from iterator


def _ignore_stop_signals(_: int) -> None:
    """Let a loader process end only when its parent says so: if all are signaled, training must save first."""

    def wait_for_the_parent() -> None:
        while signal.sigwaitinfo(STOP_SIGNALS).si_pid != os.getppid():
            pass
        os._exit(0)

    threading.Thread(target=wait_for_the_parent, daemon=True).start()


def check_sizes(sources: Sequence[SampleSource], data: Data) -> None:
    """Raise DataError if the training or the evaluation set does not have the size that the recipe, and so the plan,
    says; any further sets have any size."""
    for which, source in zip(("train", "eval"), sources, strict=False):
        expected = getattr(data, f"num_{which}_samples")
        if len(source) != expected:
            if len(source) == 0:
                smaller = ", or a smaller data.block_size" if hasattr(data, "block_size") else ""
                raise DataError(f"data.num_{which}_samples: the data is too small for one sample; name more{smaller}")
            remedy = f"write {len(source)}"
            if data.is_counted:
                remedy += " (largebatch prepare RECIPE --write counts them)"
            if len(source) > expected:
                remedy += f', or name other data, such as "SPLIT[:{expected}]" in recipes with a data.{which}_split'
            found = f"the recipe says {expected}, but the data has {len(source)} samples"
            raise DataError(f"data.num_{which}_samples: {found}; {remedy}")
