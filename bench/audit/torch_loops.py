"""One loop in plain PyTorch with several wrappers, layers and optimizers."""

import torch
import torch.distributed as dist
from common import audited, network, samples
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def adamw(model):
    return [torch.optim.AdamW(model.parameters())]


def muon_and_adamw(model):
    matrices = [each for each in model.parameters() if each.ndim == 2]
    others = [each for each in model.parameters() if each.ndim != 2]
    return [torch.optim.Muon(matrices), torch.optim.AdamW(others)]


def hybrid_shard(model):
    """Two replicas."""
    sizes = (min(2, dist.get_world_size()), max(1, dist.get_world_size() // 2))
    return fully_shard(model, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "shards")))


def train(indices, micro_batch_size, accumulation, wrap, optimizers_of=adamw, layer=nn.Tanh):
    dist.init_process_group()
    model = wrap(network(layer))
    optimizers = optimizers_of(model)
    data = samples(indices)
    loader = DataLoader(data, micro_batch_size, sampler=DistributedSampler(data, shuffle=False))
    for number, (inputs, targets) in enumerate(loader, start=1):
        loss = nn.functional.cross_entropy(model(inputs), targets) / accumulation
        loss.backward()
        if number % accumulation == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return model


ddp = audited(train, DistributedDataParallel)
fsdp2 = audited(train, fully_shard)
hsdp = audited(train, hybrid_shard)
ddp_muon = audited(train, DistributedDataParallel, muon_and_adamw)
fsdp2_muon = audited(train, fully_shard, muon_and_adamw)
batch_norm = audited(train, DistributedDataParallel, layer=lambda: nn.BatchNorm1d(8))
layer_norm = audited(train, DistributedDataParallel, layer=lambda: nn.LayerNorm(8))
