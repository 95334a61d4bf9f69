"""Model FLOPs utilization: numbers of the literature, and what torch counts of the operations it makes."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import tasks
from jobs import run_job, train
from largebatch.config import load_config
from largebatch.model.flops import multiplied_parameters, token_flops, utilization_of
from largebatch.storage.files import read_json_lines
from paths import ADDITION, BERT, DIGITS, LLAMA, PYDOC, ROOT, VIT_DIGITS

CPU = torch.device("cpu")


def without_weights(name, *words):
    """A recipe's configuration, and its model."""
    path = ROOT / f"recipes/causal_lm/{name}.json"
    config = load_config(path, words)
    with torch.device("meta"):
        return config, tasks.build_model(path)(config)


def test_gpt2_124m():
    """nanoGPT counts 123.65 million parameters without positions, of 124.44; its head's weights are the embedding's."""
    config, model = without_weights("gpt2_124m", "--model.vocab_size=50257", "--data.block_size=1024")
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808
    assert multiplied_parameters(model) == (123_653_376, 0)
    found = utilization_of(config, model, CPU, world_size=2)
    assert found.sample_flops == 1024 * (6 * 123_653_376 + 12 * 12 * 768 * 1024)
    # 300 samples a second on two devices of 312 TFLOP/s: 262.8 of 624.
    assert replace(found, peak_tflops=312.0).at(300.0) == pytest.approx(300 * 1024 * 0.855166e9 / 624e12, rel=1e-4)
    assert found.at(300.0) is None
    assert "the peak of the CPU in bf16 is unknown" in found.convention


def test_llama_3_8b():
    """Of 8.03 billion parameters, the 0.525 of an embedding that the output does not share are only looked up."""
    _, model = without_weights("llama_8b", "--model.vocab_size=128256", "--model.tie_embeddings=false")
    assert multiplied_parameters(model) == (8_030_261_248 - 128_256 * 4096, 0)


def test_what_is_not_trained_has_no_gradient():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3, bias=False), nn.Linear(3, 2))
    model[1].weight.requires_grad_(False)
    assert multiplied_parameters(model) == (3 * 2 + 2, 4 * 3)
    assert token_flops(8, 12, 0, 1, 1) == 6 * 8 + 4 * 12


@pytest.mark.parametrize(
    ("recipe", "words", "tolerance"),
    [
        # Biases and norms are no products: they are in N, and torch does not count them.
        (PYDOC, ["--model.hidden_size=256"], 0.01),
        (LLAMA, ["--model.hidden_size=256", "--model.num_heads=4", "--model.num_kv_heads=2"], 0.01),
        (BERT, ["--model.hidden_size=256"], 0.02),
        # Its head reads one token of all; positions are no products.
        (VIT_DIGITS, ["--model.hidden_size=256"], 0.05),
    ],
)
def test_as_torch_counts(recipe, words, tolerance):
    config = load_config(recipe, [*words, "--batch.micro_batch_size=2"])
    model = tasks.build_model(recipe)(config)
    inputs = tasks.module(recipe.parent.name, "model").example_batch(config)
    inputs.pop("targets", None)
    # Of the fused attention, torch's counter would count other products in the backward pass.
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(**inputs).logits.sum().backward()
    found = utilization_of(config, model, CPU, world_size=1)
    assert 2 * found.sample_flops == pytest.approx(counter.get_total_flops(), rel=tolerance)


@pytest.mark.parametrize("recipe", [DIGITS, ADDITION])
def test_what_there_is_no_formula_for(recipe):
    found = utilization_of(load_config(recipe), nn.Linear(1, 1), CPU, world_size=1)
    assert found.at(1.0) is None
    assert "not reported: there is a formula only for transformers" in found.convention


@pytest.mark.slow
def test_a_run_reports_it(tmp_path):
    """In each line, and of the whole run, from the throughput beside it."""
    words = ("--train.stop_after_steps=3", "--logging.every=1", "--logging.trackers=[]", "--logging.peak_tflops=1.0")
    run_job(partial(train, run_dir=tmp_path), PYDOC, *words, *tasks.SMALL, strategy="single")
    # A block has 12 x 16 x 16 in matrices and 13 x 16 in biases and norms; the last norm 2 x 16, the output 256 x 16.
    each = 16 * (6 * (12 * 256 + 15 * 16 + 256 * 16) + 12 * 16 * 16)
    lines = read_json_lines(tmp_path / "metrics.jsonl")
    summary = json.loads((tmp_path / "summary.json").read_text())
    for numbers in (*lines, summary):
        assert numbers["mfu"] == pytest.approx(numbers["samples_per_second"] * each / 1e12, abs=1e-5)
    assert "6 N + 12 L d T" in summary["mfu_convention"]
