"""FSDP2 by hand: `fully_shard` for each block and the whole, gradients reduced with the last micro-batch of a step."""

from itertools import count

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

from peers.gpt.job import (
    ACCUMULATION,
    CLIP_NORM,
    build_model,
    build_optimizer,
    mean_loss,
    micro_batches,
    set_learning_rate,
)


def train(clock):
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = build_model()
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    optimizer = build_optimizer(model)
    batches = micro_batches(dist.get_rank(), dist.get_world_size())
    for step in count():
        for micro_step in range(ACCUMULATION):
            is_last = micro_step == ACCUMULATION - 1
            model.set_is_last_backward(is_last)
            model.set_requires_gradient_sync(is_last)
            (mean_loss(model, *next(batches)) / ACCUMULATION).backward()
        clip_grad_norm_(model.parameters(), CLIP_NORM)
        set_learning_rate(optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
        clock.step()
