"""Losses of sentence-transformers on the pairs of all processes, in DDP."""

import torch
import torch.distributed as dist
from common import audited
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, features, **_):
        return features | {"sentence_embedding": self.linear(features["inputs"])}


def train(indices, micro_batch_size, _, loss_class, **settings):
    dist.init_process_group()
    torch.manual_seed(1)
    model = SentenceTransformer(modules=[Embedding()], device="cpu")
    loss = loss_class(model, **settings)
    # As the package's own trainer does.
    model = loss.model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    data = Subset(torch.randn(100, 2, 6, generator=torch.Generator().manual_seed(1)), indices)
    for pairs in DataLoader(data, micro_batch_size, sampler=DistributedSampler(data, shuffle=False)):
        sides = [{"inputs": side, "input_ids": side} for side in pairs.unbind(1)]
        loss(sides, None).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


default = audited(train, MultipleNegativesRankingLoss)
gathered = audited(train, MultipleNegativesRankingLoss, gather_across_devices=True)
cached = audited(train, CachedMultipleNegativesRankingLoss, gather_across_devices=True, mini_batch_size=1)
