"""Contrastive losses over the batch of all processes, with two towers and a temperature in DDP."""

import importlib.util
from pathlib import Path

import torch
import torch.distributed as dist
from common import audited
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.images = nn.Linear(6, 4)
        self.texts = nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, pairs):
        first, second = pairs.unbind(1)
        return normalize(self.images(first)), normalize(self.texts(second)), self.scale.exp()


def train(indices, micro_batch_size, accumulation, loss_of, **settings):
    """With accumulation: features of all micro-batches without a gradient, then each again beside the others'."""
    dist.init_process_group()
    torch.manual_seed(1)
    model = DistributedDataParallel(Towers())
    loss = loss_of(**settings)
    optimizer = torch.optim.AdamW(model.parameters())
    data = Subset(torch.randn(100, 2, 6, generator=torch.Generator().manual_seed(1)), indices)
    batches = list(DataLoader(data, micro_batch_size, sampler=DistributedSampler(data, shuffle=False)))
    for start in range(0, len(batches), accumulation):
        step = batches[start : start + accumulation]
        with torch.no_grad():
            kept = [model(pairs)[:2] for pairs in step]
        for number, pairs in enumerate(step):
            *features, scale = model(pairs)
            parts = zip(*kept[:number], features, *kept[number + 1 :], strict=True)
            loss(*map(torch.cat, parts), scale, None).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def by_hand(gather):
    """The whole matrix of similarities in each process."""

    def loss(images, texts, scale, _):
        logits = scale * torch.cat(gather(images)) @ torch.cat(gather(texts)).T
        labels = torch.arange(len(logits))
        return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2

    return loss


def gather_without_gradient(features):
    parts = [torch.empty_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, features)
    parts[dist.get_rank()] = features
    return parts


def of_open_clip(name="ClipLoss", **settings):
    # The file alone: the package imports torchvision.
    file = Path(importlib.util.find_spec("open_clip").origin).with_name("loss.py")
    spec = importlib.util.spec_from_file_location("open_clip_loss", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)(rank=dist.get_rank(), world_size=dist.get_world_size(), **settings)


with_gradient = audited(train, by_hand, gather=all_gather)
without_gradient = audited(train, by_hand, gather=gather_without_gradient)
own_negatives = audited(train, by_hand, gather=lambda features: [features])
open_clip_default = audited(train, of_open_clip)
open_clip_local = audited(train, of_open_clip, local_loss=True)
open_clip_both = audited(train, of_open_clip, local_loss=True, gather_with_grad=True)
open_clip_sigmoid = audited(train, of_open_clip, name="SigLipLoss")
