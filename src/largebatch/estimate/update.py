"""What the optimizer computes in an update; the rest of it is element by element, and is not counted."""

from largebatch.estimate.model_shape import ModelShape
from largebatch.plan.contract import RunPlan
from largebatch.plan.layer_owners import layer_owners


def most_products(plan: RunPlan, model: ModelShape, owners: int) -> int:
    """The operations of matrix products in an update, on the process that has the most of them.

    Parameter groups are stepped one after another, and each ends with an exchange, in which all wait for the last.

    Args:
        plan: The plan, which has the optimizer.
        model: The model.
        owners: The number of processes that layers are divided over.
    """
    assert plan.optimizer_entry is not None
    total = 0
    for group in model.exchanged_groups:
        options = {**plan.optimizer_options, **model.group_options[group]}
        shapes = {each.name: each.shape for each in model.trained if each.group == group}
        loads = [0] * owners
        for name, owner in layer_owners(shapes, owners).items():
            loads[owner] += plan.optimizer_entry.products(options, shapes[name])
        total += max(loads)
    return total
