"""Activation checkpointing changes not a bit of the training, on every strategy, and does spare memory."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import tasks
from jobs import JobFailed, run_job, train
from largebatch.config import load_config
from largebatch.model.activation_checkpointing import checkpoint_activations
from paths import BERT, DIGITS, LLAMA, PYDOC, SIMCLR
from test_strategies import SMALL_GPT, SMALL_LLAMA, differences, recorded

SHORT = ("--train.stop_after_steps=4", "--batch.micro_batch_size=8", "--evaluation.max_samples=20")
FULL = "--compute.activation_checkpointing=full"
SELECTIVE = "--compute.activation_checkpointing=selective"
SIZES = '"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2]'
RESNET = f'--model={{"architecture": "resnet", "layer_type": "bottleneck", {SIZES}}}'
# Dropout; a model without weights at first; BatchNorm over all processes; a loss in two passes.
DROPOUT = "--model.dropout=0.2"
CASES = {
    "dropout": (PYDOC, (*SMALL_GPT, DROPOUT), "ddp", (FULL, SELECTIVE)),
    "bf16": (PYDOC, (*SMALL_GPT, DROPOUT, "--precision=bf16"), "fsdp", (SELECTIVE,)),
    "large model": (LLAMA, SMALL_LLAMA, "zero3", (FULL,)),
    "synchronized": (DIGITS, ("--model.sync_batch_norm=true",), "zero1", (FULL,)),
    "two passes": (SIMCLR, (RESNET, "--batch.global_batch_size=32"), "zero3", (FULL,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_not_a_bit_changes(name, tmp_path):
    recipe, overrides, strategy, kinds = CASES[name]
    words = (*overrides, *SHORT)
    plain = run_job(recorded, recipe, tmp_path / "plain", *words, strategy=strategy)[0]
    assert len(plain["metrics"]) == 4
    for word in kinds:
        checkpointed = run_job(recorded, recipe, tmp_path / word, *words, word, strategy=strategy)[0]
        assert not differences(checkpointed, plain)


def bytes_kept(model: nn.Module, **inputs: torch.Tensor) -> int:
    """What autograd keeps of a forward pass, but for parameters."""
    storages = {}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        kept_alive = model(**inputs)
    assert kept_alive.logits.requires_grad
    return sum(storages.values())


def kept_of_a_transformer(recipe: Path, num_layers: int, recompute: bool) -> int:
    config = load_config(recipe, (f"--model.num_layers={num_layers}", "--model.hidden_size=64", "--data.block_size=64"))
    model = tasks.build_model(recipe)(config)
    if recompute:
        checkpoint_activations(model, "full")
    return bytes_kept(model, input_ids=torch.zeros(4, 64, dtype=torch.int64))


@pytest.mark.parametrize("recipe", [PYDOC, BERT])
def test_blocks_keep_their_inputs_only(recipe):
    """What a block keeps is what one more of them makes."""
    plain = kept_of_a_transformer(recipe, 6, recompute=False)
    block = kept_of_a_transformer(recipe, 7, recompute=False) - plain
    inputs = 4 * 64 * 64 * torch.float32.itemsize
    assert kept_of_a_transformer(recipe, 6, recompute=True) == plain - 6 * block + 6 * inputs


def test_residual_blocks_keep_less():
    config = load_config(DIGITS, ("--model.depths=[3, 3, 3]",))
    model = tasks.build_model(DIGITS)(config)
    plain = bytes_kept(model, pixel_values=torch.zeros(4, 1, 16, 16))
    checkpoint_activations(model, "full")
    assert bytes_kept(model, pixel_values=torch.zeros(4, 1, 16, 16)) < plain / 2


@pytest.mark.slow
def test_models_without_such_blocks_are_refused(tmp_path):
    with pytest.raises(JobFailed, match=r'Encoder has no blocks that can be recomputed.*write "none"'):
        run_job(partial(train, run_dir=tmp_path / "run"), SIMCLR, SELECTIVE)
    assert not (tmp_path / "run").exists()
