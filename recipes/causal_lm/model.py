"""The models of this folder, and an example batch."""

import math
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from largebatch.config.data import TokenizedText
from largebatch.model.token_losses import example_tokens, return_token_losses

from .config import Config, Gpt2, Llama

# Those of Llama 3.1, as in its config.json, besides the factor.
LLAMA_31_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA_31_CONTEXT = 131072


def build_model(config: Config) -> GPT2LMHeadModel | LlamaForCausalLM:
    """A GPT-2 or a Llama with random weights, which returns losses if it is given targets."""
    section = config.model
    size = config.data.block_size
    model = build_llama(section, size) if isinstance(section, Llama) else build_gpt2(section, size)
    # Compute the cross-entropy in the output layer, chunk by chunk: logits would be the largest tensor of all.
    return_token_losses(model)
    return model


def build_llama(section: Llama, block_size: int) -> LlamaForCausalLM:
    """The Llama that a recipe's model section describes."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": section.rope_theta}
    if section.rope_scaling_factor is not None:
        rope |= {"rope_type": "llama3", "factor": section.rope_scaling_factor, **LLAMA_31_ROPE}
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=section.vocab_size,
            max_position_embeddings=LLAMA_31_CONTEXT if section.rope_scaling_factor else block_size,
            hidden_size=section.hidden_size,
            intermediate_size=section.intermediate_size,
            num_hidden_layers=section.num_layers,
            num_attention_heads=section.num_heads,
            num_key_value_heads=section.num_kv_heads,
            rope_parameters=rope,
            rms_norm_eps=section.norm_eps,
            tie_word_embeddings=section.tie_embeddings,
            initializer_range=section.initializer_range,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    if section.scaled_residual_init:
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(weight, std=section.initializer_range / math.sqrt(2 * section.num_layers))
    return model


def build_gpt2(section: Gpt2, block_size: int) -> GPT2LMHeadModel:
    """The GPT-2 that a recipe's model section describes."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=section.vocab_size,
            n_positions=block_size,
            n_embd=section.hidden_size,
            n_layer=section.num_layers,
            n_head=section.num_heads,
            # GPT-2's own function in one kernel; the default computes it in eight.
            activation_function="gelu_pytorch_tanh",
            embd_pdrop=section.dropout,
            attn_pdrop=section.dropout,
            resid_pdrop=section.dropout,
            initializer_range=section.initializer_range,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def example_batch(config: Config) -> dict[str, torch.Tensor]:
    """A micro-batch of the arguments with which training calls the model."""
    keeps_apart = isinstance(config.data, TokenizedText) and config.data.attention == "document"
    return example_tokens(config, *["position_ids"] * keeps_apart)
