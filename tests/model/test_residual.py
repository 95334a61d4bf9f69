"""How residual networks start, after Goyal et al. 2017, section 5.1."""

import pytest
import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

import tasks

initialize = tasks.module("image_classification", "initialization").initialize


def resnet(layer_type: str = "bottleneck") -> ResNetForImageClassification:
    torch.manual_seed(0)
    sizes = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2]}
    return ResNetForImageClassification(ResNetConfig(layer_type=layer_type, num_labels=1000, **sizes))


def blocks(model: nn.Module) -> list[nn.Module]:
    return [block for stage in model.resnet.encoder.stages for block in stage.layers]


@pytest.mark.parametrize("layer_type", ["basic", "bottleneck"])
@pytest.mark.parametrize("training", [True, False])
def test_blocks_start_as_their_shortcuts(layer_type, training):
    """What comes in is rectified already, so a block whose shortcut is the identity hands it on bit for bit."""
    model = resnet(layer_type)
    initialize(model)
    model.train(training)
    shortcuts = []
    for block in blocks(model):
        channels = next(block.layer.parameters()).shape[1]
        hidden = torch.rand(4, channels, 6, 6)
        assert torch.equal(block(hidden), block.shortcut(hidden).relu())
        shortcuts.append(type(block.shortcut).__name__)
    assert shortcuts.count("Identity") in (2, 3)


def test_only_the_last_norms_are_zero():
    model = resnet()
    initialize(model)
    norms = {name: module for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)}
    zero = {name for name, module in norms.items() if (module.weight == 0).all()}
    # The third of each block of three.
    assert zero == {name for name in norms if ".layer.2." in name}
    assert len(zero) == 4
    assert all((norms[name].weight == 1).all() for name in norms.keys() - zero)
    assert all((module.bias == 0).all() for module in norms.values())


def test_the_classifier_is_small():
    model = resnet()
    initialize(model)
    weight = model.classifier[1].weight
    bias = model.classifier[1].bias
    # 32,000 draws: of their mean 5.6e-5 is one standard deviation, of their deviation 4e-5.
    assert weight.mean().item() == pytest.approx(0, abs=3e-4)
    assert weight.std().item() == pytest.approx(0.01, abs=2e-4)
    assert (weight.abs() > 0.02).float().mean().item() == pytest.approx(0.0455, abs=0.006)
    assert (bias == 0).all()


def test_running_statistics_keep_nine_tenths():
    model = resnet()
    initialize(model)
    layer = model.resnet.embedder.embedder.normalization
    layer.running_mean.fill_(1.0)
    layer(torch.full((2, 16, 3, 3), 6.0))
    assert layer.running_mean.tolist() == pytest.approx([0.9 * 1 + 0.1 * 6] * 16)
    assert {m.momentum for m in model.modules() if isinstance(m, nn.BatchNorm2d)} == {0.1}
