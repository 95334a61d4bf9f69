"""Training metrics of the task's own: sums over micro-batches and processes, and what is refused."""

from types import SimpleNamespace

import pytest
import torch

from largebatch.errors import UserError
from largebatch.run.record.task_metrics import TaskMetrics
from largebatch.system.endings import OwnEnding
from recording import begin


def logged(*micro_batches, contributes=True):
    metrics = TaskMetrics()
    for values in micro_batches:
        metrics.add(values, contributes)
    return metrics


def means(*processes):
    mine = [{name: [float(part) for part in parts] for name, parts in each.values.items()} for each in processes]
    return processes[0].over_processes(SimpleNamespace(gather_objects=lambda _: mine))


def test_sums_over_all_micro_batches_and_processes_are_divided_once():
    weight = torch.tensor(2.0, requires_grad=True)
    first = logged({"accuracy": (torch.tensor(1), 4), "scale": 1.0}, {"accuracy": (torch.tensor(3), 4), "scale": 7})
    second = logged(
        {"accuracy": (2, 2), "scale": weight * 4, "loss_of_masks": (weight * 3, torch.tensor(4)), "none": (0, 0)}
    )
    # A pass that is made for the other processes, and a process that has logged nothing.
    third = logged({"accuracy": (torch.tensor(5.0), 8), "empty": (1.0, 1)}, contributes=False)
    found = means(first, second, third, logged())
    assert found == {"accuracy": 6 / 10, "scale": 7.0, "loss_of_masks": 1.5}
    # What is logged keeps no graph.
    assert not any(getattr(part, "requires_grad", False) for parts in second.values.values() for part in parts)


def test_a_logged_tensor_may_change_afterward():
    """As FSDP's gathered weights do, which it frees."""
    scale = torch.tensor(2.0, dtype=torch.double)
    metrics = logged({"scale": scale, "mean": (scale, 1)})
    scale.zero_()
    assert means(metrics) == {"scale": 2.0, "mean": 2.0}


def test_sums_in_bf16_count_beyond_256_and_a_pass_for_the_others_adds_no_nan():
    ones = (torch.ones((), dtype=torch.bfloat16), 1)
    metrics = logged(*[{"accuracy": ones}] * 300)
    metrics.add({"accuracy": (torch.tensor(float("nan")), 4)}, contributes=False)
    assert means(metrics) == {"accuracy": 1.0}


@pytest.mark.parametrize(
    "values",
    [
        (torch.ones(3),),
        ((torch.ones(3), 3),),
        ((1.0, torch.ones(1)),),
        (None,),
        ((1, 2, 3),),
        ((1.0, 2), 3.0),
        (3.0, (1.0, 2)),
    ],
)
def test_what_is_neither_a_number_nor_always_a_pair_is_refused(values):
    with pytest.raises(UserError, match=r"^run.log: 'x' is .*; log a number, or a pair of numbers \(sum, weight\)"):
        logged(*({"x": value} for value in values))


def test_a_name_that_every_line_has(tmp_path):
    metrics = begin(tmp_path, OwnEnding()).metrics
    metrics.add(1, torch.tensor(8.0), 4, torch.tensor(1.0), logged({"recall": (1, 2), "temperature": 3}))
    line = metrics.log(1, dict)
    assert (line["loss"], line["recall"], line["temperature"]) == (2.0, 0.5, 3.0)
    # Also one that lines have only on a GPU.
    for step, name in enumerate(("lr", "mfu"), 2):
        metrics.add(step, torch.tensor(8.0), 4, torch.tensor(1.0), logged({name: 3}))
        with pytest.raises(UserError, match=f"run.log: each line has a '{name}' already; choose another name"):
            metrics.log(step, dict)
