"""DDP's buckets, and one process, which needs none."""

from types import SimpleNamespace

import numpy as np
import pytest

import tasks
from collectives import Recorder
from jobs import run_job
from largebatch.backend.native import DdpBackend
from largebatch.config import load_config
from largebatch.plan import explain, resolve
from paths import PYDOC
from test_strategies import recorded

# Gradients of 3 MiB.
MODEL = ("--model.num_layers=4", "--model.hidden_size=128", "--model.num_heads=2", "--data.block_size=16")
FEW = ("--batch.micro_batch_size=4", "--evaluation.max_samples=8", "--train.stop_after_steps=3")


@pytest.mark.parametrize(
    ("processes", "given", "used"), [(2, "null", 25), (32, "null", 25), (64, "null", 100), (64, "7", 7)]
)
def test_the_size_of_buckets_depends_on_the_processes(processes, given, used):
    words = ["--batch.global_batch_size=64", "--batch.micro_batch_size=1", f"--compute.ddp_bucket_mib={given}"]
    plan = resolve(load_config(PYDOC, words), processes)
    _, ddp = DdpBackend.accelerate_arguments(SimpleNamespace(plan=plan, on_gpu=False, group=None))["kwargs_handlers"]
    assert ddp.bucket_cap_mb == used
    assert f"buckets of {used} MiB" in explain(plan, "")


def train_and_count(run_dir, *words):
    with Recorder() as recorder:
        result = recorded(PYDOC, run_dir, *MODEL, *FEW, *words)
    return result, sum(each.kind == "all_reduce" and each.elements > 1000 for each in recorder.started)


@pytest.mark.slow
def test_two_processes_give_the_same_bits_in_buckets_of_any_size(tmp_path):
    (one, few), (other, many) = (
        run_job(train_and_count, tmp_path / size, f"--compute.ddp_bucket_mib={size}")[0] for size in ("null", "1")
    )
    assert many > few
    assert [each["loss"] for each in one["metrics"]] == [each["loss"] for each in other["metrics"]]
    for mine, theirs in zip(one["weights"], other["weights"], strict=True):
        assert all(np.array_equal(mine[name], theirs[name]) for name in mine)


def a_step_alone(run_dir, *words):
    """Whether the model is wrapped, collectives of a step, and operations that only sum or clear gradients in place."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from largebatch.optim import build_optimizer
    from largebatch.run import Run, RunOptions

    found = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            found.append(str(function))
            return function(*arguments, **(keywords or {}))

    config = load_config(PYDOC, [*tasks.SMALL, *words], tasks.module("causal_lm", "config").Config)
    run = Run(config, RunOptions(run_dir))
    train_set, _ = run.load(tasks.sources("causal_lm"))
    built = run.build(tasks.build_model(PYDOC))
    model, _ = run.prepare(built, build_optimizer(built, run.plan))
    steps = run.steps(train_set)
    with Count():
        step = next(steps)
        for batch in step.micro_batches():
            step.backward(model(input_ids=batch["input_ids"]).logits.square().sum())
        run.update(step)
    no_gradients = all(parameter.grad is None for parameter in model.parameters())
    return model is built, [name for name in found if "c10d" in name or "zero_" in name], no_gradients


@pytest.mark.slow
def test_one_process_has_no_wrapper(tmp_path):
    (alone,) = run_job(a_step_alone, tmp_path / "run", "--batch.global_batch_size=16", world_size=1)
    is_unwrapped, useless, no_gradients = alone
    assert is_unwrapped
    assert useless == []
    assert no_gradients
