"""bench/scale: recipes as workloads, and the program from end to end."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import scale
from paths import DIGITS, ROOT
from workload import Workload, read_workload

CAUSAL_LM = ROOT / "recipes/causal_lm"


def test_parameters_of_gpt2():
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(vocab_size=50304, n_positions=1024, n_embd=768, n_layer=12, n_head=12))
    assert read_workload(CAUSAL_LM / "gpt2_124m.json") == Workload(model.num_parameters(), 12, 768, 1024, 2048, 16)


@pytest.mark.parametrize("name", ["llama_8b", "llama_1b"])
def test_parameters_of_llama(name):
    model = json.loads((CAUSAL_LM / f"{name}.json").read_text())["model"]
    config = LlamaConfig(
        vocab_size=model["vocab_size"],
        hidden_size=model["hidden_size"],
        intermediate_size=model["intermediate_size"],
        num_hidden_layers=model["num_layers"],
        num_attention_heads=model["num_heads"],
        num_key_value_heads=model["num_kv_heads"],
        tie_word_embeddings=model["tie_embeddings"],
    )
    with torch.device("meta"):
        assert read_workload(CAUSAL_LM / f"{name}.json").params == LlamaForCausalLM(config).num_parameters()


def test_operations_by_hand():
    """3 samples of 10 tokens: 6 x 100 weights x 10 tokens, and 12 x 2 layers x 5 x 10^2 of attention, each."""
    assert Workload(100, 2, 5, 10, 12, 3).micro_batch_flop == 3 * (6000 + 12000)


def test_other_recipes_are_refused():
    with pytest.raises(ValueError, match="is a recipe for image_classification; give one for causal_lm"):
        read_workload(DIGITS)


def test_projection():
    """The recipe's batch goes as far as there is a micro-batch for each GPU; one each goes to the end."""
    workload = Workload(params=10**9, layers=10, width=5, tokens=10, global_batch_size=512, micro_batch_size=8)
    fixed = scale.project(workload, 1.0, 0.5, 10e9, grows=False)
    assert {point["gpus"] for point in fixed} == {8, 16, 32, 64}
    assert {point["global_batch_size"] for point in fixed} == {512}
    # 192 samples are 3 micro-batches on 8 GPUs, and one and a half on 16.
    odd = scale.project(replace(workload, global_batch_size=192), 1.0, 0.5, 10e9, grows=False)
    assert {point["gpus"] for point in odd} == {8}
    growing = scale.project(workload, 1.0, 0.5, 10e9, grows=True)
    assert {point["gpus"] for point in growing} == set(scale.GPUS)
    assert all(point["global_batch_size"] == 8 * point["gpus"] for point in growing)
    by_place = {(point["strategy"], point["gpus"]): point for point in fixed}
    # 8 micro-batches of a second each, and what is not hidden.
    assert by_place["ddp", 8]["seconds"] == pytest.approx(8 / by_place["ddp", 8]["efficiency"])
    assert all(0 < point["efficiency"] < 1 for point in fixed + growing)
    # 16 GB of state on each GPU do not fit 10; 2 and less do.
    assert not by_place["ddp", 8]["fits"]
    assert by_place["zero3", 8]["fits"]


@pytest.mark.slow
def test_program(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scale.py", str(tmp_path / "out"), "--mfu", "0.5"])
    scale.main()
    text = (tmp_path / "out/README.md").read_text()
    assert capsys.readouterr().out == text
    about = json.loads((tmp_path / "out/scale.json").read_text())
    assert about["inputs"]["mfu"] == 0.5
    assert "an MFU of 0.5" in text
    recipe = about["recipes"]["llama_8b"]
    flop = 6 * 8_030_261_248 * 8192 + 12 * 32 * 4096 * 8192**2
    assert recipe["computing_seconds"] == pytest.approx(flop / (0.5 * 989e12))
    assert len(recipe["one micro-batch a GPU"]) == 6 * 10
    assert {point["series"] for point in about["published"]} >= {"MPT-7B, H100", "ResNet-50, P100, Goyal et al."}
