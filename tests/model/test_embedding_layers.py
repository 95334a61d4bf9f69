"""The layers that models name as their embeddings, where there are any."""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, ResNetConfig, ResNetForImageClassification

from largebatch.model.parts import embedding_layer


def test_the_models_own_layers():
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=1))
    assert embedding_layer(model, "get_input_embeddings") is model.transformer.wte
    assert embedding_layer(model, "get_output_embeddings") is model.lm_head


@pytest.mark.parametrize("getter", ["get_input_embeddings", "get_output_embeddings"])
def test_models_that_have_none(getter):
    """A ResNet raises NotImplementedError for one of them, and returns None for the other."""
    with torch.device("meta"):
        model = ResNetForImageClassification(ResNetConfig())
    assert embedding_layer(model, getter) is None
    assert embedding_layer(nn.Linear(2, 2), getter) is None
