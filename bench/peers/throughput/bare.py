"""A bare compiled loop: `torch.compile`, bf16 autocast, a fused optimizer, pinned batches, no wrapper, no logging."""

import torch
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from peers.throughput.job import build_optimizer, mean_loss


def batches(job):
    loader = DataLoader(
        job.samples,
        batch_size=job.micro_batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=4 if job.device.type == "cuda" else 0,
        pin_memory=job.device.type == "cuda",
    )
    while True:
        for batch in loader:
            yield {name: tensor.to(job.device, non_blocking=True) for name, tensor in batch.items()}


def train(clock, job):
    layout = torch.channels_last if job.is_image else torch.preserve_format
    model = job.model.to(job.device, memory_format=layout).train()
    optimizer = build_optimizer(model, job.optimizer)
    compiled = torch.compile(model, backend=job.compile_backend)
    feed = batches(job)
    while True:
        for _ in range(job.accumulation):
            batch = next(feed)
            if job.is_image:
                batch["pixel_values"] = batch["pixel_values"].to(memory_format=layout)
            with torch.autocast(job.device.type, torch.bfloat16):
                loss = mean_loss(compiled, batch)
            (loss / job.accumulation).backward()
        if job.clip_norm is not None:
            clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        clock.step()
