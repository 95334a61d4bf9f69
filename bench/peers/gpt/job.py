"""A GPT-2 of 3 million parameters on the bytes of Python's reference, on CPU processes over gloo."""

from collections.abc import Iterator
from pydoc_data.topics import topics

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

VOCABULARY = 256
BLOCK = 128
WIDTH = 256
LAYERS = 4
HEADS = 4
SAMPLES = 3200
MICRO_BATCH = 2
ACCUMULATION = 4
CLIP_NORM = 1.0


def build_model() -> GPT2LMHeadModel:
    """The model, the same in every process."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=BLOCK,
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=HEADS,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def build_optimizer(model: torch.nn.Module) -> torch.optim.AdamW:
    """Fused AdamW; weights of matrices alone decay."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.99), eps=1e-6, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Warmup over 40 steps."""
    for group in optimizer.param_groups:
        group["lr"] = 0.002 * min(1.0, (step + 1) / 40)


def micro_batches(rank: int, world_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This process's inputs and labels for ever, int64 (MICRO_BATCH, BLOCK) both; one shuffle for all processes."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    tokens = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).astype(np.int64))
    blocks = tokens[: SAMPLES * BLOCK + 1].unfold(0, BLOCK + 1, BLOCK)
    shuffle = torch.Generator().manual_seed(0)
    while True:
        for chosen in torch.randperm(SAMPLES, generator=shuffle)[rank::world_size].split(MICRO_BATCH):
            rows = blocks[chosen]
            yield rows[:, :-1], rows[:, 1:]


def mean_loss(model: torch.nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy over the tokens of a micro-batch."""
    return cross_entropy(model(input_ids=inputs).logits.flatten(0, 1), labels.flatten())
