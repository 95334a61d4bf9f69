"""Torch's own optimizers, and clipping, take all tensors of a group together, those that FSDP2 shards, too."""

from collections import Counter

import pytest

from jobs import run_job
from paths import PYDOC
from tasks import SMALL

SGD = '--optimizer={"name": "sgd", "nesterov": true, "weight_decay": 0.001, "clip_norm": 0.1}'


def operations_of_an_update(run_dir, *words: str) -> tuple[int, Counter]:
    """The number of parameters, and how often the second update calls each operation on DTensors and local tensors.

    Views and new tensors are not counted.
    """
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    from stepping import prepared, take

    counts = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            if any(issubclass(each, DTensor) for each in types):
                counts[f"of DTensors: {function}"] += 1
                return NotImplemented
            if not function.is_view and "empty" not in str(function):
                counts[str(function)] += 1
            return function(*arguments, **(keywords or {}))

    run, _, model, train_set = prepared(PYDOC, run_dir, *SMALL, *words)
    clip_and_step = run.backend.clip_and_step

    def counted(*arguments, **keywords):
        counts.clear()
        with Count():
            return clip_and_step(*arguments, **keywords)

    run.backend.clip_and_step = counted
    steps = run.steps(train_set)
    for _ in range(2):
        take(next(steps), run, model)
    return sum(1 for _ in model.parameters()), counts


@pytest.mark.slow
def test_sharded_tensors_are_clipped_and_stepped_together(tmp_path):
    for num_parameters, counts in run_job(operations_of_an_update, tmp_path / "run", SGD, strategy="fsdp"):
        assert num_parameters >= 16
        # Decay, momentum, Nesterov's look ahead and the step itself add, at most once for each of two groups.
        assert {name: count for name, count in counts.items() if count > 8} == {}
        # The norm is that of local shards, and one sum.
        assert [name for name in counts if "DTensor" in name and ("norm" in name or "stack" in name)] == []
        assert sum(count for name, count in counts.items() if "reduce" in name) == 1
