"""Weights gathered in bf16 train as those gathered in fp32 do, to the last bit."""

import sys
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import nn

import tasks
from jobs import run_job
from largebatch.backend.gathers import GatheredWeight, weights_in_bf16
from largebatch.config import load_config
from largebatch.config.sections import Compute
from largebatch.errors import BackendMismatch
from paths import ADDITION, DIGITS, LLAMA, PYDOC
from test_strategies import LAMB, LARS, differences, recorded

# Sizes that do not divide over the processes.
SMALL = ("--model.num_layers=2", "--model.hidden_size=34", "--model.num_heads=2", "--data.block_size=16")
SMALL_LLAMA = (*SMALL, "--model.num_heads=1", "--model.num_kv_heads=1", "--model.intermediate_size=47")
RECOMPUTED = "--compute.activation_checkpointing=full"
COMPILED = "--compute.compile=on"
ACCUMULATED = "--batch.micro_batch_size=4"
# Recipe, overrides, strategy and processes: one of each kind of layer, wrapper and policy. bench/results/gathers has
# more of them, each under every strategy.
RECIPES = {
    "GPT-2, recomputed, LAMB": (PYDOC, (*SMALL, RECOMPUTED, LAMB, ACCUMULATED), ("hsdp", 4)),
    "Llama, compiled": (LLAMA, (*SMALL_LLAMA, COMPILED), ("fsdp", 2)),
    "ResNet, LARS": (DIGITS, (LARS, "--learning_rate.base_lr=0.5"), ("fsdp", 2)),
    "Qwen, LoRA, recomputed": (ADDITION, ('--model.lora={"rank": 4, "alpha": 8}', RECOMPUTED), ("fsdp", 2)),
}


def trained(run_dir, recipe, *words):
    """The results of a run, and the weights that it gathered in bf16."""
    from largebatch.backend import fsdp, gathers
    from largebatch.backend.torch_internals import sharded_parameters

    # Compiling kernels takes a minute, and gathered weights are traced without it, too.
    torch.compile = partial(torch.compile, backend="aot_eager")
    found = []

    def gather_and_look(model, names):
        gathers.gather_in_bf16(model, names)
        found.extend(
            name
            for name, shard in sharded_parameters(model)
            if hasattr(shard.sharded_param._local_tensor, "fsdp_pre_all_gather")
        )

    fsdp.gather_in_bf16 = gather_and_look
    return recorded(recipe, run_dir, "--precision=bf16", *words), found


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_the_bits_are_those_of_gathers_in_fp32(name, tmp_path):
    recipe, words, (strategy, world_size) = RECIPES[name]
    words = (*words, "--train.stop_after_steps=2", "--evaluation.max_samples=20")
    place = {"strategy": strategy, "world_size": world_size, "environment": {"LARGEBATCH_SHARD_SIZE": "2"}}
    (half, in_bf16), (full, none) = (
        run_job(trained, tmp_path / kind, recipe, *words, f"--compute.gather_in_bf16={kind}", **place)[0]
        for kind in ("true", "false")
    )
    assert in_bf16
    assert not none
    assert not differences(half, full)


def test_a_weight_that_a_layer_computes_is_gathered_in_fp32():
    plain = nn.Linear(4, 4)
    normalized = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    plan = SimpleNamespace(precision="bf16", compute=Compute())
    assert weights_in_bf16(nn.Sequential(plain, normalized), plan) == {plain.weight}


def test_an_output_layer_whose_weight_others_may_use_is_gathered_in_fp32():
    plan = SimpleNamespace(precision="bf16", compute=Compute())
    build_model = tasks.build_model(LLAMA)

    def count_in_bf16(is_tied):
        config = load_config(LLAMA, [*SMALL_LLAMA, f"--model.tie_embeddings={is_tied}"])
        return len(weights_in_bf16(build_model(config), plan))

    shared = count_in_bf16("true")
    assert count_in_bf16("false") == shared + 1
    # The loss of what `transformers` returns is up to the task.
    with patch.object(sys.modules[build_model.__module__], "return_token_losses"):
        assert count_in_bf16("false") == shared


def test_a_gathered_weight_is_fp32_to_autograd_and_nothing_but_casts_use_it():
    numbers = torch.randn(3, 4).bfloat16()
    weight = nn.Parameter(GatheredWeight(numbers, "layer.weight"))
    inputs = torch.randn(2, 4)
    plain = nn.Parameter(numbers.float())

    @torch.autocast("cpu", torch.bfloat16)
    def used_twice(parameter):
        return nn.functional.linear(inputs, parameter) + nn.functional.linear(inputs, parameter)

    output = used_twice(weight)
    expected = used_twice(plain)
    (output.sum() + expected.sum()).backward()
    assert torch.equal(output, expected)
    assert weight.grad.dtype == torch.float32
    assert torch.equal(weight.grad, plain.grad)
    assert "layer.weight" in str(GatheredWeight(numbers, "layer.weight"))
    for use in (lambda: nn.functional.linear(inputs, weight), lambda: weight * 2, lambda: weight.sum()):
        with pytest.raises(BackendMismatch, match=r"^layer\.weight is gathered in bf16, but aten.* set compute"):
            use()
