"""Loops that train the same in every layout, each in another way; `test_audit.py` audits them.

Every public function is one, as `audit` of a user's file is.
"""

import contextlib
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset, default_collate

_CLASSES = 5
_IGNORED = 4
_inputs = torch.randn(100, 6, generator=torch.Generator().manual_seed(1))
_data = TensorDataset(_inputs, _inputs[:, :_CLASSES].argmax(dim=1))


def _loader(indices, micro_batch_size):
    data = Subset(_data, indices)
    return DataLoader(data, micro_batch_size, sampler=DistributedSampler(data, shuffle=False))


def _network(*layers):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), *(layers or [nn.Tanh()]), nn.Linear(8, _CLASSES))


def _steps(model, optimizer, batches, accumulation, loss_of=cross_entropy, before_step=lambda: None):
    for number, (inputs, targets) in enumerate(batches, start=1):
        (loss_of(model(inputs), targets) / accumulation).backward()
        if number % accumulation == 0:
            before_step()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return model


def mean_over_tokens(indices, size, accumulation):
    """Also of a last batch that is smaller, since it is divided by the targets that the step has."""
    model = DDP(_network())
    optimizer = torch.optim.AdamW(model.parameters())
    batches = [(inputs, targets.masked_fill(targets == _IGNORED, -100)) for inputs, targets in _loader(indices, size)]
    for start in range(0, len(batches), accumulation):
        step = batches[start : start + accumulation]
        targets = sum((targets >= 0).sum() for _, targets in step)
        dist.all_reduce(targets)
        for number, (inputs, labels) in enumerate(step, start=1):
            with contextlib.nullcontext() if number == len(step) else model.no_sync():
                loss = cross_entropy(model(inputs), labels, reduction="sum")
                (loss * dist.get_world_size() / targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return model


def averaged_by_hand(indices, size, accumulation):
    """It also prints a lot."""
    print("a line of a long output\n" * 50_000)
    model = _network()

    def average():
        for each in model.parameters():
            dist.all_reduce(each.grad)
            each.grad /= dist.get_world_size()

    optimizer = torch.optim.RMSprop(model.parameters())
    return _steps(model, optimizer, _loader(indices, size), accumulation, before_step=average)


def drop_last(indices, size, accumulation):
    model = DDP(_network())
    data = Subset(_data, indices)
    sampler = DistributedSampler(data, shuffle=False, drop_last=True)
    batches = DataLoader(data, size, sampler=sampler, drop_last=True)
    return _steps(model, torch.optim.AdamW(model.parameters(), amsgrad=True), batches, accumulation)


class _Tied(nn.Module):
    """Tied, frozen and unused weights, and layers that are computed again in the backward pass."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(6, 8)
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.GELU())
        self.last = nn.Linear(8, 6)
        self.last.weight = nn.Parameter(self.first.weight.T.clone())
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(6, 6)

    def forward(self, inputs):
        hidden = nn.functional.linear(self.frozen(inputs), self.last.weight.T, self.first.bias)
        return self.last(checkpoint(self.middle, hidden, use_reentrant=False))


def tied_frozen_and_unused(indices, size, accumulation):
    model = _Tied()
    model.first.weight = None
    model = DDP(model, find_unused_parameters=True)
    trained = [each for each in model.parameters() if each.requires_grad]
    return _steps(model, torch.optim.Adam(trained), _loader(indices, size), accumulation)


def compiled(indices, size, accumulation):
    model = torch.compile(DDP(_network()))
    return _steps(model, torch.optim.Adam(model.parameters(), foreach=True), _loader(indices, size), accumulation)


def dropout_with_own_seeds(indices, size, accumulation):
    model = DDP(_network(nn.GELU(), nn.Dropout(0.1)))
    torch.manual_seed(100 + dist.get_rank())
    return _steps(model, torch.optim.AdamW(model.parameters()), _loader(indices, size), accumulation)


def optimizer_with_sharded_states(indices, size, accumulation):
    model = DDP(_network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    return _steps(model, optimizer, _loader(indices, size), accumulation)


def sparse_embedding(indices, size, accumulation):
    torch.manual_seed(1)
    model = DDP(nn.Sequential(nn.Embedding(_CLASSES, 8, sparse=True), nn.Linear(8, _CLASSES)))
    rows = torch.optim.SparseAdam(model.module[0].parameters())
    others = torch.optim.Adam(model.module[1].parameters())
    for number, (_, targets) in enumerate(_loader(indices, size), start=1):
        (cross_entropy(model(targets), targets) / accumulation).backward()
        if number % accumulation == 0:
            for optimizer in (rows, others):
                optimizer.step()
                optimizer.zero_grad()
    return model


def noted_norms(indices, size, accumulation):
    """Also before the last micro-batch; without a limit, nothing is clipped."""
    model = DDP(_network())

    def loss_of(outputs, targets):
        nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        return cross_entropy(outputs, targets)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return _steps(model, optimizer, _loader(indices, size), accumulation, loss_of)


def weights_computed_together(indices, size, accumulation):
    """Of which processes have the same but for rounding; with settings that are no numbers."""
    model = _network()
    sums = _inputs[dist.get_rank() :: dist.get_world_size()].mean(dim=0)
    dist.all_reduce(sums)
    with torch.no_grad():
        model[-1].bias.copy_((sums / dist.get_world_size())[:_CLASSES])
    model = DDP(model)
    groups = [{"params": [*model.parameters()], "names": ("a", "b"), "rank": dist.get_rank()}]
    return _steps(model, torch.optim.Adafactor(groups), _loader(indices, size), accumulation)


def loader_processes(indices, size, accumulation):
    data = Subset(_data, indices)
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, size, sampler=sampler, num_workers=1, collate_fn=lambda rows: default_collate(rows))
    model = DDP(_network())
    return _steps(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, accumulation)
