"""Loops that train the same in every layout, each in another way; `test_audit.py` audits them.

Every public function is one, as `audit` of a user's file is.
"""

import contextlib
import copy
import math
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, Adam, AdamW
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset, TensorDataset, default_collate

_CLASSES = 5
_IGNORED = 4
_inputs = torch.randn(100, 6, generator=torch.Generator().manual_seed(1))
_data = TensorDataset(_inputs, _inputs[:, :_CLASSES].argmax(dim=1))


def _loader(indices, micro_batch_size, drop_last=False, **settings):
    data = Subset(_data, indices)
    sampler = DistributedSampler(data, shuffle=False, drop_last=drop_last)
    return DataLoader(data, micro_batch_size, sampler=sampler, drop_last=drop_last, **settings)


def _network(*layers):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), *(layers or [nn.Tanh()]), nn.Linear(8, _CLASSES))


def _groups(model):
    """Weight decay for matrices alone."""
    matrices = [each for each in model.parameters() if each.ndim > 1]
    others = [each for each in model.parameters() if each.ndim < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def _steps(model, optimizer, batches, accumulation, loss_of=cross_entropy, after_step=lambda: None):
    for number, (inputs, targets) in enumerate(batches, start=1):
        (loss_of(model(inputs), targets) / accumulation).backward()
        if number % accumulation == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            after_step()
    return model


def _trained(model, kind, indices, size, accumulation, loss_of=cross_entropy, **settings):
    """The usual loop: an optimizer of a kind, and each process's share of the samples."""
    optimizer = kind(model.parameters(), **settings)
    return _steps(model, optimizer, _loader(indices, size), accumulation, loss_of)


def sum_over_the_global_count(indices, size, accumulation):
    batch = size * accumulation * dist.get_world_size()

    def loss_of(outputs, targets):
        # DDP divides by the processes, `_steps` by the micro-batches.
        share = cross_entropy(outputs, targets, reduction="sum") / batch
        return share * dist.get_world_size() * accumulation

    return _trained(DDP(_network()), Adam, indices, size, accumulation, loss_of)


def mean_over_tokens(indices, size, accumulation):
    """Also of a last batch that is smaller, since it is divided by the targets that the step has."""
    model = DDP(_network())
    optimizer = AdamW(_groups(model))
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


def no_sync(indices, size, accumulation):
    model = DDP(_network(), gradient_as_bucket_view=True)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    for number, (inputs, targets) in enumerate(_loader(indices, size), start=1):
        is_last = number % accumulation == 0
        with contextlib.nullcontext() if is_last else model.no_sync():
            cross_entropy(model(inputs), targets, label_smoothing=0.1).backward()
        if is_last:
            for each in model.parameters():
                each.grad /= accumulation
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
    return model


def averaged_by_hand(indices, size, accumulation):
    """Without DDP; each process has its own consecutive samples."""
    model = _network()
    share = len(indices) // dist.get_world_size()
    step = size * accumulation
    # Of each step's samples, or of fewer if there are no more.
    mine = []
    for start in range(0, len(indices), step * dist.get_world_size()):
        first = start + dist.get_rank() * min(step, share)
        mine += indices[first : first + min(step, share)]
    optimizer = torch.optim.RMSprop(model.parameters())
    batches = DataLoader(Subset(_data, mine), size)
    for number, (inputs, targets) in enumerate(batches, start=1):
        (cross_entropy(model(inputs), targets) / accumulation).backward()
        if number % accumulation == 0:
            for each in model.parameters():
                dist.all_reduce(each.grad)
                each.grad /= dist.get_world_size()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return model


class _Split(IterableDataset):
    def __init__(self, indices):
        self.indices = indices

    def __iter__(self):
        # The same number in each process.
        for start in range(0, len(self.indices) - dist.get_world_size() + 1, dist.get_world_size()):
            yield _data[self.indices[start + dist.get_rank()]]


def iterable_dataset(indices, size, accumulation):
    model = DDP(_network())
    return _steps(model, torch.optim.NAdam(model.parameters()), DataLoader(_Split(indices), size), accumulation)


def drop_last(indices, size, accumulation):
    model = DDP(_network())
    batches = _loader(indices, size, drop_last=True)
    return _steps(model, AdamW(model.parameters(), amsgrad=True), batches, accumulation)


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


def tied_frozen_and_unused(*layout):
    model = _Tied()
    model.first.weight = None
    return _trained(DDP(model, find_unused_parameters=True), Adam, *layout)


def shared_layer(*layout):
    torch.manual_seed(1)
    layer = nn.Linear(6, 6)
    return _trained(DDP(nn.Sequential(layer, nn.Tanh(), layer)), torch.optim.Adagrad, *layout)


def frozen_first_layer(indices, size, accumulation):
    model = _network()
    model[0].requires_grad_(False)
    model = DDP(model)
    trained = [each for each in model.parameters() if each.requires_grad]
    return _steps(model, SGD(trained, lr=0.1), _loader(indices, size), accumulation)


def recomputed_and_compiled(*layout):
    class Recomputed(nn.Sequential):
        def forward(self, inputs):
            return checkpoint(super().forward, inputs, use_reentrant=False)

    model = torch.compile(DDP(Recomputed(_network(nn.SiLU()))))
    return _trained(model, Adam, *layout, foreach=True)


def dropout_with_own_seeds(*layout):
    model = DDP(_network(nn.GELU(), nn.Dropout(0.1)))
    torch.manual_seed(100 + dist.get_rank())
    return _trained(model, AdamW, *layout)


def group_norm(*layout):
    return _trained(DDP(_network(nn.GroupNorm(2, 8), nn.ReLU())), AdamW, *layout)


def frozen_batch_norm(*layout):
    model = _network(nn.BatchNorm1d(8), nn.ReLU())
    model[1].eval()
    return _trained(DDP(model), AdamW, *layout)


def averaged_weights(indices, size, accumulation):
    """EMA, and a cosine schedule with a warmup that counts steps."""
    model = DDP(_network())
    optimizer = AdamW(_groups(model), lr=0.01)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [2])
    averaged = torch.optim.swa_utils.AveragedModel(
        model.module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )

    def after_step():
        averaged.update_parameters(model.module)
        schedule.step()

    return _steps(model, optimizer, _loader(indices, size), accumulation, after_step=after_step)


def teacher(indices, size, accumulation):
    """Self-distillation: the targets come from an average of the weights."""
    print("a line of a long output\n" * 50_000)
    model = DDP(_network())
    average = copy.deepcopy(model.module).requires_grad_(False)
    optimizer = SGD(model.parameters(), lr=0.1, weight_decay=0.1)

    def after_step():
        for old, new in zip(average.parameters(), model.module.parameters(), strict=True):
            old.lerp_(new.detach(), 0.1)

    batches = [(inputs, average(inputs).argmax(dim=1)) for inputs, _ in _loader(indices, size)]
    return _steps(model, optimizer, batches, accumulation, after_step=after_step)


def scaled_loss(indices, size, accumulation):
    model = DDP(_network())
    optimizer = AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    for number, (inputs, targets) in enumerate(_loader(indices, size), start=1):
        scaler.scale(cross_entropy(model(inputs), targets) / accumulation).backward()
        if number % accumulation == 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return model


def two_models(indices, size, accumulation):
    """As in adversarial training: each has its own optimizer, and they step one after another."""
    models = nn.ModuleList([DDP(_network()), DDP(_network(nn.ReLU()))])
    optimizers = [Adam(each.parameters()) for each in models]
    for number, (inputs, targets) in enumerate(_loader(indices, size), start=1):
        first = models[0](inputs)
        (cross_entropy(first, targets) / accumulation).backward()
        (mse_loss(models[1](inputs), first.detach()) / accumulation).backward()
        if number % accumulation == 0:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return models


def optimizer_with_sharded_states(*layout):
    return _trained(DDP(_network()), ZeroRedundancyOptimizer, *layout, optimizer_class=AdamW, lr=0.01)


def sparse_embedding(indices, size, accumulation):
    torch.manual_seed(1)
    model = DDP(nn.Sequential(nn.Embedding(_CLASSES, 8, sparse=True), nn.Linear(8, _CLASSES)))
    rows = torch.optim.SparseAdam(model.module[0].parameters())
    others = Adam(model.module[1].parameters())
    for number, (_, targets) in enumerate(_loader(indices, size), start=1):
        (cross_entropy(model(targets), targets) / accumulation).backward()
        if number % accumulation == 0:
            for optimizer in (rows, others):
                optimizer.step()
                optimizer.zero_grad()
    return model


def noted_norms(*layout):
    """Also before the last micro-batch; without a limit, nothing is clipped."""
    model = DDP(_network())

    def loss_of(outputs, targets):
        nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        return cross_entropy(outputs, targets)

    return _trained(model, SGD, *layout, loss_of, lr=0.1)


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
    """As Python starts them: only those that are forked, as before 3.14, can have a function without a name."""
    collate = default_collate if sys.version_info >= (3, 14) else lambda rows: default_collate(rows)
    loader = _loader(indices, size, num_workers=1, collate_fn=collate)
    model = DDP(_network())
    return _steps(model, SGD(model.parameters(), lr=0.1), loader, accumulation)
