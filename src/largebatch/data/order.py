"""The order of samples and the seeds of all randomness, as pure functions of (seed, epoch, step).

All processes share one shuffle per epoch (Goyal et al. 2017, remark 4). It is a permutation that is computed, not
stored: any position of any epoch is found in constant time and memory, even among 10^9 samples, so a run can start
anywhere, on any number of processes, and see the same samples.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby, islice
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from largebatch.batch import GlobalBatch, Timeline
from largebatch.batch.mixture import Mixture

Indices = NDArray[np.int64]

FEISTEL_ROUNDS = 8


def derive_seed(seed: int, *purpose: int | str) -> int:
    """A 63-bit seed that depends only on the run's seed and on its purpose."""
    text = "/".join([str(seed), *(str(word) for word in purpose)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class Permutation:
    """A pseudo-random permutation of range(size), evaluated position by position.

    A generalized Feistel cipher on the rectangle a x b, the smallest with a*b >= size and a about sqrt(size); results
    outside the range are enciphered again until they are inside (Black & Rogaway 2002, "Ciphers with Arbitrary Finite
    Domains", sections 3 and 4). A cipher is a bijection, so every index appears exactly once. The key is any integer.
    """

    size: int
    key: int

    def __call__(self, positions: Indices) -> Indices:
        """The elements at `positions`, an int64 array of any shape with values in range(size)."""
        result = self._encipher(np.asarray(positions, dtype=np.uint64))
        while (outside := result >= self.size).any():
            result[outside] = self._encipher(result[outside])
        return result.astype(np.int64)

    @cached_property
    def _rectangle(self) -> tuple[np.uint64, np.uint64]:
        rows = math.isqrt(self.size - 1) + 1
        return np.uint64(rows), np.uint64(-(-self.size // rows))

    @cached_property
    def _round_keys(self) -> list[np.uint64]:
        return [np.uint64(derive_seed(self.key, "feistel", number)) for number in range(FEISTEL_ROUNDS)]

    def _encipher(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        rows, columns = self._rectangle
        left = values % rows
        right = values // rows
        for number, round_key in enumerate(self._round_keys):
            if number % 2 == 0:
                left = (left + _mix(right + round_key)) % rows
            else:
                right = (right + _mix(left + round_key)) % columns
        return right * rows + left


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64 (Steele et al. 2014), halved so that adding a small number cannot overflow."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (values ^ (values >> np.uint64(31))) >> np.uint64(1)


SHUFFLED_AT_ONCE = 64  # micro-batches


@lru_cache(maxsize=64)
def epoch_order(num_samples: int, seed: int, epoch: int) -> Permutation:
    """The shuffle of one epoch, from position in the epoch to sample index."""
    return Permutation(num_samples, derive_seed(seed, "order", epoch))


class MicroBatch(NamedTuple):
    """Which samples one process works on in one forward pass."""

    epoch: int  # counted from 0; it and each sample's index decide the augmentation
    indices: Indices  # sample indices, int64 of shape (samples,): micro_batch_size, or fewer in a ragged batch
    # Seed of the randomness inside the model, such as dropout: a function of the step and of the micro-batch's slot in
    # the global batch, whichever process works on it.
    seed: int
    # False if a ragged batch has no samples left for this process, which then computes the first sample of the global
    # batch, because the other processes need its passes, and contributes no gradient.
    contributes: bool


@dataclass(frozen=True)
class TrainingOrder:
    """Which samples every process sees in every micro-step of a run.

    The samples of a global batch are laid out as micro-batches, slot by slot; in micro-step m, process r works on slot
    m * world_size + r. So a global batch holds the same samples for every number of processes and micro-batch size.
    """

    timeline: Timeline
    micro_batch_size: int
    world_size: int
    seed: int
    mixture: Mixture | None = None

    def micro_batches(self, micro_steps: Iterable[tuple[int, int]], rank: int) -> Iterator[MicroBatch]:
        """The work of process `rank` in each pair of optimizer step and micro-step, all counted from 0, in their order.

        Many positions are shuffled at once, which takes about as long for a hundred micro-batches as for one.
        """
        upcoming = (self._unshuffled(step, micro_step, rank) for step, micro_step in micro_steps)
        while chunk := list(islice(upcoming, SHUFFLED_AT_ONCE)):
            for epoch, group in groupby(chunk, key=attrgetter("epoch")):
                same_epoch = list(group)
                yield from self._shuffled(epoch, same_epoch) if self.mixture is None else same_epoch

    def _unshuffled(self, step: int, micro_step: int, rank: int) -> MicroBatch:
        """A micro-batch whose indices are still positions in its epoch's order, except for those of a mixture."""
        batch = self.timeline.at(step)
        slot = micro_step * self.world_size + rank
        first = slot * self.micro_batch_size
        end = min((slot + 1) * self.micro_batch_size, batch.size)
        contributes = first < end
        places = np.arange(first, end) if contributes else np.arange(1)
        indices = batch.start + places if self.mixture is None else self._mixed(self.mixture, step, batch, places)
        return MicroBatch(batch.epoch, indices, derive_seed(self.seed, "model", step, slot), contributes)

    def _shuffled(self, epoch: int, micro_batches: Sequence[MicroBatch]) -> Iterator[MicroBatch]:
        order = epoch_order(self.timeline.num_train_samples, self.seed, epoch)
        indices = order(np.concatenate([each.indices for each in micro_batches]))
        ends = np.cumsum([len(each.indices) for each in micro_batches])
        for each, shuffled in zip(micro_batches, np.split(indices, ends[:-1]), strict=True):
            yield each._replace(indices=shuffled)

    def _mixed(self, mixture: Mixture, step: int, batch: GlobalBatch, places: Indices) -> Indices:
        """The indices, as `data.mixture` reads them, at places in a global batch of a mixture."""
        before = np.array(mixture.counts_after(batch.samples_before))
        ends = np.cumsum(np.array(mixture.counts_after(batch.samples_before + batch.size)) - before)
        places = Permutation(batch.size, derive_seed(self.seed, "mixture", step))(places)
        which = np.searchsorted(ends, places, side="right")
        draws = before[which] + places - np.array([0, *ends])[which]
        indices: Indices = draws * len(ends) + which
        return indices
