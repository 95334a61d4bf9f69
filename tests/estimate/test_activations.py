"""Activations that are counted on shapes, against what autograd keeps of a real micro-batch."""

import gc
import json

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

import tasks
from largebatch.config import load_config
from largebatch.errors import UserError
from largebatch.estimate import recipe_model as recipe_model_module
from largebatch.estimate.recipe_model import NotEstimated, activation_bytes, recipe_model
from largebatch.model.activation_checkpointing import checkpoint_activations
from largebatch.task_folders import import_from
from paths import BERT, DIGITS, LLAMA, PYDOC, SIMCLR, VIT_DIGITS

RECOMPUTE = "--compute.activation_checkpointing=full"


def counted(recipe, *words):
    config = load_config(recipe, words)
    return activation_bytes(recipe_model(config), config)


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Count what the CPU's own kernels keep, which can be compared with real numbers."""

    def cpu_kernels(in_bf16):
        return torch.autocast("cpu", torch.bfloat16, enabled=in_bf16, cache_enabled=False)

    monkeypatch.setattr(recipe_model_module, "cuda_kernels", cpu_kernels)


def kept_by_a_forward_pass(recipe, *words):
    """With real numbers; the model's own, without parameters and buffers, but with the logits and their gradient."""
    config = load_config(recipe, words)
    model = tasks.build_model(recipe)(config).train()
    inputs = import_from(recipe.parent, "model").example_batch(config)
    views = 2 if recipe == SIMCLR else 1
    assert {len(each) for each in inputs.values()} == {views * config.batch.micro_batch_size}
    of_loss = 0
    if "targets" in inputs:
        of_loss = 2 * inputs["targets"].numel() * config.model.vocab_size * (2 if config.precision == "bf16" else 4)
    own = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    autocast = torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "bf16", cache_enabled=False)
    with saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
        outputs = model(**inputs)
    # Those that the output layer has computed with its losses.
    kept += [each for each in getattr(getattr(outputs, "grad_fn", None), "gradients", ()) if each is not None]
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    return of_loss + sum(size for address, size in sizes.items() if address not in own)


@pytest.mark.parametrize(
    ("recipe", "precision", "tolerance"),
    [
        (DIGITS, "fp32", 0.005),
        (SIMCLR, "bf16", 0.005),
        (VIT_DIGITS, "fp32", 0),
        (BERT, "bf16", 0.01),
        (PYDOC, "fp32", 0),
        (LLAMA, "bf16", 0),
    ],
)
@pytest.mark.usefixtures("on_the_cpu")
def test_shapes_keep_what_numbers_keep(recipe, precision, tolerance):
    """But for a kernel's scratch."""
    words = ("--precision", precision, "--batch.micro_batch_size=4")
    real = kept_by_a_forward_pass(recipe, *words)
    fake = counted(recipe, *words)
    assert fake == pytest.approx(real, rel=tolerance, abs=0)


def test_the_output_layer_keeps_the_gradient_of_its_weights_and_needs_the_logits_of_a_chunk():
    """At most 2^28, in tiles of 256 tokens, and their gradient."""
    words = ("--batch.micro_batch_size=4", "--data.block_size=128")
    config = load_config(PYDOC, [])
    many = 900_000
    few = 300
    tokens = 512
    more = counted(PYDOC, *words, f"--model.vocab_size={many}") - counted(PYDOC, *words, f"--model.vocab_size={few}")
    weights = (many - few) * config.model.hidden_size
    logits = 2 * (256 * many - tokens * few)
    assert more == (weights + logits) * torch.float32.itemsize


def test_logits_are_gone_when_blocks_are_recomputed():
    words = ("--batch.micro_batch_size=1", "--data.block_size=64", RECOMPUTE)
    small, large, huge = (counted(PYDOC, *words, f"--model.vocab_size={size}") for size in (10, 11, 100_000))
    hidden_size = load_config(PYDOC, []).model.hidden_size
    # A block is larger than few logits, which are not counted, and smaller than many.
    assert large - small == hidden_size * torch.float32.itemsize
    assert huge - small > (hidden_size + 64) * (100_000 - 10) * torch.float32.itemsize


@pytest.mark.parametrize("recipe", [PYDOC, BERT])
def test_blocks_that_are_recomputed_keep_their_inputs_only(recipe):
    words = ("--batch.micro_batch_size=4", "--data.block_size=64", "--model.hidden_size=64", RECOMPUTE)
    fewer, more = (counted(recipe, *words, f"--model.num_layers={number}") for number in (6, 7))
    assert more - fewer == 4 * 64 * 64 * torch.float32.itemsize


def test_residual_blocks_that_are_recomputed_keep_their_inputs_only():
    """Of 64 channels of 2 x 2 pixels."""
    words = ("--batch.micro_batch_size=4", RECOMPUTE)
    fewer, more = (counted(DIGITS, *words, f"--model.depths=[1, 1, {number}]") for number in (2, 3))
    assert more - fewer == 4 * 64 * 2 * 2 * torch.float32.itemsize


def live_after_a_forward_pass(recipe, words):
    """Bytes that the allocator has given and not got back, by torch's profiler."""
    config = load_config(recipe, words)
    model = tasks.build_model(recipe)(config).train()
    checkpoint_activations(model, config.compute.activation_checkpointing)
    tokens = torch.randint(256, (config.batch.micro_batch_size, config.data.block_size))
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "bf16", cache_enabled=False)
    gc.collect()  # An earlier model is held by cycles, and would be given back while this one is measured.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, autocast:
        outputs = model(input_ids=tokens, targets=tokens)
    assert outputs.requires_grad
    return sum(event.self_cpu_memory_usage for event in profiler.events())


@pytest.mark.parametrize(("what", "precision"), [("selective", "bf16"), ("full", "fp32")])
@pytest.mark.usefixtures("on_the_cpu")
def test_a_layer_that_is_computed_again_keeps_what_the_allocator_says(what, precision):
    words = ("--precision", precision, "--batch.micro_batch_size=4", "--compute.activation_checkpointing", what)
    layers = [(*words, f"--model.num_layers={number}") for number in (2, 6)]
    fewer, more = (live_after_a_forward_pass(LLAMA, each) for each in layers)
    planned = counted(LLAMA, *layers[1]) - counted(LLAMA, *layers[0])
    assert planned == pytest.approx(more - fewer, rel=0.05)


def test_masks_of_documents_are_kept_in_each_layer_unless_a_kernel_needs_none():
    """As numbers in bf16, of shape (micro-batch, 1, tokens, tokens)."""
    data = {"source": "datasets", "path": "json", "data_files": {"train": "a", "eval": "b"}, "tokenizer": "bytes"}
    data |= {"block_size": 64, "num_train_samples": 64, "num_eval_samples": 1, "attention": "document"}
    short = ("--batch.global_batch_size=4", "--batch.micro_batch_size=4", "--precision=bf16")
    words = (*short, "--learning_rate.warmup=null", "--model.num_layers=3", "--data", json.dumps(data))
    masked, apart = (counted(PYDOC, *words, "--compute.attention", each) for each in ("sdpa", "flex_attention"))
    whole = counted(PYDOC, *words, "--data.attention=block")
    assert apart == whole
    # The positions, which the embedding keeps, are the rest.
    assert masked - whole == pytest.approx(3 * 4 * 64 * 64 * torch.bfloat16.itemsize, rel=0.02)
    with pytest.raises(UserError, match='which "flash_attention_2" ignores; write one of eager, sdpa'):
        counted(PYDOC, *words, "--compute.attention=flash_attention_2")


def test_a_task_without_an_example_batch_is_not_estimated(monkeypatch):
    monkeypatch.delattr(import_from(DIGITS.parent, "model"), "example_batch")
    with pytest.raises(NotEstimated, match="has no example_batch"):
        counted(DIGITS)


def test_a_model_that_looks_at_numbers_is_not_estimated(monkeypatch):
    def nothing_that_fits(config):
        return {"pixel_values": torch.zeros(config.batch.micro_batch_size)}

    monkeypatch.setattr(import_from(DIGITS.parent, "model"), "example_batch", nothing_that_fits)
    with pytest.raises(NotEstimated, match="the model does not run on shapes alone: tuple index out of range"):
        counted(DIGITS)
