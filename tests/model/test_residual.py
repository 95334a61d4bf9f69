"""How residual networks start, after Goyal et al. 2017, section 5.1."""

import pytest
import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

import tasks

initialize = tasks.module("image_classification", "initialization").initialize


def resnet(layer_type):
    torch.manual_seed(0)
    sizes = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2]}
    return ResNetForImageClassification(ResNetConfig(layer_type=layer_type, num_labels=1000, **sizes))


@pytest.mark.parametrize(("layer_type", "last"), [("basic", 1), ("bottleneck", 2)])
def test_only_the_last_norm_of_each_block_starts_at_zero(layer_type, last):
    """What comes in is rectified already, so a block whose shortcut is the identity hands it on."""
    model = resnet(layer_type)
    initialize(model)
    norms = {name: module for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)}
    zero = {name for name in norms if f".layer.{last}." in name}
    assert len(zero) == 4
    for name, module in norms.items():
        assert (module.weight == (name not in zero)).all(), name
        assert (module.bias == 0).all(), name


def test_the_classifier_is_small():
    model = resnet("bottleneck")
    initialize(model)
    weight = model.classifier[1].weight
    bias = model.classifier[1].bias
    # 32,000 draws: of their mean 5.6e-5 is one standard deviation, of their deviation 4e-5.
    assert weight.mean().item() == pytest.approx(0, abs=3e-4)
    assert weight.std().item() == pytest.approx(0.01, abs=2e-4)
    assert (weight.abs() > 0.02).float().mean().item() == pytest.approx(0.0455, abs=0.006)
    assert (bias == 0).all()
