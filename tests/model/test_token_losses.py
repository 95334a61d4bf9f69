"""Losses from the output layer itself: the same training on every strategy, without a tensor of the logits' size."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tasks
from largebatch.config import load_config
from largebatch.data.text import IGNORE_INDEX
from largebatch.errors import UserError
from largebatch.model import token_losses
from largebatch.model.token_losses import return_token_losses
from paths import BERT, LLAMA, PYDOC

AutoCausalLM = tasks.module("sft", "config").AutoCausalLM
load_causal_lm = tasks.module("sft", "model").load_causal_lm


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation gives, forward or backward."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [tensor.numel() for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


@pytest.mark.parametrize("recipe", [PYDOC, LLAMA, BERT])
def test_there_is_no_tensor_of_the_logits_size(recipe, monkeypatch):
    monkeypatch.setattr(token_losses, "MAX_LOGITS", 2**13)
    config = load_config(recipe, ("--model.vocab_size=4096", "--data.block_size=32"))
    tokens = torch.arange(32 * 32).view(32, 32)
    logits = tokens.numel() * 4096
    model = tasks.build_model(recipe)(config)
    with LargestTensor() as plain:
        outputs = model(input_ids=tokens).logits
        cross_entropy(outputs.transpose(1, 2), tokens).backward()
    assert plain.elements >= logits
    return_token_losses(model)
    with LargestTensor() as mine:
        model(input_ids=tokens, targets=tokens).sum().backward()
    with LargestTensor() as evaluated, torch.no_grad():
        model(input_ids=tokens, targets=tokens)
    assert max(mine.elements, evaluated.elements) < logits / 4


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
}
# What is done to logits: nothing, twice; soft-capped; multiplied; divided.
MODELS = {
    "qwen2": {},
    "phi": {},
    "gemma2": {"final_logit_softcapping": 0.5},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 8.0},
}


@pytest.mark.parametrize("kind", MODELS)
def test_any_model_of_transformers(kind):
    """Those that make more of their logits give the losses of what they make."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    known = AutoConfig.for_model(kind)
    sizes = {name: value for name, value in SIZES.items() if hasattr(known, name)}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **MODELS[kind])).train()
    names = list(model.state_dict())
    tokens = torch.arange(24).view(2, 12)
    targets = (tokens + 1).index_fill(1, torch.tensor([0, 5]), IGNORE_INDEX)
    logits = model(input_ids=tokens).logits
    expected = cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return_token_losses(model)
    torch.testing.assert_close(model(input_ids=tokens, targets=targets), expected, rtol=1e-5, atol=1e-6)
    assert model(input_ids=tokens).logits.shape == logits.shape
    assert list(model.state_dict()) == names


def test_adapters_on_the_output_layer_count():
    section = {"model_type": "llama", **SIZES}
    lora = {"rank": 2, "alpha": 64, "target_modules": ["lm_head"]}
    model = load_causal_lm(AutoCausalLM(architecture="auto", config=section, lora=lora))
    for name, parameter in model.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(parameter)
    tokens = torch.arange(24).view(2, 12)
    expected = cross_entropy(model(input_ids=tokens).logits.transpose(1, 2), tokens, reduction="none")
    return_token_losses(model)
    torch.testing.assert_close(model(input_ids=tokens, targets=tokens), expected)


def test_a_model_that_could_not_be_asked_is_asked_in_training():
    section = AutoCausalLM(architecture="auto", config={"model_type": "granite", "logits_scaling": 8.0, **SIZES})
    with torch.device("meta"):
        model = load_causal_lm(section)
    return_token_losses(model)
    model.to_empty(device="cpu")
    with pytest.raises(UserError, match=r"GraniteForCausalLM changes the logits.*compute the loss from logits"):
        model(input_ids=torch.zeros(1, 4, dtype=torch.int64), targets=torch.zeros(1, 4, dtype=torch.int64))


def test_targets_of_another_shape_are_refused():
    model = tasks.build_model(PYDOC)(load_config(PYDOC))
    return_token_losses(model)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"targets of shape \(16,\); give a target"):
        model(input_ids=tokens, targets=tokens.flatten())
