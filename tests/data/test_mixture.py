"""Mixtures: which samples a step has, on any number of processes, and what their batches hold."""

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from largebatch.batch import Length, Timeline
from largebatch.batch.mixture import Mixture
from largebatch.batch.timeline import NO_EPOCHS
from largebatch.data.mixture import MixedSamples
from largebatch.data.order import TrainingOrder
from largebatch.data.text import IGNORE_INDEX, count_targets

SIZES = (50, 7, 23)
MIXTURE = Mixture(("a", "b", "c"), SIZES, (6, 1, 3))
BATCHES = [(Length("steps", 0), 24), (Length("steps", 15), 48)]


def samples_of(step, world_size=1, micro_batch_size=8):
    timeline = Timeline.build(NO_EPOCHS, BATCHES)
    order = TrainingOrder(timeline, micro_batch_size, world_size, 3, MIXTURE)
    micro_steps = timeline.at(step).size // (world_size * micro_batch_size)
    slots = [(step, number) for number in range(micro_steps)]
    of_ranks = [order.micro_batches(slots, rank) for rank in range(world_size)]
    # Slot by slot, as in one process.
    return np.concatenate([work.indices for slot in zip(*of_ranks, strict=True) for work in slot])


@pytest.mark.parametrize(("world_size", "micro_batch_size"), [(3, 8), (4, 2), (1, 24)])
def test_a_step_has_the_same_samples_in_the_same_order_everywhere(world_size, micro_batch_size):
    for step in (0, 9, 10, 14, 15, 16, 40):
        assert samples_of(step, world_size, micro_batch_size).tolist() == samples_of(step).tolist()


def test_each_batch_has_its_shares_and_each_source_its_draws_in_turn():
    drawn = [0, 0, 0]
    samples = 0
    for step in range(40):
        indices = samples_of(step)
        samples += len(indices)
        for number in range(3):
            mine = np.sort(indices[indices % 3 == number] // 3)
            assert mine.tolist() == [*range(drawn[number], drawn[number] + len(mine))]
            drawn[number] += len(mine)
        assert tuple(drawn) == MIXTURE.counts_after(samples)
    # The sources are not one after the other in a batch.
    assert (np.diff(samples_of(0) % 3) != 0).sum() > 5


class Numbers:
    """Samples that are their own number in their source, as long as that number modulo five, and one."""

    def __init__(self, which, size):
        self.which = which
        self.size = size
        self.asked = []

    def __len__(self):
        return self.size

    def fetch(self, indices, epoch):
        self.asked += [(index, epoch) for index in indices.tolist()]
        labels = [torch.full((index % 5 + 1,), index) for index in indices.tolist()]
        padded = pad_sequence(labels, batch_first=True, padding_value=IGNORE_INDEX)
        return {"labels": padded, "which": torch.full((len(indices),), self.which)}

    def weight(self, batch):
        return count_targets(batch)


def mixed():
    sources = [Numbers(number, size) for number, size in enumerate(SIZES)]
    return MixedSamples(["a", "b", "c"], sources, seed=0), sources


def test_a_batch_keeps_the_order_of_its_indices_and_pads_as_its_sources_do():
    samples, _ = mixed()
    indices = np.array([5, 3, 4, 0, 299, 7])
    batch = samples.fetch(indices, 0)
    assert batch["which"].tolist() == (indices % 3).tolist()
    alone = [samples.fetch(np.array([index]), 0)["labels"][0] for index in indices]
    assert torch.equal(batch["labels"], pad_sequence(alone, batch_first=True, padding_value=IGNORE_INDEX))
    assert samples.weight(batch) == sum(map(len, alone))


def test_evaluation_counts_through_the_sources():
    samples, sources = mixed()
    assert len(samples) == 80
    assert samples.parts == {"a": range(50), "b": range(50, 57), "c": range(57, 80)}
    batch = samples.fetch(np.array([49, 50, 56, 57, 79]), None)
    assert batch["which"].tolist() == [0, 1, 1, 2, 2]
    assert [source.asked for source in sources] == [[(49, None)], [(0, None), (6, None)], [(0, None), (22, None)]]


def test_what_a_mixture_leaves_out_is_said():
    skipped = "of 42 training pairs, 1 cannot be used: skipped"
    source = type("Source", (), {"remark": skipped, "num_available": 41, "__len__": lambda _: 40})()
    mixed = MixedSamples(["a", "b"], [source, source], 0)
    assert mixed.remark == f"a: {skipped}; b: {skipped}"
    assert mixed.num_available == 82
