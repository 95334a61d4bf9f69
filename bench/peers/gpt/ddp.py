"""DistributedDataParallel by hand: `no_sync` for all micro-batches of a step but the last."""

from contextlib import nullcontext
from itertools import count

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
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
    model = DistributedDataParallel(build_model(), gradient_as_bucket_view=True)
    optimizer = build_optimizer(model)
    batches = micro_batches(dist.get_rank(), dist.get_world_size())
    for step in count():
        for micro_step in range(ACCUMULATION):
            with nullcontext() if micro_step == ACCUMULATION - 1 else model.no_sync():
                (mean_loss(model, *next(batches)) / ACCUMULATION).backward()
        clip_grad_norm_(model.parameters(), CLIP_NORM)
        set_learning_rate(optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
        clock.step()
