"""`largebatch effective-batch`, by hand and by documentation."""

import pytest

from largebatch.__main__ import build_parser
from largebatch.tools.effective_batch import FRAMEWORKS, effective_batch


def script(words):
    return effective_batch(build_parser("effective-batch").parse_args(["effective-batch", *words.split()]))


@pytest.mark.parametrize(
    ("words", "size", "samples", "processes"),
    [
        ("--from ddp --batch-size 256 --nodes 2", 512, 256, 2),
        ("--from hf-trainer --batch-size 4 --devices 8 --nodes 2 --accumulation 3", 192, 4, 16),
        # As Accelerate's `split_batches` divides what a loader returns.
        ("--from ddp --batch-size 64 --devices 8 --split-batches", 64, 8, 8),
        ("--from dp --batch-size 7 --devices 8", 7, 7, 1),
        # Asynchronous workers do not make one larger batch; synchronous ones do (Chen et al. 2016, section 3).
        ("--from parameter-server --batch-size 32 --devices 8", 32, 32, 1),
        ("--from parameter-server --batch-size 32 --devices 8 --gradients average", 256, 32, 8),
    ],
)
def test_the_effective_batch(words, size, samples, processes):
    batch = script(words)
    found = (batch.global_batch_size, batch.samples_per_process, batch.processes_per_update)
    assert found == (size, samples, processes)


@pytest.mark.parametrize("framework", sorted({*FRAMEWORKS} - {"dp", "parameter-server"}))
def test_7_on_8_devices_is_56_and_on_10_nodes_560(framework):
    assert script(f"--from {framework} --batch-size 7 --devices 8").global_batch_size == 56
    assert script(f"--from {framework} --batch-size 7 --devices 8 --nodes 10").global_batch_size == 560


def test_the_table_and_the_recipes_lines(output_of):
    words = ["effective-batch", "--from=dp", "--batch-size=64", "--devices=8", "--accumulation=3"]
    table, recipe = output_of(*words, "--lr=0.1").split("in the recipe:\n")
    assert [line.split()[-1] for line in table.splitlines()] == ["192", "8", "8", "3"]
    assert '"batch": {"global_batch_size": 192, "micro_batch_size": 8},' in recipe
    assert '"base_lr": 0.1, "reference_batch_size": 192, "scaling": "none"}' in recipe
    assert '"base_lr": "LR"' in output_of(*words)


def test_a_sum_needs_another_learning_rate_of_sgd(output_of):
    """One step of SGD on the sum over the processes there, and on the mean here, by hand: lr x 3."""
    words = "--from horovod --batch-size 8 --devices 3 --gradients sum"
    output = output_of("effective-batch", *words.split())
    assert "3 times as large as the recipe's" in output
    assert "multiply the learning rate by 3 and divide the weight decay by 3" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--from ddp --batch-size 9 --devices 2 --split-batches", "nearest: 8, 10; or remove --split-batches"),
        ("--from dp --batch-size 8 --nodes 2", "or use --from ddp"),
    ],
)
def test_refused_with_what_to_write(words, message, refusal_of):
    assert message in refusal_of("effective-batch", *words.split())
