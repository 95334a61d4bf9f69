"""Attention of models of `transformers`: documents kept apart, implementations by name, and key biases."""

from functools import partial

import pytest
import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

import tasks
from largebatch.config import load_config
from largebatch.errors import UserError
from largebatch.model.attention import freeze_key_biases, keep_documents_apart, set_attention
from paths import LLAMA, PYDOC
from test_strategies import SMALL_GPT, SMALL_LLAMA

TOKENS = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(0))
TWO_DOCUMENTS = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, 12)


def built(recipe, words):
    torch.manual_seed(0)
    return tasks.build_model(recipe)(load_config(recipe, words)).eval()


llama = partial(built, LLAMA, SMALL_LLAMA)
gpt2 = partial(built, PYDOC, SMALL_GPT)


@pytest.mark.parametrize(
    ("build", "implementation"),
    [(llama, None), (llama, "eager"), (llama, "sdpa"), (llama, "flex_attention"), (gpt2, None), (gpt2, "eager")],
)
def test_the_same_logits_as_each_document_alone(build, implementation):
    model = build()
    # Compiling `flex_attention` takes a minute, and changes nothing.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        whole = model(input_ids=TOKENS).logits
        alone = [model(input_ids=TOKENS[:, part]).logits for part in (slice(0, 5), slice(5, 12))]
        if implementation:
            set_attention(model, implementation)
        keep_documents_apart(model)
        apart = model(input_ids=TOKENS, position_ids=TWO_DOCUMENTS).logits
        torch.testing.assert_close(apart, torch.cat(alone, dim=1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model(input_ids=TOKENS).logits, whole, rtol=1e-5, atol=1e-5)
        one = model(input_ids=TOKENS, position_ids=torch.arange(12).expand(2, 12)).logits
        torch.testing.assert_close(one, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flash_attention_3", "flash_attention_4"])
def test_implementations_that_ignore_documents_are_refused_with_positions(implementation):
    model = llama()
    keep_documents_apart(model, implementation)
    message = f'"{implementation}" ignores; write one of eager, sdpa, flex_attention, or call LlamaForCausalLM with'
    with pytest.raises(UserError, match=message):
        model(input_ids=TOKENS, position_ids=TWO_DOCUMENTS)
    # By place, positions may be among the arguments.
    with pytest.raises(UserError, match=message):
        model(TOKENS, None, TWO_DOCUMENTS)
    assert torch.equal(model(input_ids=TOKENS).logits, llama()(input_ids=TOKENS).logits)


def test_an_implementation_is_set_or_refused():
    model = llama()
    set_attention(model, "eager")
    assert model.config._attn_implementation == "eager"
    with pytest.raises(UserError, match='attention: "flash_attention_2": FlashAttention2 has been toggled on'):
        set_attention(model, "flash_attention_2")
    with pytest.raises(UserError, match='"flex_attention": GPT2LMHeadModel does not support'):
        set_attention(gpt2(), "flex_attention")
    with pytest.raises(UserError, match='"eager" needs a model of `transformers`, and Linear is not one; write null'):
        set_attention(nn.Linear(2, 2), "eager")


def test_other_models_of_the_process_look_at_their_positions_as_before():
    ours = llama()
    theirs = llama()
    with torch.no_grad():
        expected = theirs(input_ids=TOKENS, position_ids=TWO_DOCUMENTS).logits
        keep_documents_apart(ours)
        ours(input_ids=TOKENS)
        assert torch.equal(theirs(input_ids=TOKENS, position_ids=TWO_DOCUMENTS).logits, expected)


def test_a_part_of_a_larger_model_is_given_positions_by_name_or_place():
    """`LlamaForCausalLM.forward(input_ids, attention_mask, position_ids)`."""
    model = nn.Sequential(llama())
    with torch.no_grad():
        expected = model[0](input_ids=TOKENS, position_ids=TWO_DOCUMENTS).logits
        keep_documents_apart(model)
        assert torch.equal(model[0](input_ids=TOKENS, position_ids=TWO_DOCUMENTS).logits, expected)
        assert torch.equal(model[0](TOKENS, None, TWO_DOCUMENTS).logits, expected)


# --- key biases -------------------------------------------------------------------------------------------------------


def test_key_biases_are_frozen_and_nothing_else():
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    model = ViTForImageClassification(ViTConfig(**sizes))
    freeze_key_biases(model)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {f"vit.layers.{layer}.attention.k_proj.bias" for layer in range(2)}


def test_a_model_without_them():
    with pytest.raises(ValueError, match=r"Linear has no parameters named \*k_proj\.bias or \*key\.bias"):
        freeze_key_biases(nn.Linear(2, 2))
