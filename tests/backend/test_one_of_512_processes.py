"""What one of 512 processes holds under FSDP2, without the others: torch's fake process group communicates nothing."""

from math import prod

import pytest

from jobs import run_job
from paths import IMAGENET, ROOT

WORLD_SIZE = 512
LLAMA_8B = ROOT / "recipes/causal_lm/llama_8b.json"


def held_by(rank, recipe):
    """The shapes of the model's parameters, the ranges that a process holds, and the bytes that the plan says."""
    from torch import distributed
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from largebatch.backend.fsdp_units import shape_of
    from largebatch.backend.state import own_part
    from largebatch.config import load_config
    from largebatch.estimate.memory import model_states
    from largebatch.estimate.model_shape import Strategy
    from largebatch.estimate.recipe_model import recipe_model
    from largebatch.plan import resolve

    config = load_config(recipe, ["--batch.micro_batch_size=1"])
    plan = resolve(config, WORLD_SIZE)
    model = recipe_model(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    planned = model_states(shape_of(model, plan), Strategy("fsdp"), WORLD_SIZE, plan.states_of, 1).by_kind["weights"]
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD_SIZE)
    mesh = distributed.init_device_mesh("cpu", (WORLD_SIZE,))
    for module in model.modules():
        if type(module).__name__ in (getattr(model, "_no_split_modules", None) or ()):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    parts = [own_part(name, parameter) for name, parameter in model.named_parameters()]
    return shapes, {part.name: (part.start, part.start + part.length) for part in parts if part.length}, planned


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "recipe"), [(0, LLAMA_8B), (511, IMAGENET)])
def test_its_rows_of_every_parameter(rank, recipe):
    ((shapes, ranges, planned),) = run_job(held_by, rank, recipe, strategy="single")
    held = 0
    for name, (rows, *others) in shapes.items():
        # Rows are dealt out in equal parts from the first process on, until there are none left.
        part = -(-rows // WORLD_SIZE)
        first = min(rank * part, rows) * prod(others)
        end = min((rank + 1) * part, rows) * prod(others)
        assert ranges.get(name) == ((first, end) if first < end else None), name
        held += end - first
    # The first process is one of the fullest.
    assert planned == 4 * held if rank == 0 else planned >= 4 * held
