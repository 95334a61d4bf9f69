"""One process needs no wrapper of DDP."""

import pytest

from jobs import run_job
from paths import PYDOC
from tasks import SMALL


def a_step_alone(run_dir, *words):
    """Whether the model is wrapped, collectives of a step, and operations that only sum or clear gradients in place."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from stepping import prepared, take

    found = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            found.append(str(function))
            return function(*arguments, **(keywords or {}))

    run, _, model, train_set = prepared(PYDOC, run_dir, *SMALL, *words)
    steps = run.steps(train_set)
    with Count():
        take(next(steps), run, model)
    no_gradients = all(parameter.grad is None for parameter in model.parameters())
    is_unwrapped = model is run.backend.unwrapped_model
    return is_unwrapped, [name for name in found if "c10d" in name or "zero_" in name], no_gradients


@pytest.mark.slow
def test_one_process_has_no_wrapper(tmp_path):
    (alone,) = run_job(a_step_alone, tmp_path / "run", "--batch.global_batch_size=16", world_size=1)
    assert alone == (True, [], True)
