"""A step of LARS or LAMB on a GPU is a few dozen kernels, however many layers there are, and the host never waits."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from largebatch.config import load_config
from largebatch.estimate.recipe_model import recipe_model
from largebatch.optim import build_optimizer
from largebatch.plan import resolve
from paths import ROOT

MAX_PER_GROUP = 60


class Operations(TorchDispatchMode):
    """Notes the operations that are not mere views, and whatever makes the host wait for the device."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []
        self.waits: list[str] = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = str(function)
        if not function.is_view:
            self.names.append(name)
        # `lift_fresh` is the only trace of `torch.tensor(numbers, device=...)`, which copies them from the host.
        copies = any(isinstance(each, torch.Tensor) and each.device.type == "cpu" for each in arguments)
        if copies or name.startswith(("aten._local_scalar_dense", "aten.lift_fresh")):
            self.waits.append(name)
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize(
    ("recipe", "optimizer_name"),
    [("image_classification/resnet50_imagenet_32k", "Lars"), ("masked_lm/bert_large_64k_128", "Lamb")],
)
def test_a_step_has_few_operations_and_no_wait(recipe, optimizer_name):
    config = load_config(ROOT / f"recipes/{recipe}.json")
    model = recipe_model(config).to(memory_format=torch.channels_last)
    optimizer = build_optimizer(model, resolve(config, world_size=64))
    assert type(optimizer).__name__ == optimizer_name
    groups = optimizer.param_groups
    assert [group["layerwise"] for group in groups] == [True, False]
    assert min(len(group["params"]) for group in groups) > 50
    for parameter in model.parameters():
        assert parameter.is_meta
        parameter.grad = torch.zeros_like(parameter)
    for group in groups:
        optimizer.param_groups = [group]
        optimizer.step()
        operations = Operations()
        with operations:
            optimizer.step()
        assert 5 < len(operations.names) <= MAX_PER_GROUP, operations.names
        assert operations.waits == []
