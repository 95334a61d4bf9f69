"""`largebatch effective-batch`, by hand, by documentation, and against Accelerate itself."""

import shlex

import pytest
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler

from largebatch.__main__ import build_parser, main
from largebatch.tools.effective_batch import FRAMEWORKS, effective_batch


def answer(words, capsys):
    assert main(["effective-batch", *shlex.split(words)]) == 0
    return capsys.readouterr().out


def script(words):
    return effective_batch(build_parser("effective-batch").parse_args(["effective-batch", *shlex.split(words)]))


@pytest.mark.parametrize(
    ("words", "size", "samples", "processes"),
    [
        ("--from ddp --batch-size 256 --nodes 2", 512, 256, 2),
        ("--from hf-trainer --batch-size 4 --devices 8 --nodes 2 --accumulation 3", 192, 4, 16),
        ("--from dp --batch-size 7 --devices 8", 7, 7, 1),
        # Asynchronous workers do not make one larger batch; synchronous ones do (Chen et al. 2016, section 3).
        ("--from parameter-server --batch-size 32 --devices 8", 32, 32, 1),
        ("--from parameter-server --batch-size 32 --devices 8 --gradients average", 256, 32, 8),
    ],
)
def test_the_effective_batch(words, size, samples, processes, capsys):
    lines = answer(words, capsys).splitlines()
    assert lines[0] == f"effective batch: {size}"
    assert [line.split()[-1] for line in lines[1:3]] == [str(samples), str(processes)]


@pytest.mark.parametrize("framework", sorted({*FRAMEWORKS} - {"dp", "parameter-server"}))
def test_7_on_8_devices_is_56_and_on_10_nodes_560(framework):
    assert script(f"--from {framework} --batch-size 7 --devices 8").global_batch_size == 56
    assert script(f"--from {framework} --batch-size 7 --devices 8 --nodes 10").global_batch_size == 560


def test_the_table_and_the_recipes_lines(capsys):
    words = "--from dp --batch-size 64 --devices 8 --accumulation 2 --lr 0.1"
    lines = answer(words, capsys)
    assert "accumulation                 2\n" in lines
    assert '"batch": {"global_batch_size": 128, "micro_batch_size": 8},' in lines
    assert '"base_lr": 0.1, "reference_batch_size": 128, "scaling": "none"}' in lines
    assert '"base_lr": "LR"' in answer(words.replace("--lr 0.1", ""), capsys)


def test_a_sum_needs_another_learning_rate_of_sgd(capsys):
    """One step of SGD on the sum over the processes there, and on the mean here, by hand: lr x 3."""
    words = "--from horovod --batch-size 8 --devices 3 --gradients sum"
    assert "3 times as large as the recipe's" in answer(words, capsys)
    assert "multiply the learning rate by 3 and divide the weight decay by 3" in answer(words, capsys)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--from ddp --batch-size 9 --devices 2 --split-batches", "nearest: 8, 10; or remove --split-batches"),
        ("--from dp --batch-size 8 --nodes 2", "or use --from ddp"),
    ],
)
def test_refused_with_what_to_write(words, message, capsys):
    assert main(["effective-batch", *shlex.split(words)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("batch_size", "processes"), [(64, 8)])
def test_split_batches_of_accelerate(batch_size, processes):
    """Accelerate's own sampler of each process, which is what `split_batches` sets."""
    ours = script(f"--from ddp --batch-size {batch_size} --devices {processes} --split-batches")
    sampler = BatchSampler(range(2 * batch_size), batch_size, drop_last=False)
    first = [
        next(iter(BatchSamplerShard(sampler, num_processes=processes, process_index=index, split_batches=True)))
        for index in range(processes)
    ]
    assert [len(indices) for indices in first] == [ours.samples_per_process] * processes
    assert len({index for indices in first for index in indices}) == ours.global_batch_size
