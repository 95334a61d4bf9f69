"""Documents are kept apart by positions that are given, and only by those."""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from largebatch.model.given_positions import keep_apart_by_given_positions

NO_TOKENS = {"use_cache": False, "bos_token_id": None, "eos_token_id": None}
TOKENS = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(0))
TWO_DOCUMENTS = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, 12)


def models():
    torch.manual_seed(0)
    llama = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
        **NO_TOKENS,
    )
    gpt2 = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, **NO_TOKENS)
    return [LlamaForCausalLM(llama).eval(), GPT2LMHeadModel(gpt2).eval()]


@pytest.mark.parametrize("number", [0, 1])
def test_the_same_logits_as_each_document_alone(number):
    model = models()[number]
    with torch.no_grad():
        whole = model(input_ids=TOKENS).logits
        alone = [model(input_ids=TOKENS[:, part]).logits for part in (slice(0, 5), slice(5, 12))]
        keep_apart_by_given_positions(model)
        apart = model(input_ids=TOKENS, position_ids=TWO_DOCUMENTS).logits
        torch.testing.assert_close(apart, torch.cat(alone, dim=1), rtol=1e-5, atol=1e-5)
        assert torch.equal(model(input_ids=TOKENS).logits, whole)
        one = model(input_ids=TOKENS, position_ids=torch.arange(12).expand(2, 12)).logits
        torch.testing.assert_close(one, whole, rtol=1e-5, atol=1e-5)


def test_other_models_of_the_process_look_at_their_positions_as_before():
    ours, theirs = models()[0], models()[0]
    with torch.no_grad():
        expected = theirs(input_ids=TOKENS, position_ids=TWO_DOCUMENTS).logits
        keep_apart_by_given_positions(ours)
        ours(input_ids=TOKENS)
        assert torch.equal(theirs(input_ids=TOKENS, position_ids=TWO_DOCUMENTS).logits, expected)


def test_a_part_of_a_larger_model_is_given_positions_by_the_larger_one():
    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, tokens):
            return self.inner(input_ids=tokens, position_ids=TWO_DOCUMENTS).logits

    inner = models()[0]
    with torch.no_grad():
        expected = inner(input_ids=TOKENS, position_ids=TWO_DOCUMENTS).logits
        whole = Wrapper(inner)
        keep_apart_by_given_positions(whole)
        assert torch.equal(whole(TOKENS), expected)


def test_positions_by_place():
    """`LlamaForCausalLM.forward(input_ids, attention_mask, position_ids)`."""
    model = models()[0]
    with torch.no_grad():
        expected = model(input_ids=TOKENS, position_ids=TWO_DOCUMENTS).logits
        keep_apart_by_given_positions(model)
        assert torch.equal(model(TOKENS, None, TWO_DOCUMENTS).logits, expected)


def test_models_that_are_not_of_transformers_are_left_alone():
    model = nn.Linear(2, 2)
    keep_apart_by_given_positions(model)
    assert "forward" not in vars(model)
