"""What is said of a model's shapes, without an engine, against what FSDP2 makes of the model.

`test_traffic.py` has transformers, whose gathers depend on their units.
"""

import pytest

from jobs import run_job
from paths import SIMCLR


def units_of_a_job(run_dir):
    """Names of each unit's parameters, and whether it is gathered again for the backward pass; counted, and real."""
    from largebatch.backend.fsdp_units import shape_of
    from largebatch.backend.torch_internals import sharded_units
    from largebatch.estimate.recipe_model import recipe_model
    from stepping import prepared

    run, _, model, _ = prepared(SIMCLR, run_dir)
    shape = shape_of(recipe_model(run.config), run.plan)
    counted = {}
    for parameter in shape.parameters:
        counted.setdefault(parameter.unit, []).append(parameter.name)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    real = set()
    root, *others = sharded_units(model)
    for unit in (root, *others):
        # The root is the one that is used first and last.
        again = bool(unit._reshard_after_forward) and unit is not root
        real.add((frozenset(names[id(each.sharded_param)] for each in unit.fsdp_params), again))
    return {(frozenset(unit), number not in shape.gathered_units) for number, unit in counted.items()}, real


@pytest.mark.slow
def test_units_are_those_of_fsdp(run_dir):
    for counted, real in run_job(units_of_a_job, run_dir, strategy="fsdp"):
        assert counted == real
