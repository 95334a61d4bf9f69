"""ResNet for small images: CIFAR's ResNet-18, and what is saved of it."""

import pytest
import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

import tasks
from largebatch.config import load_config
from paths import CIFAR

SmallImageResNet = tasks.module("image_classification", "small_image_resnet").SmallImageResNet

SMALL = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3)


def test_the_recipes_model_is_cifars_resnet_18():
    model = tasks.build_model(CIFAR)(load_config(CIFAR))
    # 3 x 3 x 3 x 64 in the stem; stages of 64, 128, 256, 512 with 1 x 1 shortcuts; their norms; 512 x 10 + 10.
    assert sum(p.numel() for p in model.parameters()) == 11_173_962
    hidden = model.resnet(torch.zeros(2, 3, 32, 32), output_hidden_states=True).hidden_states
    assert [state.shape[-1] for state in hidden] == [32, 32, 16, 8, 4]


def test_the_stem_is_convolution_norm_and_relu_alone():
    torch.manual_seed(0)
    model = SmallImageResNet(SMALL).train()
    images = torch.randn(5, 3, 12, 12)
    stem = model.resnet.embedder
    convolved = nn.functional.conv2d(images, stem.embedder.convolution.weight, padding=1)
    normalized = nn.functional.batch_norm(convolved, None, None, training=True)
    torch.testing.assert_close(stem(images), normalized.relu())


def test_it_is_read_back_and_by_nothing_else(tmp_path):
    model = SmallImageResNet(SMALL).eval()
    model.save_pretrained(tmp_path)
    again = SmallImageResNet.from_pretrained(tmp_path).eval()
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(model(images).logits, again(images).logits)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        ResNetForImageClassification.from_pretrained(tmp_path)
