"""What a Llama's section refuses."""

import math

import pytest

import tasks
from largebatch.config import load_config
from paths import LLAMA
from problems import problems_of


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--precision=fp64", 'precision: "fp64" would not be fp64 throughout: Llama'),
        ("--model.num_heads=128", "hidden_size 128 is not a multiple of 2 x num_heads 128"),
        ("--model.num_kv_heads=3", "num_heads 4 is not a multiple of num_kv_heads 3"),
    ],
)
def test_refused(word, message):
    assert message in "\n".join(problems_of(word, recipe=LLAMA))


def test_llama_31_starts_as_in_megatron_with_scaled_frequencies():
    """After the formulas of Llama 3.1's apply_rope_scaling and Megatron-LM's scaled_init_method_normal."""
    words = ["--model.rope_scaling_factor=8", "--model.scaled_residual_init=true", "--model.hidden_size=512"]
    plain, scaled = (tasks.build_model(LLAMA)(load_config(LLAMA, each)) for each in (words[2:], words))
    expected = []
    for frequency in plain.model.rotary_emb.inv_freq.double().tolist():
        wavelength = 2 * math.pi / frequency
        smooth = min(max((8192 / wavelength - 1) / (4 - 1), 0), 1)
        expected.append((1 - smooth) * frequency / 8 + smooth * frequency)
    assert scaled.model.rotary_emb.inv_freq.tolist() == pytest.approx(expected, rel=1e-5)
    assert expected[-1] == plain.model.rotary_emb.inv_freq[-1] / 8
    for name, weight in scaled.named_parameters():
        if name.endswith("proj.weight"):
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            layers = scaled.config.num_hidden_layers
            assert weight.std().item() == pytest.approx(0.02 / math.sqrt(2 * layers) if residual else 0.02, rel=0.02)
