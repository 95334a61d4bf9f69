"""One process needs no wrapper of DDP."""

import pytest

import tasks
from jobs import run_job
from largebatch.config import load_config
from paths import PYDOC


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
