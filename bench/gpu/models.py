"""Models of the shipped recipes on the device, and a step of them."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gpu.jobs import JOBS
from gpu.turns import Variant, device
from largebatch.config import load_config
from largebatch.task_folders import import_from
from record import ROOT

GPT2 = "causal_lm/gpt2_124m.json"
LLAMA = "causal_lm/llama_8b.json"
RESNET_LARS = "image_classification/resnet50_imagenet_32k.json"
BERT_LAMB = "masked_lm/bert_large_64k_128.json"
WORDS = {LLAMA: ("--model.num_layers=8", "--batch.micro_batch_size=1")}
SMALL = {
    GPT2: (*JOBS["gpt2_124m"].small, "--data.block_size=16", "--batch.micro_batch_size=2"),
    LLAMA: (*JOBS["llama_1b"].small, "--data.block_size=16"),
    RESNET_LARS: JOBS["resnet50"].small,
    BERT_LAMB: ("--model.hidden_size=32", "--model.num_layers=2", "--model.num_heads=2"),
}
Batch = dict[str, torch.Tensor]


def build(recipe: str, is_small: bool) -> tuple[Any, nn.Module]:
    """A recipe's config, and its model on the device in training mode."""
    path = ROOT / "recipes" / recipe
    config = load_config(path, [*WORDS.get(recipe, ()), *(SMALL[recipe] if is_small else ())])
    torch.manual_seed(0)
    # Billions of weights would take minutes on the host.
    with device():
        model = import_from(path.parent, "model").build_model(config)
    return config, model.to(device()).train()


def batch_of(config: Any) -> Batch:
    """The arguments of a language model, random tokens on the device."""
    size = (config.batch.micro_batch_size, config.data.block_size + 1)
    tokens = torch.randint(config.model.vocab_size, size, device=device())
    return {"input_ids": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def train_on(model: nn.Module, batch: Batch) -> None:
    """A forward and a backward pass of a language model."""
    with torch.autocast(device().type, torch.bfloat16):
        losses = model(**batch)
    losses.sum().backward()
    model.zero_grad(set_to_none=True)


def fixed(step: Callable[[], object]) -> Variant:
    """A variant with nothing to set."""
    return lambda: step


def join() -> torch.device:
    """Make the process group of this job, and return the device of this process."""
    on_gpu = torch.cuda.is_available()
    own = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(own)
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
    return own
