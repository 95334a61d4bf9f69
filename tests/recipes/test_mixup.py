"""Mixup: who is mixed with whom, and on what the weights depend; test_strategies has a plain loop with it."""

from functools import partial

import numpy as np
import pytest
import torch

import tasks
from largebatch.config import load_config
from largebatch.errors import ConfigError
from paths import VIT_DIGITS
from small_data import assert_drawn_by_seed_epoch_and_sample

image_sources = tasks.sources("image_classification")
partners = tasks.module("image_classification", "mixup").partners


def sources(seed=0):
    return image_sources(load_config(VIT_DIGITS, ("--loss.mixup_alpha=0.4", f"--seed={seed}")))


def test_neighbors_are_partners_and_one_that_is_left_over_is_its_own():
    assert partners(torch.arange(5)).tolist() == [1, 0, 3, 2, 4]
    assert partners(torch.arange(6).view(2, 3)).tolist() == [[3, 4, 5], [0, 1, 2]]
    assert partners(torch.arange(1)).tolist() == [0]


def test_weights_follow_from_seed_epoch_and_first_sample_alone():
    def weights(source, first_ones, epoch):
        return source.fetch(np.repeat(first_ones, 2), epoch)["own_weight"][::2]

    train, _ = sources()
    other_seed, _ = sources(seed=1)
    assert_drawn_by_seed_epoch_and_sample(partial(weights, train), partial(weights, other_seed))
    *pairs, left_over = train.fetch(np.array([17, 3, 17, 40, 5]), 2)["own_weight"].tolist()
    assert len(set(pairs)) == 1
    assert left_over == 1


def test_evaluation_is_of_plain_images():
    train, evaluation = sources()
    assert "own_weight" not in evaluation.fetch(np.array([0, 1]), None)
    assert "own_weight" not in train.fetch(np.array([0, 1]), None)


def test_odd_micro_batches_would_part_pairs():
    words = ("--batch.global_batch_size=45", "--batch.micro_batch_size=15")
    with pytest.raises(ConfigError, match=r"batch\.micro_batch_size: 15 is odd, but loss\.mixup_alpha mixes"):
        load_config(VIT_DIGITS, ("--loss.mixup_alpha=0.2", *words))
    load_config(VIT_DIGITS, words)
