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
    """Notes the operations that are not mere views, foreach calls that CUDA would take one tensor at a time, and
    whatever makes the host wait for the device."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []
        self.slow: list[str] = []
        self.waits: list[str] = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = str(function)
        if not function.is_view:
            self.names.append(name)
        if "_foreach_" in name and not takes_fast_path(arguments):
            self.slow.append(name)
        # `lift_fresh` is the only trace of `torch.tensor(numbers, device=...)`, which copies them from the host.
        copies = any(isinstance(each, torch.Tensor) and each.device.type == "cpu" for each in arguments)
        if copies or name.startswith(("aten._local_scalar_dense", "aten.lift_fresh")):
            self.waits.append(name)
        return function(*arguments, **(keywords or {}))


def takes_fast_path(arguments) -> bool:
    """`check_fast_path_restrictions` of ATen/native/ForeachUtils.h, for floating-point tensors and real scalars.

    All tensors of all lists have one dtype and one device, are strided, and dense without overlaps; tensors at the same
    place of the lists have equal sizes, and equal strides where a size is not 1. Scalars are lists of numbers on the
    host: a list of tensors, also of 0 dimensions, is one of the lists.
    """
    lists = [each for each in arguments if isinstance(each, list | tuple) and isinstance(each[0], torch.Tensor)]
    tensors = [tensor for each in lists for tensor in each]
    alike = len({(tensor.dtype, tensor.device, tensor.layout) for tensor in tensors}) == 1
    dense = all(torch.ops.aten.is_non_overlapping_and_dense(tensor) for tensor in tensors)
    return alike and dense and all(len({_layout(tensor) for tensor in same}) == 1 for same in zip(*lists, strict=True))


def _layout(tensor):
    return tuple(
        (size, stride if size != 1 else None) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


@pytest.mark.parametrize(
    ("recipe", "optimizer_name"),
    [("image_classification/resnet50_imagenet_32k", "Lars"), ("masked_lm/bert_large_64k_128", "Lamb")],
)
def test_a_step_has_few_operations_and_no_wait(recipe, optimizer_name):
    config = load_config(ROOT / f"recipes/{recipe}.json")
    model = recipe_model(config)[0].to(memory_format=torch.channels_last)
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
        assert operations.slow == []
        assert operations.waits == []
