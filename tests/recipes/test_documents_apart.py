"""Blocks whose documents do not see each other: each token has the loss that it has in its document alone."""

from pathlib import Path

import numpy as np
import pytest
import torch
from test_what_tokens_see import losses_and_gradients

import tasks
from largebatch.config import load_config
from paths import LLAMA, PYDOC
from small_data import load_with, rows_in

text_sources = tasks.sources("causal_lm")

SMALL = ("--model.num_layers=2", "--model.hidden_size=32", "--model.num_heads=2")
MODELS = {"gpt2": (PYDOC, SMALL), "llama": (LLAMA, (*SMALL, "--model.num_kv_heads=1", "--model.intermediate_size=48"))}


def blocks_of(recipe, words, tmp_path):
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
        "attention": "document",
    }
    config = load_with(recipe, data, *words)
    torch.manual_seed(0)
    return tasks.build_model(recipe)(config).train(), text_sources(config)[0].fetch(np.arange(4), 0)


@pytest.mark.parametrize("name", MODELS)
def test_each_token_has_the_loss_of_its_document_alone(name, tmp_path):
    recipe, words = MODELS[name]
    model, batch = blocks_of(recipe, words, tmp_path)
    losses, gradients = losses_and_gradients(model, batch)
    alone = []
    summed = dict.fromkeys(gradients, 0)
    for inputs, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        # Cut behind each zero byte.
        sizes = np.diff([0, *(np.flatnonzero(inputs.numpy() == 0) + 1), len(inputs)])
        pieces = zip(inputs.split(sizes.tolist()), labels.split(sizes.tolist()), strict=True)
        for piece, targets in pieces:
            if len(piece):
                more, gradient = losses_and_gradients(model, {"input_ids": piece[None], "labels": targets[None]})
                alone += more
                summed = {key: summed[key] + gradient[key] for key in gradient}
    assert losses == pytest.approx(alone, rel=1e-5, abs=1e-6)
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, summed[key], rtol=1e-4, atol=1e-5)
    # Which seeing the whole block does not give.
    del batch["position_ids"]
    assert losses_and_gradients(model, batch)[0] != pytest.approx(losses, rel=1e-3)


@pytest.mark.parametrize("recipe", ["llama31_8b_c4", "gpt2_124m"])
def test_the_example_has_positions_too(recipe):
    """Memory is estimated from it: of Megatron's files as of text from the hub."""
    example_batch = tasks.module("causal_lm", "model").example_batch
    config = load_config(Path("recipes/causal_lm", f"{recipe}.json"), ["--data.attention=document"])
    assert example_batch(config).keys() == {"input_ids", "targets", "position_ids"}
