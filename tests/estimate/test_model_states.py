"""The bytes that a plan says each process holds, against the tensors of running jobs, to the byte."""

import gc
import json
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from jobs import run_job, write_zero_config
from largebatch.config import load_config
from largebatch.estimate.memory import model_states
from largebatch.estimate.model_shape import ModelShape, ParameterShape, Strategy, ZeroSettings
from largebatch.plan import resolve
from paths import ADDITION, DIGITS, LLAMA, PYDOC
from stepping import prepared

BUCKET = 50_000
ONE_MICRO_BATCH = SimpleNamespace(
    world_size=4, max_gradient_accumulation_steps=1, states_of=lambda shape, _: {"exp_avg": shape}
)
ZERO = {"overlap_comm": True, "reduce_bucket_size": BUCKET}
# Some of the models' parameters are larger than this, and cut up between passes.
LARGE = {**ZERO, "stage3_param_persistence_threshold": 1000}
# Sizes that neither 2, 3 nor 4 processes divide.
TRANSFORMER = ("--model.num_layers=2", "--model.hidden_size=34", "--model.num_heads=1", "--data.block_size=17")
# GPT-2's output layer is its embedding, Llama's is not. ResNet is trained with SGD.
MODELS = {
    "gpt2": (PYDOC, TRANSFORMER),
    "llama": (LLAMA, (*TRANSFORMER, "--model.num_kv_heads=1", "--model.intermediate_size=67")),
    "resnet": (DIGITS, ("--model.hidden_sizes=[7,11]", "--model.embedding_size=5", "--model.depths=[1,1]")),
    "gpt2 with muon": (PYDOC, (*TRANSFORMER, '--optimizer={"name": "muon"}')),
    # Frozen weights in bf16, and adapters in fp32.
    "adapters": (
        ADDITION,
        (
            '--model.config={"model_type": "llama", "vocab_size": 256, "hidden_size": 34, "intermediate_size": 67, '
            '"num_hidden_layers": 2, "num_attention_heads": 1}',
            '--model.lora={"rank": 2, "alpha": 4.0}',
            "--model.frozen_dtype=bf16",
            "--precision=bf16",
            # Its gathered weights have no storage of their own to be counted.
            "--compute.gather_in_bf16=false",
        ),
    ),
}


def zero(stage, settings):
    return Strategy(f"zero{stage}", ZeroSettings(stage, **settings)), settings


# A model, a strategy, what it sets in the recipe or in DeepSpeed's "zero_optimization".
JOBS = [
    ("gpt2", Strategy("ddp"), ()),
    ("gpt2", Strategy("fsdp", reduces_each=True), ("--compute.reduce_gradients=each_micro_batch",)),
    ("gpt2 with muon", *zero(2, ZERO)),
    ("llama", Strategy("hsdp", shard_size=2), ("--compute.reduce_gradients=last_micro_batch",)),
    ("llama", *zero(3, LARGE)),
    ("resnet", *zero(1, ZERO)),
    ("adapters", Strategy("fsdp"), ()),
]
MICRO_BATCH_SIZE = 2
MICRO_BATCHES = [1, 1, 2]  # of each step; the first one makes the optimizer's states


def settled_bytes(not_ours):
    """Of live storages. For a moment after a reduction, the thread that made it still holds what was reduced."""
    readings = []
    while len(readings) < 4 or len(set(readings[-4:])) > 1:
        time.sleep(0.05)
        readings.append(sum(size for address, size in live_storages().items() if address not in not_ours))
    return readings[-1]


def live_storages():
    """The bytes of each floating-point storage that a tensor of this process is in, by its address."""
    from torch.distributed.tensor import DTensor

    gc.collect()
    sizes = {}
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    # Nobody else may have asked for a gradient as an object yet.
    tensors += [each.grad for each in tensors if each.is_leaf and each.grad is not None]
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.is_floating_point() and local.dim() > 0 and not local.is_meta:
            sizes[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sizes


def bytes_of_steps(run_dir, recipe, words):
    """The model's shape, and by micro-batches of a step, what is held when its gradients are complete."""
    others = set(live_storages())
    # So that `live_storages` finds what exists before training, too; the imports of all jobs are frozen already.
    with patch.object(gc, "freeze"):
        run, shape, model, train_set = prepared(recipe, run_dir, *words)
    # Whole numbers are not among the storages that are counted, nor an optimizer's single ones.
    whole = sum(buffer.nbytes for buffer in model.buffers() if not (buffer.is_floating_point() and buffer.dim()))
    steps = run.steps(train_set)
    held = {}
    for micro_batches in MICRO_BATCHES:
        step = next(steps)
        for number, batch in enumerate(step.micro_batches(), 1):
            pixels = "pixel_values" in batch
            inputs = {"pixel_values": batch["pixel_values"].float()} if pixels else {"input_ids": batch["input_ids"]}
            step.backward(model(**inputs).logits.square().sum())
            not_ours = others | {tensor.untyped_storage().data_ptr() for tensor in (*batch.values(), *inputs.values())}
            held[number, micro_batches] = settled_bytes(not_ours) + whole
        run.update(step)
    return shape, held


@pytest.mark.slow
@pytest.mark.parametrize(("name", "strategy", "settings"), JOBS)
def test_a_process_holds_what_the_plan_says(name, strategy, settings, tmp_path):
    world_size = 4 if strategy.name == "hsdp" else 3
    recipe, model = MODELS[name]
    size = MICRO_BATCH_SIZE * world_size
    sizes = [{"from": {"steps": step}, "size": size * count} for step, count in enumerate(MICRO_BATCHES) if step != 1]
    words = (
        *model,
        f"--batch.micro_batch_size={MICRO_BATCH_SIZE}",
        f"--batch.global_batch_size={json.dumps(sizes)}",
        f"--train.stop_after_steps={len(MICRO_BATCHES)}",
    )
    place = {"strategy": strategy.name, "world_size": world_size}
    if isinstance(settings, dict):
        write_zero_config(tmp_path, strategy.zero.stage, settings)
        place["accelerate_configs"] = tmp_path
    else:
        words += settings
    results = run_job(bytes_of_steps, tmp_path / "run", recipe, words, **place)
    plan = resolve(load_config(recipe, words), world_size)
    shape = results[0][0]
    for micro_batches in set(MICRO_BATCHES):
        states = model_states(shape, strategy, replace(plan, max_gradient_accumulation_steps=micro_batches))
        # The one bucket that stage 3 keeps.
        bucket = BUCKET * shape.element_bytes if strategy.name == "zero3" else 0
        assert max(held[micro_batches, micro_batches] for _, held in results) == states.held + bucket, micro_batches
        if strategy.name in ("fsdp", "hsdp"):
            # Between two micro-batches there are no gathered weights.
            whole = states.phases[0].transient.get("accumulated gradients", 0)
            assert max(held[1, micro_batches] for _, held in results) == states.held + whole
        if strategy.name == "ddp":
            # The first micro-batch has no gradients beside those that are reduced with the last one.
            assert max(held[1, micro_batches] for _, held in results) == states.peak()[0]


def test_frozen_weights_have_no_gradients_beside_them_either():
    frozen = ParameterShape("weight", (1000,), None, 0)
    model = ModelShape((frozen, ParameterShape("lora", (8,), 0, 0)), frozenset(), 0, 4)
    for strategy, cause, elements in (
        (Strategy("fsdp"), "blocks' gradients", 2 * 8),
        (Strategy("zero3", ZeroSettings(3)), "whole gradients", 8),
    ):
        states = model_states(model, strategy, ONE_MICRO_BATCH)
        assert states.phases[0].transient[cause] == 4 * elements


def test_weights_that_are_stored_in_bf16_have_no_copies_that_autocast_does_not_make():
    adapters = ParameterShape("lora", (8, 4), 0, 0, in_bf16=True)
    frozen = ParameterShape("weight", (1000, 4), None, 0, in_bf16=True, stored_in_bf16=True)
    not_cast = [
        model_states(ModelShape(weights, frozenset(), 0, 4), Strategy("fsdp"), ONE_MICRO_BATCH).not_cast
        for weights in ((adapters,), (adapters, frozen))
    ]
    assert not_cast == [2 * 8 * 4] * 2
