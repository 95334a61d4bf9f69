"""The model of this folder, and an example batch."""

import torch
from transformers import BertConfig, BertForMaskedLM

from largebatch.model.attention import freeze_key_biases
from largebatch.model.token_losses import example_tokens, return_token_losses

from .config import Config


def build_model(config: Config) -> BertForMaskedLM:
    """A BERT with random weights, without next-sentence prediction, which returns losses if it is given targets."""
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=config.model.vocab_size,
            max_position_embeddings=config.model.max_positions,
            **config.model.settings,
            initializer_range=config.model.initializer_range,
            # Blocks have no padding, and the embedding of a padding token would stay zero.
            pad_token_id=None,
        )
    )
    freeze_key_biases(model)
    # Compute the cross-entropy in the output layer, chunk by chunk: logits would be the largest tensor of all.
    return_token_losses(model)
    return model


def example_batch(config: Config) -> dict[str, torch.Tensor]:
    """A micro-batch of the arguments with which training calls the model."""
    return example_tokens(config)
