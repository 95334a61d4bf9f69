"""A packed run is the unpacked one: each pair has the losses and gradients that it has alone, to rounding."""

import json
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import tasks
from largebatch.config import load_config
from largebatch.errors import UserError
from paths import ADDITION

AutoCausalLM = tasks.module("sft", "config").AutoCausalLM
pair_sources = tasks.sources("sft")
check_causal = tasks.module("sft", "attention").check_causal
check_packing = tasks.module("sft", "attention").check_packing
load_causal_lm = tasks.module("sft", "model").load_causal_lm

SMALL = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
# Positions that rotate queries and keys, that are learned, a window shorter than a pair, and experts.
ARCHITECTURES = {
    "llama": {"model_type": "llama", **SMALL},
    "gpt2": {"model_type": "gpt2", "vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "mistral": {"model_type": "mistral", "sliding_window": 3, **SMALL},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, **SMALL},
}
# Convolutions over neighboring tokens; positions counted from a mask, not taken from the caller.
UNABLE = {
    "lfm2": {"model_type": "lfm2", "full_attn_idxs": [1], **SMALL},
    "bloom": {"model_type": "bloom", "vocab_size": 256, "hidden_size": 32, "n_layer": 2, "n_head": 4},
}
PACKED = (
    "--data.packing=true",
    "--data.num_train_samples=1250",
    '--batch={"global_batch_size": 16, "micro_batch_size": 4}',
)


def build(config, attention="sdpa"):
    torch.manual_seed(0)
    model = load_causal_lm(AutoCausalLM(architecture="auto", config=config))
    model.set_attn_implementation(attention)
    return model.train()


def losses_of(model, batch):
    """The loss of each target token in order, as the recipe computes it."""
    logits = model(input_ids=batch["input_ids"], position_ids=batch.get("position_ids")).logits
    losses = cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
    return losses[batch["labels"] != -100]


@pytest.mark.parametrize(
    ("name", "attention"), [("llama", "sdpa"), ("gpt2", "eager"), ("mistral", "sdpa"), ("mixtral", "eager")]
)
def test_packs_give_each_pair_its_own_losses_and_gradients(name, attention):
    """Two packs, one padded, against each of their pairs alone in a batch of one."""
    packed, _ = pair_sources(load_config(ADDITION, PACKED))
    alone, _ = pair_sources(load_config(ADDITION))
    pack_numbers = np.array([0, 3])
    pairs = [number for pack in pack_numbers for number in range(packed.starts[pack], packed.starts[pack + 1])]
    batch = packed.fetch(pack_numbers, 0)
    assert len(pairs) > 10
    assert (batch["input_ids"] == 0).any()  # padding

    model = build(ARCHITECTURES[name], attention)
    weights = [*model.parameters()]
    losses = losses_of(model, batch)
    expected = torch.cat([losses_of(model, alone.fetch(np.array([number]), 0)) for number in pairs])
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)
    gradients = (torch.autograd.grad(each.sum(), weights) for each in (losses, expected))
    for gradient, expected_gradient in zip(*gradients, strict=True):
        difference = (gradient - expected_gradient).abs().max()
        assert difference <= 2e-5 * expected_gradient.abs().max() + 1e-7


@pytest.mark.parametrize("name", UNABLE)
def test_causal_models_that_do_not_are_refused(name):
    model = build(UNABLE[name], "eager")
    check_causal(model)
    with pytest.raises(UserError, match="does not keep the pairs of a pack apart"):
        check_packing(model)


@pytest.mark.parametrize("vocab_size", [256, 31])
def test_models_that_see_the_answers_are_refused(vocab_size):
    """Also where all the tokens that it is asked about might be one and the same."""
    bert = {"model_type": "bert", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    with pytest.raises(UserError, match=r"is not a causal language model: .* a token changes the logits of"):
        check_causal(build(bert | {"num_attention_heads": 4, "vocab_size": vocab_size}))


def test_models_that_can_be_built_but_not_run_are_refused():
    with pytest.raises(UserError, match=r"LlamaForCausalLM can be built but not run: .*; correct model.config"):
        check_causal(build({"model_type": "llama", **SMALL, "num_key_value_heads": 3}))
    words = (f"--model.config={json.dumps(ARCHITECTURES['mixtral'] | {'num_experts_per_tok': 5})}",)
    with pytest.raises(UserError, match=r"MixtralForCausalLM can be built but not run: .*out of range .*; correct"):
        tasks.build_model(ADDITION)(load_config(ADDITION, words))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), OSError(5, "x")])
def test_errors_that_are_not_the_models_are_not_taken_for_its(error, monkeypatch):
    config = load_config(ADDITION)
    model = load_causal_lm(config.model)
    monkeypatch.setattr(type(model), "forward", Mock(side_effect=error))
    for run in (partial(check_causal, model), partial(tasks.build_model(ADDITION), config)):
        with pytest.raises(type(error)):
            run()
