"""What a Llama's section refuses."""

import math

import pytest
import torch

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
    frequencies = plain.model.rotary_emb.inv_freq
    wavelengths = 2 * math.pi / frequencies
    smooth = ((8192 / wavelengths - 1) / (4 - 1)).clamp(0, 1)
    assert (smooth[0], smooth[-1]) == (1, 0)
    expected = (1 - smooth) * frequencies / 8 + smooth * frequencies
    torch.testing.assert_close(scaled.model.rotary_emb.inv_freq, expected, rtol=1e-5, atol=0)
    layer = scaled.model.layers[1]
    smaller = 0.02 / math.sqrt(2 * scaled.config.num_hidden_layers)
    residual = {layer.self_attn.o_proj: smaller, layer.mlp.down_proj: smaller}
    for linear, deviation in {layer.mlp.up_proj: 0.02, **residual}.items():
        assert linear.weight.std().item() == pytest.approx(deviation, rel=0.02)
