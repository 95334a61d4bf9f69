"""The activations of Llama 8B, against bytes worked out by hand from the model's sizes."""

import json

import pytest

from largebatch.__main__ import main
from paths import ROOT

GIB = 2**30
LAYERS = 32
TOKENS = 8192
WIDTH = 4096
INNER = 14336
KEYS = 1024
HEADS = 32
HEAD = 128
VOCABULARY = 128256
BLOCK_MATRICES = [WIDTH**2, WIDTH * KEYS, WIDTH * KEYS, WIDTH**2, *3 * [WIDTH * INNER]]
MATRICES = [VOCABULARY * WIDTH, *LAYERS * BLOCK_MATRICES, VOCABULARY * WIDTH]
NORMS = (2 * LAYERS + 1) * WIDTH
WEIGHTS = sum(MATRICES) + NORMS


def activations(what="selective"):
    """Recomputed blocks in bfloat16 autocast, whose copies of weights only the block in use holds.

    "selective" keeps the results of q, k, v, attention with its logsumexp, o, gate, up and down in each block, of which
    the backward pass needs v, attention's, gate and up as they are.
    """
    stream = 4 * TOKENS * WIDTH  # the residual stream is fp32
    low = stream // 2
    norm = 2 * stream + 4 * TOKENS  # input, normalized input, inverse root of the mean square
    copies_of_weights = 2 * sum(BLOCK_MATRICES)
    inputs_of_products = 3 * low + 2 * low  # of q, k, v; of gate and up; o's is attention's output, down's comes below
    attention = 2 * low + 2 * 2 * TOKENS * KEYS + 4 * HEADS * TOKENS  # q, output; k, v; logsumexp
    mlp = 4 * 2 * TOKENS * INNER  # gate, silu(gate), up, their product
    block = copies_of_weights + 2 * norm + inputs_of_products + attention + mlp
    rotary = 2 * 4 * TOKENS * HEAD
    # Its inputs in fp32 and the gradients of inputs and weight, which the output layer computes with the losses.
    output = norm + 2 * stream + 4 * VOCABULARY * WIDTH
    if what == "full":
        return LAYERS * stream + block + rotary + output
    needed = low + 2 * TOKENS * KEYS + 4 * HEADS * TOKENS + 2 * 2 * TOKENS * INNER
    results = needed + 3 * low + 2 * TOKENS * KEYS
    return LAYERS * (stream + results) + block - needed + rotary + output


def test_the_sizes_are_llama_8bs():
    assert WEIGHTS == 8_030_261_248
    # Rounded: blocks' inputs 4, the block in use 2.25, the output layer with its norm 2.46.
    assert activations("full") / GIB == pytest.approx(8.72, abs=0.005)


@pytest.mark.parametrize("what", ["selective", "full"])
def test_what_is_kept_of_a_micro_batch(what, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    words = ("--world-sizes=512", "--gpu-memory=80", "--json", f"--compute.activation_checkpointing={what}")
    assert main(["plan", "llama_8b", *words]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["estimated_activation_bytes"] == pytest.approx(activations(what), rel=1e-3)
