"""What `elsewhere` says of DDP, DataParallel and split batches, against the real classes."""

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from jobs import run_job
from largebatch.tools.effective_batch.other_frameworks import OtherBatch

SAMPLES = torch.randn(24, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def build_model():
    model = torch.nn.Linear(5, 1, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-1, 1, 5))
        model.bias.zero_()
    return model


def losses_of(model, samples):
    return model(samples).square()


def gradient_of(samples, reduction):
    """In one process, in one backward pass."""
    model = build_model()
    getattr(losses_of(model, samples), reduction)().backward()
    return model.weight.grad


def first_step_under_ddp(batch_size, accumulation, loss):
    """The samples that this process trained on, and the gradient that its optimizer would see."""
    torch.distributed.init_process_group("gloo")
    model = DistributedDataParallel(build_model())
    loader = DataLoader(SAMPLES, batch_size=batch_size, sampler=DistributedSampler(SAMPLES, shuffle=False))
    batches = [batch for batch, _ in zip(loader, range(accumulation), strict=False)]
    for number, batch in enumerate(batches, 1):
        model.require_backward_grad_sync = number == accumulation
        (getattr(losses_of(model, batch), loss)() / accumulation).backward()
    # The process ends with this; DDP waits for ever if it goes after the group that it reduces with.
    return torch.cat(batches).tolist(), model.module.weight.grad.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "batch_size", "accumulation", "loss"), [(2, 4, 1, "mean"), (4, 3, 2, "mean"), (3, 4, 1, "sum")]
)
def test_ddp(world_size, batch_size, accumulation, loss):
    there = OtherBatch("ddp", batch_size, world_size, accumulation=accumulation, loss=loss)
    results = run_job(first_step_under_ddp, batch_size, accumulation, loss, world_size=world_size)

    samples = torch.tensor([sample for loaded, _ in results for sample in loaded], dtype=torch.float64)
    assert len(samples) == there.global_batch_size == len(samples.unique(dim=0))
    assert {len(loaded) for loaded, _ in results} == {there.per_process * accumulation}
    expected = there.gradient_factor * gradient_of(samples, "mean")
    for _, gradient in results:
        torch.testing.assert_close(torch.tensor(gradient, dtype=torch.float64), expected)


@pytest.mark.slow
def test_a_sum_under_ddp_is_world_size_times_smaller():
    results = run_job(first_step_under_ddp, 4, 1, "sum", world_size=3)
    samples = torch.tensor([sample for loaded, _ in results for sample in loaded], dtype=torch.float64)
    for _, gradient in results:
        gradient = torch.tensor(gradient, dtype=torch.float64)
        torch.testing.assert_close(3 * gradient, gradient_of(samples, "sum"))


@pytest.mark.parametrize(("batch_size", "processes"), [(64, 8), (12, 4)])
def test_split_batches_of_accelerate(batch_size, processes):
    """Accelerate's own sampler of each process, which is what `split_batches` sets."""
    there = OtherBatch("ddp", batch_size, processes, split_batches=True)
    sampler = BatchSampler(range(2 * batch_size), batch_size, drop_last=False)
    first = [
        next(iter(BatchSamplerShard(sampler, num_processes=processes, process_index=index, split_batches=True)))
        for index in range(processes)
    ]
    assert [len(indices) for indices in first] == [there.per_process] * processes
    assert len({index for indices in first for index in indices}) == there.global_batch_size


class DataParallelOnCPU(DataParallel):
    """torch's own forward pass of DataParallel, with its four CUDA operations replaced by what they are said to do.

    `scatter` cuts with `torch.chunk`, as torch's `comm::scatter` does; replicas are the module itself, whose gradients
    add up like those that torch reduces; outputs are put together in order. So these tests show how the class hands
    the batch to devices and what follows for the gradient, given these four.
    """

    def __init__(self, module, num_devices):
        super().__init__(module)
        self.device_ids, self.src_device_obj = list(range(num_devices)), torch.device("cpu")
        self.output_device = 0
        self.shares = []

    def scatter(self, inputs, kwargs, device_ids):
        assert not kwargs
        chunks = inputs[0].chunk(len(device_ids))
        self.shares = [len(chunk) for chunk in chunks]
        return [(chunk,) for chunk in chunks], [{} for _ in chunks]

    def replicate(self, module, device_ids):
        return [module] * len(device_ids)

    def parallel_apply(self, replicas, inputs, kwargs):
        return [replica(*words, **named) for replica, words, named in zip(replicas, inputs, kwargs, strict=True)]

    def gather(self, outputs, output_device):
        assert output_device == 0
        return torch.cat(outputs)


@pytest.mark.parametrize(("batch_size", "devices"), [(7, 8), (24, 8), (10, 4), (17, 5), (9, 6)])
@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_data_parallel_cuts_one_batch(batch_size, devices, loss):
    there = OtherBatch("dp", batch_size, devices, loss=loss)
    model = DataParallelOnCPU(build_model(), devices)
    (samples,) = (batch for batch, _ in zip(DataLoader(SAMPLES, batch_size=batch_size), range(1), strict=False))
    getattr(losses_of(model, samples), loss)().backward()

    assert model.shares == [share for share in there.per_device if share]
    assert len(there.per_device) == devices
    assert sum(model.shares) == there.global_batch_size
    expected = there.gradient_factor * gradient_of(samples, "mean")
    torch.testing.assert_close(model.module.weight.grad, expected)
