"""Key biases: frozen, because nothing depends on them."""

import pytest
import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from largebatch.model.initialization.attention import freeze_key_biases


def vit() -> ViTForImageClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=2, num_labels=3, **sizes)).double()


def test_key_biases_are_frozen_and_nothing_else():
    model = vit()
    freeze_key_biases(model)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {f"vit.layers.{layer}.attention.k_proj.bias" for layer in range(2)}


def test_the_loss_does_not_depend_on_them():
    """Whatever they are; while a query's bias, of the same size, changes it."""
    model, images = vit(), torch.randn(3, 3, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        before = model(images).logits
        for layer in model.vit.layers:
            nn.init.normal_(layer.attention.k_proj.bias)
        torch.testing.assert_close(model(images).logits, before, rtol=0, atol=1e-14)
        nn.init.normal_(model.vit.layers[0].attention.q_proj.bias)
        assert (model(images).logits - before).abs().max() > 1e-6


def test_a_model_without_them():
    with pytest.raises(ValueError, match=r"Linear has no parameters named \*k_proj\.bias or \*key\.bias"):
        freeze_key_biases(nn.Linear(2, 2))
