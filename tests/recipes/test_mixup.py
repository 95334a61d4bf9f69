"""Mixup: who is mixed with whom, by how much, and that it does not depend on how a global batch is divided."""

import numpy as np
import pytest
import torch

import tasks
from largebatch.config import load_config
from largebatch.errors import ConfigError
from paths import VIT_DIGITS

image_sources = tasks.sources("image_classification")
model_input = tasks.module("image_classification", "data").model_input
mixed_cross_entropy = tasks.module("image_classification", "mixup").mixed_cross_entropy
partners = tasks.module("image_classification", "mixup").partners


def sources(alpha: float = 0.4, seed: int = 0):
    config = load_config(VIT_DIGITS, (f"--loss.mixup_alpha={alpha}", f"--seed={seed}"))
    return config, *image_sources(config)


def test_neighbors_are_partners_and_one_that_is_left_over_is_its_own():
    assert partners(torch.arange(5)).tolist() == [1, 0, 3, 2, 4]
    assert partners(torch.arange(6).view(2, 3)).tolist() == [[3, 4, 5], [0, 1, 2]]
    assert partners(torch.arange(1)).tolist() == [0]


def test_weights_follow_from_seed_epoch_and_first_sample_alone():
    _, train, _ = sources()
    whole = train.fetch(np.array([5, 900, 17, 3, 40, 41]), 2)["own_weight"]
    assert torch.equal(train.fetch(np.array([17, 3]), 2)["own_weight"], whole[2:4])
    assert torch.equal(train.fetch(np.array([17, 40]), 2)["own_weight"], whole[2:4])
    assert (whole.view(3, 2)[:, 0] == whole.view(3, 2)[:, 1]).all()
    assert len(set(whole.tolist())) == 3
    assert (train.fetch(np.array([17, 3]), 3)["own_weight"] != whole[2:4]).all()
    assert (sources(seed=1)[1].fetch(np.array([17, 3]), 2)["own_weight"] != whole[2:4]).all()
    assert train.fetch(np.array([17, 3, 5]), 2)["own_weight"][2] == 1


@pytest.mark.parametrize("alpha", [0.2, 2.0])
def test_weights_are_of_the_beta_distribution(alpha):
    """Mean a half, variance 1 / (8 alpha + 4); of 2,000 draws."""
    _, train, _ = sources(alpha)
    weights = np.concatenate([train.fetch(np.arange(1000), epoch)["own_weight"][::2].numpy() for epoch in range(4)])
    assert weights.mean() == pytest.approx(0.5, abs=0.04)
    assert weights.var() == pytest.approx(1 / (8 * alpha + 4), rel=0.1)


def test_images_and_labels_are_mixed_by_the_same_weights():
    config, train, _ = sources()
    indices = np.array([0, 1, 2, 3, 4])
    batch = train.fetch(indices, 0)
    weight = batch["own_weight"]
    labels = batch["labels"]
    plain = model_input(train.samples.fetch(indices, 0), config.data)
    mixed = model_input(batch, config.data)
    logits = torch.randn(5, 10, generator=torch.Generator().manual_seed(0))
    losses = mixed_cross_entropy(logits, batch, label_smoothing=0.0)
    for own, other in ((0, 1), (1, 0), (2, 3), (3, 2), (4, 4)):
        expected = weight[own] * plain[own] + (1 - weight[own]) * plain[other]
        torch.testing.assert_close(mixed[own], expected)
        log_p = logits[own].log_softmax(0)
        by_hand = -weight[own] * log_p[labels[own]] - (1 - weight[own]) * log_p[labels[other]]
        torch.testing.assert_close(losses[own], by_hand)


def test_evaluation_is_of_plain_images():
    _, train, evaluation = sources()
    assert "own_weight" not in evaluation.fetch(np.array([0, 1]), None)
    assert "own_weight" not in train.fetch(np.array([0, 1]), None)


def test_odd_micro_batches_would_part_pairs():
    words = ("--batch.global_batch_size=45", "--batch.micro_batch_size=15")
    with pytest.raises(ConfigError, match=r"batch\.micro_batch_size: 15 is odd, but loss\.mixup_alpha mixes"):
        load_config(VIT_DIGITS, ("--loss.mixup_alpha=0.2", *words))
    load_config(VIT_DIGITS, words)
