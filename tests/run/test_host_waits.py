"""Between log points the host does not wait for the device: it never reads what the model computes.

Two kinds of runs do. Where faults.on_non_finite is not "stop", whether a step is taken depends on its gradient's norm,
so that is looked at before. DeepSpeed does so in any case, and stages 1 and 2 once more for each parameter group that
they clip (`is_invalid_grad_norm`). On GPUs it has other branches, which wait besides: stages 1 and 2 with overlap_comm
after each reduction of gradients (`get_accelerator().synchronize`), stage 3 after each backward pass
(`reduce_and_partition_stream.synchronize`), both in `independent_gradient_partition_epilogue`.
"""

from collections import Counter
from contextlib import ExitStack, contextmanager

import pytest
import torch

from host_reads import HostReads
from jobs import run_job
from paths import BERT, DIGITS, PYDOC, SIMCLR

# The first step and the last are logged. Of those between, the first one is left out: engines settle in it.
NUM_STEPS = 6
FIRST, LAST = 2, NUM_STEPS - 1
STEPS_WATCHED = LAST - FIRST

GPT = ("--model.num_layers=1", "--model.hidden_size=16", "--model.num_heads=2", "--data.block_size=16")
DOCUMENTS = ("--data.samples=documents", "--data.num_train_samples=2000")
CLIPPED, NOT_CLIPPED = "--optimizer.clip_norm=1", "--optimizer.clip_norm=null"
RECIPES = {
    "causal_lm": (PYDOC, (*GPT, CLIPPED)),
    "causal_lm in bf16": (PYDOC, (*GPT, NOT_CLIPPED, "--precision=bf16")),
    "causal_lm on documents": (PYDOC, (*GPT, CLIPPED, *DOCUMENTS, '--logging.noise_scale={"every": 1}')),
    "causal_lm that skips": (PYDOC, (*GPT, CLIPPED, "--faults.on_non_finite=skip")),
    "masked_lm": (BERT, GPT),
    "contrastive": (SIMCLR, ("--batch.global_batch_size=64",)),
    "image_classification": (DIGITS, (NOT_CLIPPED,)),
    "image_classification in bf16": (DIGITS, (CLIPPED, "--precision=bf16")),
}
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@contextmanager
def refused_by_cuda():
    """Anything that waits for the GPU raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def reads_of_a_recipe(run_dir, recipe, words, device):
    """Where a recipe's own program reads from the device between log points; on a GPU, raise there."""
    from largebatch.run import Run
    from largebatch.run.step import Step
    from largebatch.tools.local_jobs.training import train

    reads, window = HostReads(), ExitStack()
    steps, micro_batches = Run.steps, Step.micro_batches
    indices = []

    def watched_steps(run, train_set):
        assert run.backend.device.type == device
        for step in steps(run, train_set):
            if step.index == FIRST:
                reads.put_on_device([*run.backend.model.parameters(), *run.backend.model.buffers()])
                window.enter_context(refused_by_cuda() if device == "cuda" else reads)
            if step.index == LAST:
                window.close()
            indices.append(step.index)
            yield step

    def watched_micro_batches(step):
        for batch in micro_batches(step):
            reads.put_on_device(batch)
            yield batch

    Run.steps, Step.micro_batches = watched_steps, watched_micro_batches
    settings = (f"--train.stop_after_steps={NUM_STEPS}", "--logging.every=100", "--data.num_eval_samples=16")
    settings = settings if recipe == PYDOC else settings[:2]
    train(recipe, *settings, *words, run_dir=run_dir)
    assert indices == list(range(NUM_STEPS))
    return reads.found


def reads_by_rank(name, strategy, device, folder):
    recipe, words = RECIPES[name]
    processes = 1 if strategy == "single" else 2 if device == "cpu" else torch.cuda.device_count()
    return run_job(reads_of_a_recipe, folder / "run", recipe, words, device, strategy=strategy, world_size=processes)


EVERYWHERE = [
    "causal_lm",
    "causal_lm in bf16",
    "causal_lm on documents",
    "image_classification",
    "image_classification in bf16",
]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "strategy"),
    [(name, "fsdp") for name in EVERYWHERE]
    + [("causal_lm on documents", "ddp"), ("image_classification in bf16", "ddp")]
    + [("causal_lm in bf16", "single"), ("masked_lm", "single"), ("contrastive", "single")],
)
def test_the_host_reads_nothing_between_log_points(name, strategy, device, tmp_path):
    for found in reads_by_rank(name, strategy, device, tmp_path):
        assert found == []


NORM_IS_FINITE = "aten::_local_scalar_dense in utils.py: is_invalid_grad_norm"
# It compares with a number that it copies to the device.
NORM_OR_A_NUMBER = "torch.tensor in utils.py: mask_nan_or_inf_with_val_inplace"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "name", "each_step"),
    [
        ("single", "causal_lm that skips", {"aten::_local_scalar_dense in native.py: clip_and_step": 1}),
        ("zero1", "causal_lm", {NORM_IS_FINITE: 3, NORM_OR_A_NUMBER: 2}),
        ("zero1", "causal_lm in bf16", {NORM_IS_FINITE: 1, NORM_OR_A_NUMBER: 2}),
        ("zero2", "causal_lm", {NORM_IS_FINITE: 3, NORM_OR_A_NUMBER: 2}),
        ("zero3", "causal_lm", {NORM_IS_FINITE: 1, "torch.tensor in stage3.py: get_grad_norm_direct": 2}),
    ],
)
def test_only_whether_the_norm_is_finite_is_read(strategy, name, each_step, tmp_path):
    """With clipping, DeepSpeed's stages 1 and 2 look once more for each of the two parameter groups."""
    for found in reads_by_rank(name, strategy, "cpu", tmp_path):
        assert Counter(found) == {where: count * STEPS_WATCHED for where, count in each_step.items()}


def test_reads_are_found_and_those_of_host_tensors_are_not():
    weight, host = torch.ones(3), torch.ones(3)
    reads = HostReads()
    reads.put_on_device(weight)
    with reads:
        assert host.sum().item() == 3.0
        weight.to(dtype=torch.float64)
        assert not reads.found
        total = torch.zeros(()).add_((weight * 2).sum())
        ways = [
            total.item,
            total.tolist,
            total.__float__,
            total.__int__,
            total.__bool__,
            total.numpy,
            total.cpu,
            weight.nonzero,
            lambda: weight[weight > 0],
            lambda: torch.equal(weight, host),
        ]
        for number, way in enumerate(ways, 1):
            way()
            assert len(reads.found) >= number, way
    count = len(reads.found)
    total.item()
    assert len(reads.found) == count
