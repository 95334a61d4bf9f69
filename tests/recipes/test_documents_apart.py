"""Blocks whose documents do not see each other: each token has the loss that it has in its document alone."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import tasks
from paths import LLAMA, PYDOC
from small_data import load_with, rows_in

text_sources = tasks.sources("causal_lm")

SMALL = ("--model.num_layers=2", "--model.hidden_size=32", "--model.num_heads=2")
MODELS = {"gpt2": (PYDOC, SMALL), "llama": (LLAMA, (*SMALL, "--model.num_kv_heads=1", "--model.intermediate_size=48"))}


def blocks_of(recipe, words, tmp_path, attention):
    """Blocks of 24 bytes from documents of 0 to 29, and the recipe's model."""
    documents = [
        "import torch",
        "",
        "a",
        "no process ever waits for one",
        "def f(x):",
        "x " * 12,
        "the end of it, no longer",
    ]
    data = rows_in(tmp_path / "text.jsonl", [{"text": document} for document in documents]) | {
        "tokenizer": "bytes",
        "block_size": 24,
        "num_train_samples": 4,
        "num_eval_samples": 1,
        "attention": attention,
    }
    config = load_with(recipe, data, *words)
    torch.manual_seed(0)
    return tasks.build_model(recipe)(config).train(), text_sources(config)[0].fetch(np.arange(4), 0)


def losses_and_gradients(model, inputs, labels, positions):
    model.zero_grad()
    logits = model(input_ids=inputs, position_ids=positions).logits
    losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    losses.sum().backward()
    return losses.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
def test_each_token_has_the_loss_of_its_document_alone(name, tmp_path):
    recipe, words = MODELS[name]
    model, batch = blocks_of(recipe, words, tmp_path, "document")
    losses, gradients = losses_and_gradients(model, batch["input_ids"], batch["labels"], batch["position_ids"])
    alone = []
    summed = dict.fromkeys(gradients, 0)
    for inputs, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        # Cut behind each zero byte.
        sizes = np.diff([0, *(np.flatnonzero(inputs.numpy() == 0) + 1), len(inputs)])
        pieces = zip(inputs.split(sizes.tolist()), labels.split(sizes.tolist()), strict=True)
        for piece, targets in pieces:
            if len(piece):
                more, gradient = losses_and_gradients(model, piece[None], targets[None], None)
                alone.append(more)
                summed = {key: summed[key] + gradient[key] for key in gradient}
    assert len(alone) > 7
    torch.testing.assert_close(losses, torch.cat(alone), rtol=1e-5, atol=1e-6)
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, summed[key], rtol=1e-4, atol=1e-5)
    # Which seeing the whole block does not give.
    whole, _ = losses_and_gradients(model, batch["input_ids"], batch["labels"], None)
    assert float((whole - losses).abs().max()) > 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_the_default_sees_the_whole_block(name, tmp_path):
    recipe, words = MODELS[name]
    _, batch = blocks_of(recipe, words, tmp_path, "block")
    assert batch.keys() == {"input_ids", "labels"}
